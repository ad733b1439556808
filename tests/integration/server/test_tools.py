"""Tools and reasoning through /v1/chat/completions: forced ones of a real model, scripted ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import openai
import pydantic
import pytest

from outrider.engine.build import EngineConfig
from outrider.testing import write_tiny_llama

from .conftest import TEMPLATE
from .live import Live, Script, Target

pytest.importorskip("llguidance")

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "unit": {"enum": ["c", "f"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "parameters": None}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ASK = [{"role": "user", "content": "weather?"}]
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "oslo", "unit": "c"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Its tokens are characters, so tools need a long context."""
    root = tmp_path_factory.mktemp("roomy")
    size: dict[str, Any] = {"vocab_size": 320, "num_tokens": 300, "max_positions": 4096}
    target = write_tiny_llama(root / "target", **size)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    draft = write_tiny_llama(root / "draft", num_layers=1, **size)
    config = EngineConfig(
        model=str(target), draft_model=str(draft), num_draft_tokens=3, threads=1, kv_tokens=16384
    )
    with Live(config) as live:
        yield live


@pytest.fixture
def live(roomy: Live) -> Iterator[Live]:
    yield roomy
    roomy.check()


@pytest.fixture
def script(live: Live, target: Target) -> Script:
    return Script(target, live)


def streamed(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """The message that a client builds from the chunks, whose order it checks."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish: list[str] = []
    chunks = live.stream(CHAT, **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks[1:]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert not finish, "nothing follows the finish reason"
        assert "role" not in delta
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            calls = message["tool_calls"]
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                calls.append({"id": call["id"], "type": "function", "function": call["function"]})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        finish += [choice["finish_reason"]] if choice["finish_reason"] else []
    return message | {"finish_reason": finish[0]}


def whole(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    response = live.post(CHAT, body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content") or "",
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": choice["finish_reason"],
    }


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"tool_calls": [call["function"] for call in message["tool_calls"]]}


def test_a_free_call_among_text(live: Live, script: Script) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "temperature": 0}
    script.say(f"I will look.\n{CALL}")
    found = whole(live, body)
    assert found["content"] == "I will look."
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "oslo", "unit": "c"}
    script.say(f"I will look.\n{CALL}")
    assert without_ids(streamed(live, body)) == without_ids(found)


def test_two_calls_have_two_ids_and_indices(live: Live, script: Script) -> None:
    both = CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    script.say(both)
    found = streamed(live, {"messages": ASK, "tools": [WEATHER, NOW], "temperature": 0})
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["get_weather", "now"]
    assert len({call["id"] for call in found["tool_calls"]}) == 2
    assert found["content"] == ""
    script.say(both)
    one = {"messages": ASK, "tools": [WEATHER, NOW], "parallel_tool_calls": False}
    assert len(whole(live, one | {"temperature": 0})["tool_calls"]) == 1


def test_text_that_only_looks_like_a_call_is_text(live: Live, script: Script) -> None:
    for text in ("<tool_call>no call</tool_call>", "<tool_call", "just text"):
        for reply in (whole, streamed):
            script.say(text)
            found = reply(live, {"messages": ASK, "tools": [WEATHER], "temperature": 0})
            assert (found["content"], found["tool_calls"]) == (text, [])
            assert found["finish_reason"] == "stop"


def test_without_tools_nothing_is_looked_for(live: Live, script: Script) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        script.say(CALL)
        assert whole(live, {"messages": ASK, "temperature": 0} | more)["content"] == CALL


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(
    "wish",
    [
        {"tools": [WEATHER, NOW], "tool_choice": "required"},
        {"tools": [WEATHER, NOW], "tool_choice": NAMED},
        {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False},
    ],
    ids=["required", "named", "one"],
)
def test_forced_calls_are_correct_and_the_same_with_and_without_drafts(
    live: Live, wish: dict[str, Any], temperature: float
) -> None:
    """The model has random weights: everything that is right is the grammar's doing."""
    body = {"messages": ASK, "max_tokens": 400, "temperature": temperature, "seed": 7}
    body |= {"logit_bias": {"0": 8}} | wish
    found = whole(live, body)
    assert found["finish_reason"] == "tool_calls"
    assert found["content"] == ""
    assert found["tool_calls"]
    for call in found["tool_calls"]:
        assert call["function"]["name"] in ("get_weather", "now")
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            assert set(arguments) == {"city", "unit"}
    if "parallel_tool_calls" in wish or wish["tool_choice"] == NAMED:
        assert len(found["tool_calls"]) == 1
    for speculation in (None, {"off": True}, {"proposer": "ngram"}, {"num_draft_tokens": 6}):
        more = {} if speculation is None else {"speculation": speculation}
        assert without_ids(streamed(live, body | more)) == without_ids(found)


def test_forced_text_is_drafted_for_free(live: Live) -> None:
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": NAMED, "temperature": 0}
    reply = live.post(CHAT, body | {"speculation": {"metrics": "detailed"}, "logit_bias": {"0": 8}})
    figures = reply.json()["metrics"]["speculative_decoding"]
    num_forced = len('<tool_call>\n{"name": "get_weather", "arguments": {"city": "')
    assert figures["num_accepted_draft_tokens"] > num_forced / 2
    assert figures["num_spec_steps"] < reply.json()["usage"]["completion_tokens"] / 2


def test_strict_tools_are_correct_without_being_forced(live: Live, script: Script) -> None:
    """The script wants another city; the schema decides."""
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["strict"] = True
    script.say('<tool_call>\n{"name": "get_weather", "arguments": {"city": "OSLO", "unit": "c"}}')
    found = whole(live, {"messages": ASK, "tools": [tool], "temperature": 0, "max_tokens": 200})
    for call in found["tool_calls"]:
        arguments = call["function"]["arguments"]
        assert "OSLO" not in arguments
    assert found["tool_calls"]


def test_calls_and_results_of_the_past_reach_the_prompt(live: Live) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "oslo"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    tokens = live.post("/tokenize", body).json()["tokens"]
    text = live.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert "[system] You may call functions." in text
    assert '"description": "The weather in a city."' in text
    assert '{"name": "get_weather", "arguments": {"city": "oslo"}}' in text
    assert "[user] <tool_response>\nrain\n</tool_response>" in text
    assert live.post(CHAT, body | {"max_tokens": 2}).status_code == 200


BOMB: dict[str, Any] = {"type": "object"}
for _ in range(90):
    BOMB = {"type": "object", "properties": {"a": BOMB}}
LOOP = {"type": "object", "properties": {"a": {"$ref": "#"}}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [WEATHER] * 10_000}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 300}}]}, "tools"),
        ({"tool_choice": "required"}, None),
        ({"tools": [NOW], "tool_choice": NAMED}, None),
        ({"tools": [NOW], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [NOW], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
    ],
)
def test_what_cannot_be_is_refused(live: Live, more: dict[str, Any], param: str | None) -> None:
    response = live.post(CHAT, {"messages": ASK, "max_tokens": 2} | more)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schema", [BOMB, LOOP, {"$ref": "#/nowhere"}, {"type": "thing"}, {"a": 1}])
