"""What an operator sees: the dashboard's metrics, traces, and logs that keep secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.engine.build import EngineConfig
from outrider.server.logs import JsonLines, TextLines
from outrider.server.tracing import Tracing

from .live import PROBE, Live, wait_for

SECRET = "a very private question"
KEY = "key-that-nobody-may-see"


@pytest.fixture(scope="module")
def keyed(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config, api_keys=(KEY,)) as live:
        yield live
        live.check()


def test_the_dashboard_names_only_what_is_exported(live: Live) -> None:
    live.complete(**PROBE)
    page = live.client.get("/metrics").text
    exported = set(re.findall(r"^(vllm:\w+)\{", page, re.MULTILINE))
    dashboard = (Path(__file__).parents[3] / "deploy/grafana.json").read_text()
    asked = set(re.findall(r"vllm:\w+", dashboard))
    assert asked <= exported
    assert len(asked) > 20
    places = [tuple(p["gridPos"].values()) for p in json.loads(dashboard)["panels"]]
    assert len(set(places)) == len(places)


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines(JsonLines())
    logger = logging.getLogger("outrider")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def requests_in(lines: Lines) -> list[dict[str, object]]:
    found = [json.loads(line) for line in lines.lines]
    return [line for line in found if line["message"] == "request"]


def test_logs_have_ids_and_no_secrets(keyed: Live, lines: Lines) -> None:
    body = {"prompt": SECRET, "max_tokens": 8, "cache_salt": "salted"}
    response = keyed.post("/v1/completions", body, headers={"x-request-id": "id-1"})
    text = response.json()["choices"][0]["text"]
    answers = [
        response,
        keyed.post("/v1/completions", {"prompt": SECRET, "max_tokens": -1}),
        keyed.client.get("/version", headers={"authorization": "Bearer guessed-key"}),
    ]
    ids = [answer.headers["x-request-id"] for answer in answers]

    def ours() -> list[dict[str, object]]:  # and nobody's who is slow to leave
        return [line for line in requests_in(lines) if line["request_id"] in ids]

    wait_for(lambda: len(ours()) == 3)
    done, wrong, refused = sorted(ours(), key=lambda line: ids.index(str(line["request_id"])))
    assert (done["request_id"], done["status"], done["tokens"]) == ("id-1", 200, 8)
    assert done["id"] == response.json()["id"]
    assert (wrong["status"], refused["status"]) == (400, 401)
    assert wrong["request_id"] != refused["request_id"]
    everything = "\n".join(lines.lines)
    assert json.loads(lines.lines[0])["request_id"]
    for secret in (SECRET, "private", KEY, "guessed-key", "salted", json.dumps(text)[1:-1]):
        assert secret not in everything


def test_prompts_are_logged_where_the_operator_asks(
    engine_config: EngineConfig, lines: Lines
) -> None:
    with Live(engine_config, log_prompts=True) as live:
        live.complete(prompt=SECRET, max_tokens=2)
        wait_for(lambda: [SECRET] in [line.get("text") for line in requests_in(lines)])


def test_a_failure_deep_inside_is_logged_with_its_request(
    live: Live, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("outrider.server.answering.ask_of", broken)
    body = {"messages": [{"role": "user", "content": "x"}]}
    response = live.post("/v1/chat/completions", body, headers={"x-request-id": "id-of-a-bug"})
    assert response.status_code == 500
    (line,) = [json.loads(line) for line in lines.lines if "request failed" in line]
    assert line["request_id"] == "id-of-a-bug"
    assert "a bug" in line["exception"]


def test_text_lines_are_readable() -> None:
    record = logging.makeLogRecord({"msg": "ready", "levelname": "INFO", "model": "tiny"})
    line = TextLines().format(record)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d info    ready model=tiny", line)


def test_traces_tell_what_a_request_took_and_nothing_of_its_text(live: Live) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    live.service.tracing = Tracing("", exporter=exporter)
    try:
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        headers = {"traceparent": parent, "x-request-id": "traced"}
        reply = live.post("/v1/completions", PROBE, headers=headers).json()
        live.stream(prompt=SECRET, max_tokens=5, n=2)
        wait_for(lambda: live.service.is_idle)  # its last words come before it is put down
        live.service.tracing.close()
    finally:
        live.service.tracing = None
    whole, streamed = exporter.get_finished_spans()
    assert whole.name == "llm_request"
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" == parent.split("-")[1]
    assert whole.parent is not None
    assert f"{whole.parent.span_id:016x}" == parent.split("-")[2]
    found = dict(whole.attributes or {})
    assert found["gen_ai.request.id"] == "traced"
    assert found["gen_ai.usage.prompt_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == 24
    assert found["outrider.ending"] == "finished"
    assert found["outrider.proposer"] == "draft-model"
    first, e2e = found["gen_ai.latency.time_to_first_token"], found["gen_ai.latency.e2e"]
    assert isinstance(first, float)
    assert isinstance(e2e, float)
    assert 0 < first <= e2e
    assert whole.start_time is not None
    assert whole.end_time is not None
    assert -0.001 < (whole.end_time - whole.start_time) / 1e9 - e2e < 5  # of the same clock
    assert streamed.parent is None
    assert dict(streamed.attributes or {})["gen_ai.request.n"] == 2
    assert SECRET not in whole.to_json() + streamed.to_json()
