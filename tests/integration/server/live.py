"""A real server on a free loopback port, in this process: tests can also break its engine."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from outrider.contracts import StepBatch, StepOutput
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.server.app import make_app
from outrider.server.run import Server, bind
from outrider.server.service import Service, State
from outrider.server_config import ServerConfig

PROBE: dict[str, Any] = {
    "prompt": "a probe in the dark",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}
LONG: dict[str, Any] = {
    "prompt": "a long way home",
    "max_tokens": 400,
    "temperature": 0,
    "ignore_eos": True,
}
JSON = {"content-type": "application/json"}


class Live:
    """A server that runs until the `with` block is left."""

    def __init__(self, engine: EngineConfig | Engine, **config: Any) -> None:
        options: dict[str, Any] = {"port": 0, "model_name": "tiny"} | config
        self.config = ServerConfig(**options)
        self._engine = engine
        self.key = self.config.api_keys[0] if self.config.api_keys else None

    def __enter__(self) -> Live:
        def load() -> Engine:
            return self._engine if isinstance(self._engine, Engine) else build(self._engine)

        listener = bind(self.config)
        self.port: int = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = Service(self.config, load)
        self.server = Server(self.service, make_app(self.service))
        self.thread = threading.Thread(target=self.server.run, args=([listener],), name="live")
        self.thread.start()
        wait_for(lambda: self.service.state is not State.LOADING)
        auth = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        self.client = httpx.Client(base_url=self.url, timeout=120, headers=auth)
        self.expected_probe = self.probe() if self.service.state is State.READY else ""
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()

    @property
    def has_orders(self) -> bool:
        """Whether the engine's thread has been told something that it has not seen to yet."""
        return self.service.served.engine.has_commands

    @property
    def core(self) -> Engine:
        return self.service.served.core

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return self.client.post(path, json=body, **more)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The reply to a completion request that must succeed."""
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def text(self, **body: Any) -> str:
        text: str = self.complete(**body)["choices"][0]["text"]
        return text

    def direct(self, prompt: list[int], **request: Any) -> Result:
        """The engine's own answer, past all HTTP. Arguments are Engine.add's."""
        work = self.service.served.engine.generate(prompt, **request)
        loop = self.server.loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    def probe(self) -> str:
        return self.text(**PROBE)

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Every chunk of a stream that must succeed; checks that it ends as it should."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return chunks_of(response.text)

    def figure(self, name: str) -> float:
        """One value of /metrics, summed over its labels."""
        page = self.client.get("/metrics").text
        found = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def is_settled(self) -> bool:
        return not any(
            self.figure(name)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        )

    def check(self) -> None:
        """What must be true after every row of the fault matrix."""
        wait_for(self.is_settled, what="requests or KV blocks are left over")
        assert self.client.get("/health").status_code == 200
        assert self.service.num_in_flight == 0
        self.core.kv.check()
        assert self.probe() == self.expected_probe


def chunks_of(text: str) -> list[dict[str, Any]]:
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def wait_for(condition: Any, timeout_s: float = 60.0, what: str = "it never happened") -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


@contextmanager
def raw_connection(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        yield connection


def request_bytes(live: Live, path: str, body: bytes, **headers: str) -> bytes:
    """An HTTP/1.1 request as it goes over the wire."""
    fields = {
        "Host": f"127.0.0.1:{live.port}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    if live.key is not None:
        fields.setdefault("Authorization", f"Bearer {live.key}")
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def begin(live: Live, connection: socket.socket, **body: Any) -> None:
    connection.sendall(request_bytes(live, "/v1/completions", json.dumps(body).encode()))


class Target:
    """The target's forward under a test's control: slow, counted, held, or broken."""

    def __init__(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forward = live.core.target.forward
        self.delay_s = 0.0
        self.num_passes = 0
        self._go = threading.Event()
        self._go.set()
        self._is_held = False
        self.before: Any = None  # called with every batch
        self.after: Any = None  # called with every batch and its output
        monkeypatch.setattr(live.core.target, "forward", self)
        monkeypatch.setattr(live.core, "max_steps", 1)  # one call a pass

    def __call__(self, batch: StepBatch) -> StepOutput:
        self.num_passes += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        if not self._go.is_set():
            self._is_held = True
            self._go.wait(60)
            self._is_held = False
        if self.before is not None:
            self.before(batch)
        output = self._forward(batch)
        if self.after is not None:
            self.after(batch, output)
        return output

    def hold(self) -> None:
        """Stops the engine inside a pass, until `release`."""
        self._go.clear()
        wait_for(lambda: self._is_held, what="no pass to hold")

    def release(self) -> None:
        self._go.set()


def with_options(config: EngineConfig, **options: Any) -> EngineConfig:
    return replace(config, **options)


class Script:
    """Makes the target of a server write given texts, in the true order of steps and drafts.

    One request at a time. Its prompt ends where the first logits are asked for.
    """

    def __init__(self, target: Target, live: Live) -> None:
        self._tokenizer = live.core.tokenizer
        self._wanted: list[int] = []
        self._start = -1
        target.after = self._write

    def say(self, text: str) -> None:
        """What the next request's output will be."""
        self._wanted = [*self._tokenizer.encode(text, special=False), self._tokenizer.eos_ids[0]]
        self._start = -1

    def _write(self, batch: StepBatch, output: StepOutput) -> None:
        rows = batch.logit_rows_R.tolist()
        for row, at in enumerate(rows):
            position = int(batch.positions_T[at]) + 1
            if self._start < 0:
                self._start = position
            index = min(max(position - self._start, 0), len(self._wanted) - 1)
            output.logits_RV[row].fill_(-30.0)
            output.logits_RV[row, self._wanted[index]] = 30.0
        output.draws = None
