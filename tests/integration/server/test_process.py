"""The server as a process: signals and exit codes. Rows 14 and 17-20 of the fault matrix."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvloop

from outrider.server.logs import request_id
from outrider.server.run import Running, Server, bind
from outrider.server.service import State
from outrider.server_config import ServerConfig

from .live import LONG, wait_for

# Runs the command line in a process whose engine a test can make slow or break.
SCRIPT = """
import itertools, os, sys, time
from outrider.engine import build as module
{patch}
from outrider.cli import main
main()
"""
SLOW_STEPS = """
build = module.build
def slow(config):
    engine = build(config)
    forward = engine.target.forward
    passes = itertools.count()
    def delayed(batch):
        time.sleep(0.03)
        {fault}
        return forward(batch)
    engine.target.forward = delayed
    engine.max_steps = 1
    return engine
module.build = slow
"""
SLOW_LOADING = """
def slow(config):
    time.sleep(60)
module.build = slow
"""


class Process:
    def __init__(self, patch: str, *args: str, **environment: str) -> None:
        command = [sys.executable, "-c", SCRIPT.format(patch=patch), "serve", *args]
        self.inner = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.inner.stderr is not None
        self.lines.extend(iter(self.inner.stderr.readline, ""))

    def listen(self) -> str:
        """The address, once the process listens."""
        wait_for(lambda: any("http://" in line for line in self.lines), 60, "no address printed")
        found = re.search(r"http://\S+", "".join(self.lines))
        assert found is not None
        return found.group()

    def ready(self) -> str:
        url = self.listen()
        wait_for(lambda: health(url) == 200, 60, "never ready")
        return url

    def end(self, timeout_s: float = 30) -> int:
        code = self.inner.wait(timeout_s)
        self.reader.join(5)
        return code

    def kill(self) -> None:
        self.inner.kill()
        self.end()
        assert self.inner.stderr is not None
        self.inner.stderr.close()


def health(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code
    except httpx.TransportError:
        return 0


@pytest.fixture
def start(folders: tuple[Path, Path]) -> Iterator[Any]:
    started: list[Process] = []

    def run(patch: str = "", *args: str, model: str = "", **environment: str) -> Process:
        options = ["--port", "0", "--threads", "1", *args]
        process = Process(patch, model or str(folders[0]), *options, **environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()


class Stream:
    """A streamed request in a thread of its own."""

    def __init__(self, url: str, headers: dict[str, str], **body: Any) -> None:
        self.text = ""
        self._url = url
        self._headers = headers
        self._body = body
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_for(lambda: self.text, 20, "nothing was streamed")

    def _run(self) -> None:
        try:
            with httpx.stream(
                "POST",
                f"{self._url}/v1/completions",
                json=self._body | {"stream": True},
                headers=self._headers,
                timeout=30,
            ) as response:
                for piece in response.iter_text():
                    self.text += piece
        except httpx.TransportError:
            pass

    def end(self) -> str:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.text


def test_row_17_sigterm_lets_what_runs_finish(start: Any, tmp_path: Path) -> None:
    """And the log tells about it: JSON, with request ids, without prompts or keys."""
    go_on = tmp_path / "go on"  # what runs does not get far before this file is there
    held = f"while next(passes) > 4 and not os.path.exists({str(go_on)!r}): time.sleep(0.01)"
    process = start(
        SLOW_STEPS.format(fault=held), "--log-format", "json", OUTRIDER_API_KEY="sesame-1234"
    )
    url = process.ready()
    assert httpx.post(f"{url}/v1/completions", json=LONG).status_code == 401
    headers = {"authorization": "Bearer sesame-1234", "x-request-id": "abc-1"}
    body = LONG | {"prompt": "top secret", "max_tokens": 20, "speculation": {"off": True}}
    stream = Stream(url, headers, **body)
    process.inner.send_signal(signal.SIGTERM)
    wait_for(lambda: health(url) == 503)
    response = httpx.post(
        f"{url}/v1/completions", json=LONG, headers={"authorization": "Bearer sesame-1234"}
    )
    assert response.status_code == 503
    assert response.headers["retry-after"]
    go_on.touch()
    text = stream.end()
    assert text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in text
    assert process.end() == 0
    records = [json.loads(line) for line in process.lines if line.startswith("{")]
    (mine,) = [r for r in records if r.get("request_id") == "abc-1"]
    assert (mine["status"], mine["path"], mine["tokens"]) == (200, "/v1/completions", 20)
    assert {401, 503} <= {r.get("status") for r in records}
    assert "secret" not in "".join(process.lines)
    assert "sesame" not in "".join(process.lines)


def test_row_18_sigterm_without_draining_is_quick(start: Any) -> None:
    process = start(SLOW_STEPS.format(fault=""), "--drain-timeout", "0")
    url = process.ready()
    stream = Stream(url, {}, **LONG)
    started = time.monotonic()
    process.inner.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert time.monotonic() - started < 5
    assert '"error"' in stream.end()
    assert health(url) == 0  # nobody listens there any more
    with pytest.raises(ProcessLookupError):
        os.kill(process.inner.pid, 0)


def test_rows_19_and_20_not_ready_and_interrupted_while_loading(start: Any) -> None:
    process = start(SLOW_LOADING)
    url = process.listen()
    wait_for(lambda: health(url) == 503)
    for path in ("/health", "/v1/models"):
        response = httpx.get(url + path)
        assert response.status_code == 503
        assert "loading" in response.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/completions", json=LONG).headers["retry-after"]
    assert httpx.get(f"{url}/metrics").status_code == 200
    started = time.monotonic()
    process.inner.send_signal(signal.SIGINT)
    assert process.end() == 130
    assert time.monotonic() - started < 5
    assert "Traceback" not in "".join(process.lines)


def test_row_14_a_broken_engine_ends_the_process_with_an_error(start: Any) -> None:
    fault = 'if len(batch.tokens_T) > 200: raise RuntimeError("broken for good")'
    process = start(SLOW_STEPS.format(fault=fault))
    url = process.ready()
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x" * 300}).status_code == 500
    assert process.end() == 1


def test_what_is_loaded_is_left_out_of_the_search_for_garbage(start: Any) -> None:
    """Through all of it, that search holds up everybody's next token."""
    told = """
import atexit, gc
atexit.register(lambda: print("frozen", gc.get_freeze_count(), file=sys.stderr))
"""
    process = start(told)
    url = process.listen()
    wait_for(lambda: health(url) == 200, 60, "it did not get ready")
    process.inner.send_signal(signal.SIGTERM)
    assert process.inner.wait(20) == 0
    process.reader.join(5)
    (line,) = [line for line in process.lines if line.startswith("frozen")]
    assert int(line.split()[1]) > 10_000


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_small_pieces_of_a_stream_do_not_wait_for_each_other(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Nagle's algorithm is off: else whoever keeps a connection waits 40 ms for every answer."""

    async def main() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind(ServerConfig(port=0))
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(main())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_signal_during_a_request_is_not_logged_with_its_id(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The handler runs in the context of the task that the signal interrupts."""
    ids: list[str] = []
    drained = asyncio.Event()

    async def drain() -> bool:
        ids.append(request_id.get())
        drained.set()
        return True

    async def main() -> list[str]:
        service = SimpleNamespace(config=ServerConfig(), state=State.READY, drain=drain)
        server = Server(cast(Running, service), cast(Any, None))
        server.loop = asyncio.get_running_loop()
        request_id.set("abc-1")
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.wait_for(drained.wait(), 5)
        return ids

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(main()) == [""]
