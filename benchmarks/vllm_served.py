"""The parts of `make vllm-test` with a server: faults, draining, `outrider prove --endpoint`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from outrider import LLM
from outrider.integrations.vllm.child import free_port
from outrider.integrations.vllm.mapping import Wish, command

ROOT = Path(__file__).parents[1]
WORK = Path(__file__).parent / ".vllm"
VENV = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm")
TEXTS = ROOT / "src/outrider/bench/texts"
SMALL = ["--enforce-eager", "--max-model-len=1024"]
LENGTH, LONG = 96, 700
Figures = dict[str, Any]
Server = tuple[subprocess.Popen[bytes], httpx.Client]


def keep(name: str, found: Any) -> None:
    (WORK / f"{name}.json").write_text(json.dumps(found, indent=1))


@contextmanager
def running(args: list[str], port: int) -> Iterator[Server]:
    """A server from the moment that it answers; terminated at the end if it still runs."""
    environment = {**os.environ, "OUTRIDER_VLLM": str(VENV / "bin/vllm")}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    process = subprocess.Popen(args, env=environment)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
    try:
        wait_until_ready(process, client)
        yield process, client
    finally:
        client.close()
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@contextmanager
def front(*flags: str) -> Iterator[Server]:
    """`outrider serve --backend vllm`."""
    port = free_port()
    args = [sys.executable, "-m", "outrider", "serve", "bundled", "--backend", "vllm"]
    args += ["--port", str(port), "--dtype", "float32", "--log-level", "warning"]
    with running([*args, *(f"--vllm-arg={arg}" for arg in SMALL), *flags], port) as server:
        yield server


@contextmanager
def bare(wish: Wish) -> Iterator[Server]:
    """vLLM itself, without our front."""
    port = free_port()
    args, _ = command(wish, host="127.0.0.1", port=port)
    with running([str(VENV / "bin/vllm"), *args, *SMALL], port) as server:
        yield server


def wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    raise SystemExit("the server did not come up")


def accepted(client: httpx.Client) -> tuple[int, int]:
    """(accepted, drafted) as vLLM's metrics have it."""
    found = {"accepted": 0, "draft": 0}
    for line in client.get("/metrics").text.splitlines():
        for name in found:
            if line.startswith(f"vllm:spec_decode_num_{name}_tokens_total"):
                found[name] += int(float(line.rsplit(" ", 1)[1]))
    return found["accepted"], found["draft"]


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """vLLM's engine core and workers below a process, by the names they give themselves."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
            names[int(folder.name)] = (folder / "cmdline").read_bytes()
        except OSError:
            continue

    def is_below(pid: int) -> bool:
        while pid > 1:
            if pid == process.pid:
                return True
            pid = parents.get(pid, 0)
        return False

    return [pid for pid in names if names[pid].startswith(b"VLLM::") and is_below(pid)]


def are_alive(pids: list[int]) -> int:
    """How many of them still run; a zombie does not."""
    states = []
    for pid in pids:
        try:
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return sum(state != "Z" for state in states)


def kill_in_mid_stream(server: Server, body: Figures) -> list[str]:
    """The events of a stream after the first, with vLLM's workers killed after it."""
    process, client = server
    streamed = {**body, "stream": True, "max_tokens": LONG}
    with client.stream("POST", "/v1/completions", json=streamed) as stream:
        lines = stream.iter_lines()
        next(lines)
        killed = workers(process)
        assert killed, "no worker of vLLM's was found"
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        return [line.removeprefix("data: ") for line in lines if line]


def error_of(events: list[str]) -> str:
    """The error with which a stream ended, and whether the end was marked."""
    error = json.loads(events[-2])["error"]
    return f"{error['message']} ({error['code']}), then {events[-1]}"


def run_served() -> None:
    """Our front before a real vLLM: predictions, a killed worker, a restart, a drain."""
    found: Figures = {}
    # vLLM shows drafters no salt, so each count needs a prompt that was not decoded before.
    records = (TEXTS / "edit.jsonl").read_text().splitlines()[:2]
    prompt, other = (json.loads(record)["prompt"] for record in records)
    llm = LLM("bundled", dtype="float32", num_draft_tokens=0)
    plain, expected = (
        result.text for result in llm.generate([prompt, other], max_tokens=LENGTH, ignore_eos=True)
    )
    body = {
        "prompt": prompt,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
    }
    guess = {"type": "content", "content": expected}

    def ask(**more: Any) -> str:
        answer = client.post("/v1/completions", json={**body, **more}).json()
        text: str = answer["choices"][0]["text"]
        return text

    with front("--proposer", "hybrid", "--restarts", "1") as (process, client):
        counts = [accepted(client)]
        found["equal to native"] = ask() == plain
        counts.append(accepted(client))
        found["equal with a prediction"] = ask(prompt=other, prediction=guess) == expected
        counts.append(accepted(client))
        for how, first, last in zip(("without", "with"), counts, counts[1:], strict=False):
            accepted_, drafted = (b - a for a, b in zip(first, last, strict=True))
            found[f"accepted / drafted {how} prediction"] = f"{accepted_} / {drafted}"
        refused = client.post("/v1/completions", json={**body, "temperature": 1})
        found["temperature 1"] = f"{refused.status_code}: {refused.json()['error']['message']}"

        events = kill_in_mid_stream((process, client), body)
        found["worker killed in mid-stream, --restarts 1: the stream ends with"] = error_of(events)
        found["health while it restarts"] = client.get("/health").status_code
        started = time.perf_counter()
        wait_until_ready(process, client)
        found["ready again after s"] = round(time.perf_counter() - started)
        found["equal after the restart"] = ask() == plain

        streamed = {**body, "stream": True, "max_tokens": LONG}
        with client.stream("POST", "/v1/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            next(lines)
            working = workers(process)
            process.terminate()
            rest = [line for line in lines if line]
        found["SIGTERM in mid-stream: the stream still ends with"] = rest[-1]
        found["exit code after SIGTERM"] = process.wait(60)
    found["workers left"] = are_alive(working)
    keep("served", found)


def prove(client: httpx.Client, *flags: str) -> Figures:
    base = [sys.executable, "-m", "outrider", "prove", "--max-tokens", "32", "--json"]
    ran = subprocess.run(
        [*base, "--endpoint", str(client.base_url), *flags], stdout=subprocess.PIPE, check=False
    )
    checks = json.loads(ran.stdout.splitlines()[-1])["checks"] if ran.stdout.strip() else []
    return {"exit": ran.returncode, "checks": checks}


def run_proven() -> None:
    """`outrider prove --endpoint` with speculation off and on; a killed worker without restarts."""
    recording, found = WORK / "plain.json", {}
    against = ("--against", str(recording), "--sampled-tokens", "1024")
    with front("-k", "0") as (process, client):
        prove(client, "--record", str(recording))
        found["off, behind our front"] = prove(client, *against)
        body = {"prompt": "def f(x):", "temperature": 0, "ignore_eos": True}
        ended = error_of(kill_in_mid_stream((process, client), body))
        found["killed"] = {"stream": ended, "exit": process.wait(60)}
    wish = Wish(draft_model="bundled:draft", dtype="float32", served_model_name="bundled")
    with bare(wish) as (_, client):
        found["draft model, vLLM itself"] = prove(client, *against)
    keep("proven", found)
