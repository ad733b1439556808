"""Structured output through the API. Row 35 of the fault matrix."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from .live import Live, wait_for

pytest.importorskip("llguidance")

MESSAGES: Any = [{"role": "user", "content": "describe a person"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[a-z]{3,8}$")
    happy: bool


@pytest.fixture
def sdk(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_sdk_parses_what_it_asked_for(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=100, seed=3
    )
    person = reply.choices[0].message.parsed
    assert person is not None
    assert re.fullmatch("[a-z]{3,8}", person.name)


def test_json_objects_streamed_and_whole(live: Live) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "seed": 12}
    body |= {"max_tokens": 200, "logit_bias": {"0": 5}}
    schema: dict[str, object] = {"type": "object", "required": ["a"], "additionalProperties": False}
    schema["properties"] = {"a": {"enum": [1, 2]}}
    body["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "one", "schema": schema, "strict": True},
    }
    whole = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert json.loads(whole)["a"] in (1, 2)
    chunks = live.stream("/v1/chat/completions", **body)
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == whole
    for wish in ({"off": True}, {"proposer": "ngram"}, {"num_draft_tokens": 6}):
        reply = live.post("/v1/chat/completions", body | {"speculation": wish}).json()
        assert reply["choices"][0]["message"]["content"] == whole


@pytest.mark.parametrize(
    ("wish", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "<" /[a-z]{2}/ ">"'}, "<[a-z]{2}>"),
        ({"json": {"type": "integer", "minimum": 100, "maximum": 999}}, "[0-9]{3}"),
    ],
)
def test_every_kind_of_structure(live: Live, wish: dict[str, Any], pattern: str) -> None:
    body = {"prompt": "value: ", "max_tokens": 40, "n": 4, "structured_outputs": wish}
    choices = live.complete(**body, seed=8)["choices"]
    assert all(re.fullmatch(pattern, choice["text"]) for choice in choices)
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_a_json_object_begins_as_one(live: Live) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 20}
    text = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text.startswith("{")


NESTED = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
EVIL = [
    {"structured_outputs": {"regex": "(a+)+$"}},
    {"structured_outputs": {"regex": "(a|aa)+b" * 200}},
    {"structured_outputs": {"regex": "(((((a{100}){100}){100}){100}){100})"}},
    {"structured_outputs": {"regex": "(" * 5000 + "a" + ")" * 5000}},
    {"structured_outputs": {"regex": r"(?=a)b\\1"}},
    {"structured_outputs": {"grammar": 'start: start start | start start start | "a"'}},
    {"structured_outputs": {"grammar": "start: a\na: b\nb: a"}},
    {"structured_outputs": {"json": NESTED}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"json": {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
    {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/schema"}}},
    {"structured_outputs": {"json": {"type": "array", "minItems": 10**9}}},
    {"structured_outputs": {"json": {"enum": ["x" * 1000 + str(i) for i in range(60)]}}},
    {"structured_outputs": {"regex": "x" * 70_000}},
    {"structured_outputs": {}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "xml"}},
]


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_row_35_grammars_that_would_hang_others(live: Live, evil: dict[str, Any]) -> None:
    started = time.monotonic()
    body = {"prompt": "a", "max_tokens": 8} | evil
    response = live.post("/v1/completions", body)
    assert response.status_code in (200, 400), response.text
    assert time.monotonic() - started < 8
    if response.status_code == 400:
        assert len(response.json()["error"]["message"]) < 500


def test_a_grammar_that_takes_too_long_delays_only_grammars(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.server import grammars

    monkeypatch.setattr(grammars, "TIMEOUT_S", 0.2)
    build = live.service.served.grammars.build

    answered = threading.Event()

    def slow(self: object, wanted: grammars.Wanted) -> Any:
        answered.wait(60)
        return build(wanted)

    with monkeypatch.context() as patch:
        patch.setattr(grammars.Grammars, "build", slow)
        body = {"prompt": "a", "structured_outputs": {"regex": "never seen before"}}
        response = live.post("/v1/completions", body)
    assert response.status_code == 400
    assert "too long" in response.json()["error"]["message"]
    assert live.probe() == live.expected_probe
    answered.set()
    wait_for(lambda: live.service.served.grammars.num_pending == 0)
