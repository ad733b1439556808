"""Outrider and vLLM against each other on the bundled models: `make vllm-test`.

    python benchmarks/vllm_matrix.py PARTS...      matrix sampled parallel parser serve prove report

vLLM's CPU build runs in an environment of its own (VLLM_VENV, .venv-vllm by default), one instance
at a time. Each part leaves its figures under benchmarks/.vllm/, `report` writes the result file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import report

from outrider import LLM
from outrider.engine.request import Request, Speculation
from outrider.export.vllm import export_vllm
from outrider.integrations.vllm.child import free_port
from outrider.integrations.vllm.mapping import Wish, command
from outrider.integrations.vllm.proposers import CLASSES
from outrider.model.bundled import bundled_path
from outrider.prove.checks import NEAR_TIE
from outrider.prove.identity import explain
from outrider.sampling import SamplingParams

ROOT = Path(__file__).parents[1]
WORK = Path(__file__).parent / ".vllm"
VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
TEXTS = ROOT / "src/outrider/bench/texts"
K, LENGTH, NUM_PROMPTS = 4, 96, 8
HEADS = ("medusa", "eagle3", "dflash")
Figures = dict[str, Any]


def texts(name: str) -> list[str]:
    lines = (TEXTS / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines][:NUM_PROMPTS]


def heads() -> dict[str, Figures]:
    """The bundled heads, exported, with the configuration that serves each."""
    found = {}
    for name in HEADS:
        out = WORK / name
        config_file = WORK / f"{name}.json"
        if not config_file.exists():
            config_file.write_text(json.dumps(export_vllm(bundled_path(name), bundled_path(), out)))
        found[name] = json.loads(config_file.read_text())
    return found


def in_vllm(name: str, job: Figures) -> Figures:
    """Runs the worker; its result is kept under benchmarks/.vllm/NAME.json."""
    (WORK / f"{name}-job.json").write_text(json.dumps({"model": str(bundled_path()), **job}))
    files = [WORK / f"{name}-job.json", WORK / f"{name}.json"]
    worker = Path(__file__).with_name("vllm_worker.py")
    subprocess.run([VENV / "bin/python", worker, *files], check=True)
    found: Figures = json.loads(files[1].read_text())
    return found


def custom(name: str, k: int) -> Figures:
    return {"method": "custom_class", "model": CLASSES[name], "num_speculative_tokens": k}


# --- parts ----------------------------------------------------------------------------------------


def works(llm: LLM, temperature: float = 0.0, names: tuple[str, ...] = ("code", "edit")) -> Any:
    return [
        {
            "name": name,
            "prompts": [llm.engine.tokenizer.encode(text) for text in texts(name)],
            "temperature": temperature,
            "max_tokens": LENGTH,
        }
        for name in names
    ]


def native(works: list[Figures], **config: Any) -> Figures:
    """The same work on our engine, batched as vLLM batches it."""
    llm = LLM("bundled", dtype="float32", max_sequences=8, **config)
    found: Figures = {}
    for work in works:
        params = SamplingParams(
            temperature=work["temperature"], max_tokens=work["max_tokens"], ignore_eos=True, seed=1
        )
        results = llm.generate(work["prompts"], params)
        stats = [result.stats for result in results]
        found[work["name"]] = {
            "tokens": [result.completions[0].tokens for result in results],
            "drafts": sum(s.num_proposals for s in stats),
            "drafted": sum(s.num_drafted for s in stats),
            "accepted": sum(s.num_accepted for s in stats),
        }
    return found


def matrix() -> None:
    plain = plain_engine()
    jobs = works(plain)
    chain = {"proposer_options": {"medusa": {"children": 1}, "eagle3": {"children": 1}}}
    exported = heads()
    draft = {"method": "draft_model", "model": str(bundled_path("draft"))}
    engines: Figures = {
        "plain": None,
        "draft-model": {**draft, "num_speculative_tokens": K},
        **exported,
        "ngram of ours": custom("ngram", K),
        "suffix of ours": custom("suffix", K),
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": K,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    }
    in_vllm("matrix", {"engines": engines, "works": jobs})
    ours: Figures = {"plain": native(jobs, num_draft_tokens=0)}
    ours["draft-model"] = native(jobs, draft_model="bundled:draft", num_draft_tokens=K)
    for name in HEADS:
        folder = "bundled:medusa" if name == "medusa" else exported[name]["model"]
        k = exported[name]["num_speculative_tokens"]
        ours[name] = native(jobs, draft_model=folder, num_draft_tokens=k, **chain)
    suffix = {"suffix": {"tree": False, "shared_tokens": 0}}
    ours["ngram of ours"] = native(jobs, proposer="ngram", num_draft_tokens=K)
    ours["suffix of ours"] = native(
        jobs, proposer="suffix", num_draft_tokens=K, proposer_options=suffix
    )
    (WORK / "native.json").write_text(json.dumps(ours))


def sampled() -> None:
    """Temperature 1 under the ratio rule with sampled drafts, vLLM as it is and repaired."""
    plain = plain_engine()
    jobs = works(plain, 1.0, ("code",))
    jobs[0]["prompts"] *= 3
    draft = {"method": "draft_model", "model": str(bundled_path("draft"))}
    how = {"num_speculative_tokens": K, "draft_sample_method": "probabilistic"}
    engines = {"draft-model": {**draft, **how}, "eagle3": {**heads()["eagle3"], **how}}
    in_vllm("sampled", {"engines": engines, "works": jobs})
    in_vllm("repaired", {"engines": engines, "works": jobs, "repair": True})
    chain = {"proposer_options": {"eagle3": {"children": 1}}, "verifier": "token"}
    ours = {
        "draft-model": native(jobs, draft_model="bundled:draft", num_draft_tokens=K, **chain),
        "eagle3": native(jobs, draft_model=heads()["eagle3"]["model"], num_draft_tokens=K, **chain),
    }
    (WORK / "sampled-native.json").write_text(json.dumps(ours))


def parallel() -> None:
    """Two tensor-parallel workers, one core each."""
    plain = plain_engine()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    in_vllm(
        "parallel",
        {
            "engines": {"eagle3": heads()["eagle3"], "suffix of ours": custom("suffix", K)},
            "works": works(plain, names=("edit",)),
            "options": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        },
    )


def parser() -> None:
    wishes = {
        "tensor parallel 2": Wish(proposer="ngram", tensor_parallel_size=2),
        "pipeline parallel 2": Wish(proposer="suffix", pipeline_parallel_size=2),
        "data parallel 2": Wish(proposer="ngram", data_parallel_size=2),
        "ray, 8 of 2": Wish(
            proposer="ngram", tensor_parallel_size=8, pipeline_parallel_size=2, executor="ray"
        ),
        "table of K": Wish(draft_table=[(1, 4, 4), (5, 64, 0)]),
        "hybrid": Wish(proposer="hybrid"),
    }
    shown = [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "speculative_config",
        "additional_config",
    ]
    lines = {
        name: command(wish, host="127.0.0.1", port=1, more={"predictions": "/tmp"})[0]
        for name, wish in wishes.items()
    }
    in_vllm("parser", {"command_lines": lines, "shown": shown})


@contextmanager
def serving(*flags: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    port = free_port()
    args = ["serve", "bundled", "--backend", "vllm", "--port", str(port), "--dtype", "float32"]
    args += ["--vllm-arg=--enforce-eager", "--vllm-arg=--max-model-len=1024", *flags]
    environment = {
        **os.environ,
        "OUTRIDER_VLLM": str(VENV / "bin/vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "outrider", *args], env=environment)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
    try:
        wait_until_ready(process, client)
        yield process, client
    finally:
        client.close()
        if process.poll() is None:
            process.terminate()
        process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"outrider serve ended with {process.returncode}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("vLLM did not come up")


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


def serve() -> None:
    """A real vLLM behind the front: predictions, a killed worker, a restart, a drain."""
    found: Figures = {}
    record = json.loads((TEXTS / "edit.jsonl").read_text().splitlines()[0])
    plain = plain_engine().generate(record["prompt"], max_tokens=LENGTH, ignore_eos=True)
    body = {
        "prompt": record["prompt"],
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
    }
    streamed = {**body, "stream": True, "max_tokens": 700}
    with serving("--proposer", "hybrid", "--restarts", "1") as (process, client):
        before = accepted(client)
        answer = client.post("/v1/completions", json=body).json()
        middle = accepted(client)
        guess = {"type": "content", "content": plain.text}
        told = client.post("/v1/completions", json={**body, "prediction": guess}).json()
        after = accepted(client)
        found["equal to native"] = answer["choices"][0]["text"] == plain.text
        found["equal with prediction"] = told["choices"][0]["text"] == plain.text
        found["accepted without prediction"] = [b - a for a, b in zip(before, middle, strict=True)]
        found["accepted with prediction"] = [b - a for a, b in zip(middle, after, strict=True)]
        sampled = client.post("/v1/completions", json={**body, "temperature": 1})
        found["sampling after the self-check"] = [sampled.status_code, sampled.text[:200]]

        with client.stream("POST", "/v1/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            next(lines)
            killed = workers(process)
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        found["processes killed in mid-stream"] = len(killed)
        found["the stream then ends with"] = rest[-2:]
        found["health while it restarts"] = client.get("/health").status_code
        started = time.perf_counter()
        wait_until_ready(process, client)
        found["ready again after s"] = time.perf_counter() - started
        again = client.post("/v1/completions", json=body).json()
        found["equal after the restart"] = again["choices"][0]["text"] == plain.text

        with client.stream("POST", "/v1/completions", json=streamed) as stream:
            lines = stream.iter_lines()
            next(lines)
            last = workers(process)
            process.terminate()
            rest = [line for line in lines if line]
        found["stream of a drained server ends with"] = rest[-1]
        found["exit code after SIGTERM"] = process.wait(60)
    found["processes left"] = sum(Path(f"/proc/{pid}").exists() for pid in last)
    (WORK / "serve.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))


def prove() -> None:
    """`outrider prove --endpoint` on the real server, speculation off and on."""
    recording = WORK / "plain.json"
    found: Figures = {}
    base = [sys.executable, "-m", "outrider", "prove", "--max-tokens", "32", "--json"]
    for name, flags in {
        "off": ("-k", "0"),
        "draft-model": ("--draft-model", "bundled:draft", "--no-self-check"),
    }.items():
        with serving(*flags) as (_, client):
            url = ["--endpoint", str(client.base_url)]
            if name == "off":
                subprocess.run([*base, *url, "--record", str(recording)], check=True)
            ran = subprocess.run(
                [*base, *url, "--against", str(recording), "--sampled-tokens", "2048"],
                stdout=subprocess.PIPE,
                check=False,
            )
            found[name] = json.loads(ran.stdout.splitlines()[-1])
    (WORK / "prove.json").write_text(json.dumps(found, indent=1))


# --- the result file ------------------------------------------------------------------------------


def load(name: str) -> Figures:
    file = WORK / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def length(found: Figures) -> float:
    """Tokens of a step with drafts, the correction or bonus token included."""
    return 1 + found["accepted"] / found["drafts"] if found["drafts"] else 1.0


def compare(work: Figures, theirs: list[Any], ours: list[Any]) -> tuple[int, int, int]:
    """Outputs that are identical, part at a near-tie, differ otherwise."""
    same = ties = other = 0
    for prompt, mine, yours in zip(work["prompts"], ours, theirs, strict=True):
        if mine == yours:
            same += 1
            continue
        params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
        request = Request("explain", prompt, params, Speculation(num_draft_tokens=0), 0)
        found = explain(plain_engine().engine, request, 0, mine, yours)
        if found is not None and found.margin < 10 * NEAR_TIE:  # two engines round differently
            ties += 1
        else:
            other += 1
    return same, ties, other


@cache
def plain_engine() -> LLM:
    return LLM("bundled", dtype="float32", num_draft_tokens=0)


def write() -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    theirs, ours = load("matrix"), load("native")
    jobs = {work["name"]: work for work in load("matrix-job")["works"]}
    for work in jobs.values():
        name = work["name"]
        rows = []
        for drafter, found in theirs.items():
            if drafter == "version":
                continue
            if "error" in found:
                rows.append({"drafter": drafter, "identical": found["error"]})
                continue
            got, mine = found[name], ours.get(drafter, {}).get(name)
            same, ties, other = compare(work, got["tokens"], ours["plain"][name]["tokens"])
            rows.append(
                {
                    "drafter": drafter,
                    "identical": f"{same} of {NUM_PROMPTS}",
                    "near-ties": ties,
                    "different": other,
                    "vLLM accepted / drafted": f"{got['accepted']} / {got['drafted']}",
                    "tokens per pass": NUM_PROMPTS
                    * LENGTH
                    / (NUM_PROMPTS * LENGTH - got["accepted"]),
                    "vLLM length": length(got),
                    "native length": length(mine) if mine else "",
                    "ratio": length(got) / length(mine) if mine else "",
                }
            )
        tables[f"greedy, {name}"] = rows
    rows = []
    for drafter in ("draft-model", "eagle3"):
        row: dict[str, Any] = {"drafter": drafter}
        for title, part in (
            ("native", "sampled-native"),
            ("vLLM as it is", "sampled"),
            ("vLLM repaired", "repaired"),
        ):
            got = load(part).get(drafter)
            row[title] = (
                f"{got['code']['accepted']} / {got['code']['drafted']}" if got else "not run"
            )
        rows.append(row)
    if rows:
        tables["temperature 1, code: accepted / drafted, sampled drafts under the ratio rule"] = (
            rows
        )
    parallel = load("parallel")
    rows = []
    for drafter, found in parallel.items():
        if drafter == "version":
            continue
        if "error" in found:
            rows.append({"drafter": drafter, "identical": found["error"], "vLLM length": ""})
            continue
        same, ties, other = compare(
            jobs["edit"], found["edit"]["tokens"], ours["plain"]["edit"]["tokens"]
        )
        shown = f"{same} of {NUM_PROMPTS}, {ties} near-ties, {other} different"
        rows.append({"drafter": drafter, "identical": shown, "vLLM length": length(found["edit"])})
    if rows:
        tables["tensor parallel 2, edit"] = rows
    if served := load("serve"):
        tables["served"] = [
            {"what": what, "found": json.dumps(value)} for what, value in served.items()
        ]
    if proven := load("prove"):
        tables["outrider prove --endpoint"] = [
            {"speculation": name, "check": check["name"], "found": check["found"]}
            for name, record in proven.items()
            for check in record["checks"]
        ]
    if parsed := load("parser"):
        tables["accepted by vLLM's argument parser, not run here"] = [
            {"command line": name, "parsed": json.dumps(found)} for name, found in parsed.items()
        ]
    notes = (
        f"vLLM {theirs.get('version')} (CPU build), bundled target in float32, {NUM_PROMPTS} "
        f"prompts of each kind from held-out packages, {LENGTH} tokens each, K = {K} (a DFlash "
        "block: 7), eight sequences at a time. Lengths are tokens of a step with drafts, the "
        "correction or bonus token included; tokens per pass count all steps of vLLM. "
        "Identity is against the native engine's plain decoding. 'repaired' replaces vLLM's CPU "
        "expand kernel, which loses its result for floating-point values (the temperatures of "
        "draft positions), by one that does not."
    )
    report.write("vllm", "Outrider and vLLM", tables, notes)


PARTS = {
    "matrix": matrix,
    "sampled": sampled,
    "parallel": parallel,
    "parser": parser,
    "serve": serve,
    "prove": prove,
    "report": write,
}

if __name__ == "__main__":
    WORK.mkdir(exist_ok=True)
    for part in sys.argv[1:] or PARTS:
        print(f"--- {part}", flush=True)
        PARTS[part]()
