"""Proving a server from outside: a small honest one is proven, lossy ones are not."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.prove.endpoint import Endpoint, Output, check_greedy, examine_ranks, load, save

WORDS = [" a", " b", " c", " d", " e", " f", " g", " h"]


class Server(ThreadingHTTPServer):
    """A made-up language model: the law of the next word depends on the last one."""

    def __init__(self, *, knows_extras: bool = True, bias: float = 0.0, flip: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.knows_extras, self.bias, self.flip = knows_extras, bias, flip
        self.rng = random.Random(1)
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def law(self, last: str) -> list[float]:
        weights = [math.exp(((i * 7 + ord(last[-1])) % 5) * 0.9) for i in range(len(WORDS))]
        return [weight / sum(weights) for weight in weights]

    def choice(self, prompt: str, num_tokens: int, temperature: float) -> dict[str, Any]:
        tokens, scores, tops = [], [], []
        last = prompt
        for i in range(num_tokens):
            law = self.law(last)
            order = sorted(range(len(WORDS)), key=lambda j: -law[j])
            at = order[0]
            if temperature:
                with self.lock:
                    at = self.rng.choices(range(len(WORDS)), law)[0]
                    if self.rng.random() < self.bias:
                        at = order[0]  # a draft that is always believed
            elif self.flip and i == 2:
                at = order[-1]
            tokens.append(WORDS[at])
            scores.append(math.log(law[at]))
            tops.append({WORDS[j]: math.log(law[j]) for j in {*order[:5], at}})
            last = WORDS[at]
        scored = {"tokens": tokens, "token_logprobs": scores, "top_logprobs": tops}
        return {"text": "".join(tokens), "logprobs": scored}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "top_k" in body and not self.server.knows_extras:
            self._answer(400, {"error": {"message": "unknown parameter top_k"}})
            return
        choice = self.server.choice(body["prompt"], body["max_tokens"], body["temperature"])
        self._answer(200, {"choices": [choice] * body["n"]})

    def _answer(self, status: int, record: dict[str, Any]) -> None:
        content = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def start() -> Iterator[Any]:
    servers: list[Server] = []

    def begin(**options: Any) -> Server:
        server = Server(**options)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def prove(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(app, ["prove", "--json", "--max-tokens", "8", "--sampled-tokens", "1200", *args])
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, record


def test_an_honest_server_is_proven(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    on, off = start(), start(knows_extras=False)
    code, record = prove(capsys, "--endpoint", on.url, "--baseline", f"{off.url}/v1/")
    assert code == 0, record
    greedy, sampled = record["checks"]
    assert greedy["num_identical"] == greedy["num_outputs"] > 0
    assert sampled["p_value"] > 1e-4
    assert sampled["num_tokens"] >= 1200


def test_a_draft_that_is_always_believed_is_found(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = prove(capsys, "--endpoint", start(bias=0.3).url)
    assert code == 1
    assert not record["proven"]
    assert record["checks"][0]["passed"] is None  # nothing to compare with
    assert record["checks"][1]["p_value"] < 1e-6


def test_another_greedy_token_is_found(
    start: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plain.json"
    args = ["prove", "--endpoint", start().url, "--record", str(file), "--max-tokens", "8"]
    assert run(app, args) == 0
    code, record = prove(capsys, "--endpoint", start(flip=True).url, "--against", str(file))
    assert code == 1
    assert "no near-tie but a bug" in record["checks"][0]["troubles"][0]


def test_mistakes_cost_one_line(
    start: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = start().url
    cases = [
        (["--endpoint", "localhost"], "is a URL"),
        (["--endpoint", "http://127.0.0.1:1"], "does not answer"),
        (["--baseline", url], "need --endpoint"),
        (["--endpoint", url, "--baseline", url, "--against", "x"], "give one of"),
        (["--endpoint", url, "--against", str(tmp_path / "none")], "is no recording"),
    ]
    for args, message in cases:
        capsys.readouterr()
        assert run(app, ["prove", *args]) == 2
        err = capsys.readouterr().err.strip()
        assert message in err
        assert len(err.splitlines()) == 1


def output(*tokens: str, margin: float = 1.0) -> Output:
    tops = [{token: -0.1, "other": -0.1 - margin} for token in tokens]
    return Output(list(tokens), [-0.1] * len(tokens), tops)


def test_a_near_tie_is_no_bug() -> None:
    plain, other = output("x", "y", margin=0.01), output("x", "other")
    check = check_greedy([other], [plain])
    assert check.passed
    assert check.figures["near_ties"] == [pytest.approx(0.01)]
    assert not check_greedy([other], [output("x", "y")]).passed
    assert not check_greedy([output("x")], [output("x", "y")]).passed  # one has ended


def test_recordings_belong_to_their_prompts(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    save([output("x")], ["p"], 4, file)
    assert load(file, ["p"], 4) == [output("x")]
    with pytest.raises(ValueError, match="other --prompts"):
        load(file, ["q"], 4)


def test_certain_tokens_prove_nothing_and_break_nothing() -> None:
    sure = Output(["x"] * 50, [0.0] * 50, [{"x": 0.0, "y": -40.0}] * 50)
    assert examine_ranks([sure]).passed


def test_the_level_is_kept(start: Any) -> None:
    """Twenty honest samples: p-values spread over the unit interval."""
    server = start()
    endpoint = Endpoint(server.url, "toy")
    found = []
    for _ in range(20):
        outputs = [endpoint.complete("q", max_tokens=40, temperature=1.0)[0] for _ in range(5)]
        found.append(examine_ranks(outputs).figures["p_value"])
    assert min(found) > 1e-4
    assert 0.15 < sum(found) / len(found) < 0.85