def test_schemas_that_are_bombs_never_break_the_server(
    live: Live, schema: dict[str, Any], strict: bool, choice: str
) -> None:
    function = {"name": "f", "parameters": schema, "strict": strict}
    body = {"messages": ASK, "tools": [{"type": "function", "function": function}]}
    response = live.post(CHAT, body | {"tool_choice": choice, "max_tokens": 8})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("role", ["developer", "narrator", "tool", "function", "\u202e", "x" * 64])
def test_row_54_unknown_roles(live: Live, role: str) -> None:
    body = {"messages": [*ASK, {"role": role, "content": "y"}], "max_tokens": 2}
    for more in ({}, {"tools": [WEATHER]}):
        assert live.post(CHAT, body | more).status_code in (200, 400)
    assert live.post(CHAT, {"messages": [{"role": "", "content": "y"}]}).status_code == 400


def test_the_sdk_parses_and_streams_calls(live: Live) -> None:
    class GetWeather(pydantic.BaseModel):
        city: str = pydantic.Field(pattern="^[a-z]{1,8}$")

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    messages: Any = ASK
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.parse(
            model="tiny", messages=messages, tools=[tool], tool_choice="required", seed=3
        )
        calls = reply.choices[0].message.tool_calls
        assert calls
        assert isinstance(calls[0].function.parsed_arguments, GetWeather)
        with client.chat.completions.stream(
            model="tiny", messages=messages, tools=[tool], tool_choice="required", seed=3
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    streamed_calls = final.choices[0].message.tool_calls
    assert streamed_calls
    assert streamed_calls[0].function.arguments == calls[0].function.arguments


# --- reasoning, and a model whose marks are special tokens ----------------------------------------

THINKING = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if tools %}"
    "{{ tools | tojson }}[TOOL_CALLS]{% endif %}{% if add_generation_prompt %}[assistant] "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif enable_thinking is defined %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinking(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """A model with special tokens for calls, in Mistral's form, and a template that thinks."""
    folder = tmp_path_factory.mktemp("thinking") / "target"
    shutil.copytree(folders[0], folder)
    (folder / "chat_template.jinja").write_text(THINKING)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    last = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    id = content["model"]["vocab"].pop(last)
    content["added_tokens"].append(token | {"id": id, "content": "[TOOL_CALLS]", "special": True})
    content["model"]["vocab"]["[TOOL_CALLS]"] = id
    path.write_text(json.dumps(content))
    config = EngineConfig(model=str(folder), proposer="ngram", threads=1, kv_tokens=4096)
    with Live(config) as live:
        yield live
        live.check()


@pytest.mark.parametrize(
    ("more", "said", "reasoning"),
    [
        ({}, "<think>\nlet me see\n</think>\n\n", "let me see"),
        ({}, "", ""),
        ({"enable_thinking": True}, "let me see\n</think>\n\n", "let me see"),
        ({"enable_thinking": False}, "", ""),
        ({"reasoning_effort": "low"}, "let me see\n</think>\n\n", "let me see"),
        ({"reasoning_effort": "none"}, "", ""),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "so\n</think>", "so"),
    ],
)
@pytest.mark.parametrize("calls", [False, True])
def test_reasoning_is_split_also_before_calls(
    thinking: Live,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    said: str,
    reasoning: str,
    calls: bool,
) -> None:
    script = Script(Target(thinking, monkeypatch), thinking)
    arguments = '{"city": "oslo", "unit": "c"}'
    call = '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + arguments + "}]"
    body = {"messages": ASK, "tools": [WEATHER] if calls else None, "temperature": 0} | more
    script.say(said + (call if calls else "Yes."))
    found = whole(thinking, body)
    assert found["reasoning_content"] == reasoning
    if calls:
        assert found["tool_calls"][0]["function"]["arguments"] == arguments
        assert len(found["tool_calls"][0]["id"]) == 9  # as Mistral's templates demand
        assert found["content"] == ""
    else:
        assert found["content"] == "Yes."
    script.say(said + (call if calls else "Yes."))
    assert without_ids(streamed(thinking, body)) == without_ids(found)


