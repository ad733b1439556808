"""`bench serve` against a small server of the test's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.bench.serve import bench_server
from outrider.bench.workloads import Prompt, Workload
from outrider.errors import ConfigError

WORK = Workload("w", [Prompt("a"), Prompt("b", temperature=0.5), Prompt("c")])


class Handler(BaseHTTPRequestHandler):
    """Three pieces of text for every prompt; it remembers what it was asked."""

    asked: list[dict[str, Any]]
    owner = "outrider"
    status = 200

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        pieces = [{"choices": [{"text": body["prompt"] + str(i)}]} for i in range(3)]
        lines = [*pieces, {"choices": [], "usage": {"completion_tokens": 7}}]
        text = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
        self._send(text.encode())

    def _send(self, body: bytes) -> None:
        self.send_response(self.status if self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "asked", [], raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_of_ours_is_compared_with_its_plain_self(address: str) -> None:
    result = bench_server(address, WORK, [1, 2], 16, None, None)
    assert [(row["clients"], row["contender"]) for row in result.rows] == [
        (1, "plain"),
        (1, "the server"),
        (2, "plain"),
        (2, "the server"),
    ]
    for row in result.rows:
        assert row["num_requests"] == 3
        assert row["ttft_s"] > 0
    assert result.rows[1]["identical"] == "3/3"
    assert result.rows[1]["speedup"] > 0
    bodies = Handler.asked
    assert {body["temperature"] for body in bodies} == {0.0, 0.5}
    assert all(body["stream"] and body["max_tokens"] == 16 for body in bodies)
    assert any(body.get("speculation") == {"off": True} for body in bodies)


def test_no_load_finds_the_prompts_of_another_in_the_cache(address: str) -> None:
    bench_server(address, WORK, [1], 16, None, None)
    salts = [body["cache_salt"] for body in Handler.asked]
    loads = [salts[:1], salts[1:4], salts[4:5], salts[5:]]  # each way: one to warm up, then all
    assert all(len(set(load)) == 1 for load in loads)
    assert len(set(salts)) == len(loads)


def test_no_prompt_runs_twice_under_one_salt(address: str) -> None:
    work = Workload("w", [Prompt("a"), Prompt("b"), Prompt("a", temperature=1.0)])
    bench_server(address, work, [1, 2], 16, None, None)
    asked = [(body["cache_salt"], body["prompt"]) for body in Handler.asked]
    assert len(set(asked)) == len(asked)


def test_another_server_is_what_it_is(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "owner", "vllm")
    result = bench_server(address, WORK, [1], 16, None, None)
    assert [row["contender"] for row in result.rows] == ["the server"]
    assert not any("speculation" in body for body in Handler.asked)


def test_a_refusal_is_passed_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "status", 400)
    with pytest.raises(ConfigError, match=r"refused a request \(400\)"):
        bench_server(address, WORK, [1], 16, None, None)
