"""The front with a stand-in for vLLM behind it: loading, streams, deaths, restarts, draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.server.live import wait_for
from outrider.integrations.vllm.child import Child, free_port
from outrider.integrations.vllm.front import predicted_text
from outrider.server.errors import ApiError
from outrider.testing import write_tiny_llama

STAND_IN = Path(__file__).with_name("stand_in.py")


GPU = {"version": "0.32.0", "is_cpu": False, "has_triton": False}
CPU = {"version": "0.32.0+cpu", "is_cpu": True, "has_triton": False}


def write_program(folder: Path, build: dict[str, Any] | None) -> Path:
    """An executable that could be vLLM's, beside an interpreter that says which build it is."""
    contents = {"vllm": f'exec "{sys.executable}" "{STAND_IN}" "$@"'}
    if build is not None:
        contents["python"] = f"echo '{json.dumps(build)}'"
    for name, line in contents.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    return folder / "vllm"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("bin"), GPU)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("front") / "tiny", vocab_size=128)


class Served:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.client = httpx.Client(base_url=url, timeout=20, trust_env=False)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if self.health() == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(self.process.communicate(timeout=5))

    def health(self) -> int:
        return self.client.get("/health").status_code

    def complete(self, prompt: Any, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def pid(self) -> int:
        """Of who answers; 0: nobody does."""
        pid: int = self.complete("x").json().get("pid", 0)
        return pid


@contextlib.contextmanager
def serving(program: Path, model: Path, *flags: str, **environment: str) -> Iterator[Served]:
    port = free_port()
    command = [sys.executable, "-m", "outrider", "serve", str(model), "--backend", "vllm"]
    process = subprocess.Popen(
        [*command, "--port", str(port), *flags],
        env={**os.environ, "OUTRIDER_VLLM": str(program), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    served = Served(process, f"http://127.0.0.1:{port}")
    try:
        yield served
    finally:
        served.client.close()
        process.kill()
        process.communicate()


def events(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]


def test_requests_pass_streams_end_and_sigterm_drains(
    program: Path, model: Path, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"
    flags = ["--proposer", "prediction"]
    with serving(program, model, *flags, STAND_IN_GO_ON=str(go_on)) as served:
        served.wait_until_ready()
        got = served.complete("hello", temperature=0.5).json()["got"]
        assert got == {"prompt": "hello", "temperature": 0.5}

        whole = served.complete("x", stream=True)
        assert events(whole) == ['{"i": 0}', '{"i": 1}', '{"i": 2}', "[DONE]"]

        cut = events(served.complete("cut", stream=True))
        assert cut[:3] == ['{"i": 0}', '{"i": 1}', '{"i": 2}']
        assert json.loads(cut[3])["error"]["code"] == "engine_stopped"
        assert cut[4:] == ["[DONE]"]

        refused = served.complete("x", speculation={"num_draft_tokens": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation")
        predicted = {"type": "content", "content": "abc"}
        assert "prediction" not in served.complete("x", prediction=predicted).json()["got"]
        assert served.client.get("/metrics").json() == {"path": "/metrics"}
        assert served.client.get("/collective_rpc").status_code == 404
        assert served.client.post("/v1/completions", content="{").status_code == 415

        with served.client.stream(
            "POST", "/v1/completions", json={"prompt": "slow", "stream": True}
        ) as slow:
            lines = slow.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            wait_for(lambda: served.health() == 503)
            go_on.touch()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.process.wait(60) == 0


def test_a_dead_vllm_ends_streams_and_the_process(program: Path, model: Path) -> None:
    with serving(program, model) as served:
        served.wait_until_ready()
        found = events(served.complete("die", stream=True))
        assert json.loads(found[-2])["error"]["type"] == "server_error"
        assert found[-1] == "[DONE]"
        assert served.process.wait(60) == 1


def test_a_dead_vllm_is_started_again(program: Path, model: Path) -> None:
    with serving(program, model, "--restarts", "1") as served:
        served.wait_until_ready()
        first = served.pid()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: served.pid() not in (0, first))
        second = served.pid()
        os.kill(second, signal.SIGKILL)
        assert served.process.wait(60) == 1


def test_an_interrupt_ends_both(program: Path, model: Path) -> None:
    with serving(program, model) as served:
        served.wait_until_ready()
        pid = served.pid()
        served.process.send_signal(signal.SIGINT)
        _, err = served.process.communicate(timeout=60)
        assert served.process.returncode == 130
        assert "Traceback" not in err
        assert not Path(f"/proc/{pid}").exists()


def test_a_vllm_that_cannot_load_costs_one_line(program: Path, model: Path) -> None:
    with serving(program, model, STAND_IN_FAILS="1") as served:
        _, err = served.process.communicate(timeout=60)
        assert served.process.returncode == 2
        assert err.splitlines()[-1] == (
            "outrider: vLLM ended with code 1: ValueError: no such model"
        )


def test_the_cpu_build_serves_greedy_requests_only(tmp_path: Path, model: Path) -> None:
    with serving(write_program(tmp_path, CPU), model) as served:
        served.wait_until_ready()
        refused = served.complete("x", temperature=1)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert "vLLM 0.32.0+cpu does not sample exactly" in refused.json()["error"]["message"]
        assert served.complete("x").status_code == 400  # 1 is the default
        assert served.complete("x", temperature=0).status_code == 200


def test_without_drafts_the_cpu_build_may_sample(tmp_path: Path, model: Path) -> None:
    with serving(write_program(tmp_path, CPU), model, "-k", "0") as served:
        served.wait_until_ready()
        assert served.complete("x", temperature=1).status_code == 200


def test_nobody_outlives_a_stopped_child() -> None:
    async def go() -> tuple[bool, int]:
        child = Child(["sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"])
        await child.start()
        await asyncio.sleep(0.2)
        assert child.process is not None
        await child.stop(grace_s=0.2)
        return child.is_running, child.process.pid

    running, group = asyncio.run(go())
    assert not running
    assert not [member for member in members(group) if member != "Z"]


def members(group: int) -> list[str]:
    """The states of a process group's members."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = file.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(owner) == group:
            found.append(state)
    return found


@pytest.mark.parametrize("bad", [None, "x", {"content": 3}, {"content": [{"text": None}]}])
def test_predictions_must_be_text(bad: object) -> None:
    with pytest.raises(ApiError):
        predicted_text(bad)


def test_predictions_may_come_in_parts() -> None:
    assert predicted_text({"content": [{"text": "a"}, {"text": "b"}]}) == "ab"
    assert predicted_text({"content": "ab"}) == "ab"
