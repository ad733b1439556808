"""Clients that leave, and clients that do not read. Rows 1-5 of the fault matrix."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.contracts import StepBatch
from outrider.engine.build import EngineConfig

from .live import LONG, Live, Target, begin, raw_connection, request_bytes, wait_for, with_options

SLOW: dict[str, Any] = LONG | {"speculation": {"off": True}}  # 400 passes


@pytest.fixture(scope="module")
def narrow(engine_config: EngineConfig) -> Iterator[Live]:
    """A server that decodes one sequence at a time."""
    with Live(with_options(engine_config, max_sequences=1), max_queue=8) as live:
        yield live


def test_row_1_closing_a_stream_ends_its_request_with_the_step_under_way(
    live: Live, target: Target
) -> None:
    target.delay_s = 0.02
    with raw_connection(live) as connection:
        begin(live, connection, **SLOW, stream=True)
        seen = b""
        while b"data: " not in seen:
            seen += connection.recv(4096)
        target.hold()
    check_that_nothing_follows(live, target)


def test_row_51_an_ollama_client_that_hangs_up(live: Live, target: Target) -> None:
    target.delay_s = 0.02
    body = {"model": "tiny", "prompt": "x", "raw": True, "options": {"num_predict": 400}}
    with raw_connection(live) as connection:
        connection.sendall(request_bytes(live, "/api/generate", json.dumps(body).encode()))
        seen = b""
        while b'"response"' not in seen:
            seen += connection.recv(4096)
        target.hold()
    check_that_nothing_follows(live, target)


def test_row_2_closing_a_whole_reply_ends_its_request(live: Live, target: Target) -> None:
    target.delay_s = 0.02
    aborted = live.figure("request_success_total")
    with raw_connection(live) as connection:
        begin(live, connection, **SLOW)
        wait_for(lambda: target.num_passes >= 3)
        target.hold()
    check_that_nothing_follows(live, target)
    assert live.figure("request_success_total") == aborted + 1


def check_that_nothing_follows(live: Live, target: Target) -> None:
    """The server hears that the client has gone while a pass is held: that pass is the last."""
    at_close = target.num_passes
    wait_for(lambda: live.has_orders, what="nobody noticed that the client has gone")
    target.delay_s = 0
    target.release()
    wait_for(live.is_settled)
    assert target.num_passes == at_close


def test_row_3_two_hundred_leave_and_the_next_is_answered(live: Live, target: Target) -> None:
    target.delay_s = 0.02
    for i in range(200):
        with raw_connection(live) as connection:
            begin(live, connection, **SLOW, stream=bool(i % 2))
    # If they had stayed, it would have to wait for most of a minute.
    answer = live.post("/v1/completions", LONG | {"max_tokens": 4}, timeout=20)
    assert answer.status_code == 200
    target.delay_s = 0


def test_row_4_closing_while_queued_is_never_prefilled(
    narrow: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(narrow, monkeypatch)
    target.delay_s = 0.02
    seen: set[int] = set()
    target.before = lambda batch: seen.update(batch.tokens_T.tolist())
    (rare,) = narrow.post("/tokenize", {"prompt": "~"}).json()["tokens"]
    with raw_connection(narrow) as first:
        begin(narrow, first, **SLOW | {"logit_bias": {str(rare): -100}})
        wait_for(lambda: narrow.figure("num_requests_running") == 1)
        with raw_connection(narrow) as second:
            begin(narrow, second, prompt="~~~~~", max_tokens=5)
            wait_for(lambda: narrow.figure("num_requests_waiting") == 1)
        wait_for(lambda: narrow.figure("num_requests_waiting") == 0)
    wait_for(narrow.is_settled)
    assert rare not in seen
    target.delay_s = 0
    narrow.check()


def slow_reader(live: Live, **body: Any) -> socket.socket:
    """A connection with a small window that has asked and not read anything yet."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", live.port))
    begin(live, connection, **body, stream=True)
    return connection


BULKY: dict[str, Any] = LONG | {"max_tokens": 450, "n": 16, "logprobs": 20, "seed": 1}


def test_row_5_a_slow_reader_holds_up_nobody_and_gets_everything(live: Live) -> None:
    expected = [c["text"] for c in live.complete(**BULKY)["choices"]]
    with slow_reader(live, **BULKY) as connection:
        wait_for(lambda: live.figure("num_requests_running") > 0)
        assert live.probe() == live.expected_probe
        # The engine is done with it long before the reader is; what waits is one piece a choice.
        wait_for(live.is_settled, 240)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 20)
    texts = [""] * 16
    num_chunks = 0
    for line in received.decode().split("\n"):
        line = line.strip("\r")
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            texts[choice["index"]] += choice["text"]
            num_chunks += 1
    assert texts == expected
    assert num_chunks < 16 * 450  # merged while nobody read


def test_row_5_a_reader_that_stops_reading_is_dropped(engine_config: EngineConfig) -> None:
    with Live(engine_config, send_timeout_s=0.5) as live:
        with slow_reader(live, **BULKY) as connection:
            wait_for(lambda: live.figure("num_requests_running") > 0)
            wait_for(live.is_settled, 240)
            wait_for(lambda: live.service.num_in_flight == 0)
            assert not read_all(connection).endswith(b"0\r\n\r\n")
        live.check()


def read_all(connection: socket.socket) -> bytes:
    """What still comes until the server hangs up."""
    received = b""
    try:
        while piece := connection.recv(1 << 20):
            received += piece
    except ConnectionError:
        pass
    return received


def test_batches_hold_only_what_was_asked(live: Live, target: Target) -> None:
    """Nothing of a client that left is computed for those who stayed."""
    target.delay_s = 0.01
    sizes: list[int] = []

    def size(batch: StepBatch) -> None:
        sizes.append(len(batch.starts_S1) - 1)

    target.before = size
    with raw_connection(live) as stays:
        begin(live, stays, **SLOW)
        with raw_connection(live) as leaves:
            begin(live, leaves, **SLOW)
            wait_for(lambda: max(sizes, default=0) == 2)
        wait_for(lambda: sizes[-1] == 1)
        target.delay_s = 0
        reply = b""
        while b'"finish_reason"' not in reply:  # headers and body come in packets of their own
            reply += stays.recv(1 << 16)
        assert b'"finish_reason":"length"' in reply