@pytest.mark.parametrize(
    "more", [{"enable_thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}]
)
def test_responses_set_variables_of_the_template(
    thinking: Live, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    script = Script(Target(thinking, monkeypatch), thinking)
    script.say("so\n</think>Yes.")
    reply = thinking.post("/v1/responses", {"input": "x", "temperature": 0} | more).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]


def test_tokens_of_reasoning_are_counted(thinking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Target(thinking, monkeypatch), thinking)
    body = {"messages": ASK, "temperature": 0}
    script.say("<think>\nlet me see\n</think>\n\nYes.")
    usage = thinking.post(CHAT, body).json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    script.say("<think>\nlet me see\n</think>\n\nYes.")
    chunks = thinking.stream(CHAT, **body, stream_options={"include_usage": True})
    assert chunks[-1]["usage"] == usage | {"prompt_tokens_details": ANY}
    script.say("Yes.")
    assert "completion_tokens_details" not in thinking.post(CHAT, body).json()["usage"]


def test_forced_calls_after_reasoning(thinking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar lets the model finish its thought, then forces the call."""
    script = Script(Target(thinking, monkeypatch), thinking)
    script.say("hm </think>no call")
    body = {"messages": ASK, "tools": [WEATHER], "tool_choice": NAMED, "temperature": 0}
    found = whole(thinking, body | {"enable_thinking": True, "max_tokens": 200})
    assert found["reasoning_content"] == "hm"
    assert set(json.loads(found["tool_calls"][0]["function"]["arguments"])) == {"city", "unit"}


def test_structured_output_after_reasoning(thinking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Target(thinking, monkeypatch), thinking)
    script.say("hm </think>no")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}},
    }
    body = {"messages": ASK, "response_format": form, "temperature": 0, "enable_thinking": True}
    found = whole(thinking, body | {"max_tokens": 100})
    assert found["reasoning_content"] == "hm"
    assert json.loads(found["content"])["a"] in (1, 2)


def test_special_tokens_show_on_request(thinking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(Target(thinking, monkeypatch), thinking)
    for shown in (False, True):
        script.say("a[TOOL_CALLS]b")
        body = {"prompt": "x", "skip_special_tokens": not shown, "temperature": 0}
        assert thinking.text(**body) == ("a[TOOL_CALLS]b" if shown else "ab")
