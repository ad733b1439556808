"""How the tests speak each dialect: the same request in its JSON, its reply as plain facts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from .live import Live

CITY = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": CITY, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NAME, DESCRIPTION = "get_weather", "The weather in a city."
FORCED = "required"


@dataclass
class Said:
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    num_tokens: int = 0


def asked(dialect: str, text: str, **wish: Any) -> tuple[str, dict[str, Any]]:
    """Route and body. `wish`: tools, choice, temperature, seed, max_tokens, off, schema."""
    body: dict[str, Any] = {"model": "tiny"}
    options = {k: wish[k] for k in ("temperature", "seed") if k in wish}
    limit = wish.get("max_tokens", 120)
    tools = wish.get("tools", False)
    function = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
    if "speculation" in wish:
        body["speculation"] = wish["speculation"]
    messages = [{"role": "user", "content": text}]
    if dialect == "completions":
        return "/v1/completions", body | options | {"prompt": text, "max_tokens": limit}
    if dialect == "chat":
        body |= options | {"messages": messages, "max_tokens": limit}
        if tools:
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = wish.get("choice", "auto")
        if wish.get("schema"):
            form = {"name": "a", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return "/v1/chat/completions", body
    if dialect == "responses":
        body |= options | {"input": text, "max_output_tokens": limit, "store": False}
        if tools:
            body["tools"] = [{"type": "function", **function}]
            body["tool_choice"] = wish.get("choice", "auto")
        if wish.get("schema"):
            body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
        return "/v1/responses", body
    if dialect == "messages":
        body |= options | {"messages": messages, "max_tokens": limit}
        if tools:
            tool = {"name": NAME, "description": DESCRIPTION, "input_schema": SCHEMA}
            body["tools"] = [tool]
            body["tool_choice"] = {"type": "any" if wish.get("choice") == FORCED else "auto"}
        if wish.get("schema"):
            body["output_format"] = {"type": "json_schema", "schema": SCHEMA}
        return "/v1/messages", body
    assert dialect == "ollama"
    body |= {"messages": messages, "options": options | {"num_predict": limit}, "stream": False}
    if tools:
        body["tools"] = [{"type": "function", "function": function}]
    if wish.get("schema"):
        body["format"] = SCHEMA
    return "/api/chat", body


FINISH = {
    "end_turn": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "completed": "stop",
    "incomplete": "length",
}


def whole(live: Live, dialect: str, text: str, **wish: Any) -> Said:
    path, body = asked(dialect, text, **wish)
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    return READ[dialect](response.json())


def streamed(live: Live, dialect: str, text: str, **wish: Any) -> tuple[Said, list[Any]]:
    """What a client puts together from the events, and the events."""
    path, body = asked(dialect, text, **wish)
    body["stream"] = True
    if dialect in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    found = events(dialect, response.text)
    return STREAM[dialect](found), found


def events(dialect: str, text: str) -> list[Any]:
    if dialect == "ollama":
        return [json.loads(line) for line in text.splitlines()]
    found = []
    for block in text.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if dialect in ("chat", "completions"):
            (line,) = lines
            if line != "data: [DONE]":
                found.append(json.loads(line.removeprefix("data: ")))
        else:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


# --- whole replies --------------------------------------------------------------------------------


def _completions(reply: dict[str, Any]) -> Said:
    (choice,) = reply["choices"]
    return Said(choice["text"], finish=choice["finish_reason"], num_tokens=_used(reply["usage"]))


def _used(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"])


def _chat(reply: dict[str, Any]) -> Said:
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [
        (c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])
    ]
    return Said(
        message["content"] or "",
        message.get("reasoning_content") or "",
        calls,
        choice["finish_reason"],
        _used(reply["usage"]),
    )


def _responses(reply: dict[str, Any]) -> Said:
    found = Said(finish=FINISH[reply["status"]], num_tokens=_used(reply["usage"]))
    for item in reply["output"]:
        if item["type"] == "message":
            found.text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            found.reasoning += "".join(part["text"] for part in item["content"])
        else:
            found.calls.append((item["name"], item["arguments"]))
    if found.calls and found.finish == "stop":
        found.finish = "tool_calls"
    return found


def _messages(reply: dict[str, Any]) -> Said:
    found = Said(finish=FINISH[reply["stop_reason"]], num_tokens=_used(reply["usage"]))
    for block in reply["content"]:
        if block["type"] == "text":
            found.text += block["text"]
        elif block["type"] == "thinking":
            found.reasoning += block["thinking"]
        else:
            found.calls.append((block["name"], json.dumps(block["input"])))
    return found


def _ollama(reply: dict[str, Any]) -> Said:
    message = reply["message"]
    calls = [
        (c["function"]["name"], json.dumps(c["function"]["arguments"]))
        for c in message.get("tool_calls", [])
    ]
    finish = "tool_calls" if calls and reply["done_reason"] == "stop" else reply["done_reason"]
    return Said(message["content"], message.get("thinking", ""), calls, finish, reply["eval_count"])


READ = {
    "completions": _completions,
    "chat": _chat,
    "responses": _responses,
    "messages": _messages,
    "ollama": _ollama,
}
DIALECTS = tuple(READ)

# --- streams: each checks the order of its events -------------------------------------------------


def _chat_stream(found: list[Any]) -> Said:
    said = Said(num_tokens=_used(found[-1]["usage"]))
    assert found[-1]["choices"] == []
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in found[1:-1]:
        assert not said.finish
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        said.text += delta.get("content") or ""
        said.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(said.calls)
                said.calls.append((call["function"]["name"], call["function"]["arguments"]))
            else:
                assert call["index"] == len(said.calls) - 1
                name, arguments = said.calls[-1]
                said.calls[-1] = (name, arguments + call["function"]["arguments"])
        said.finish = choice["finish_reason"] or ""
    return said


def _completions_stream(found: list[Any]) -> Said:
    said = Said(num_tokens=_used(found[-1]["usage"]))
    for chunk in found[:-1]:
        assert not said.finish
        (choice,) = chunk["choices"]
        said.text += choice["text"]
        said.finish = choice["finish_reason"] or ""
    return said


def _responses_stream(found: list[Any]) -> Said:
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    final = found[-1]["response"]
    assert found[-1]["type"] == f"response.{final['status']}"
    texts: dict[tuple[int, str], str] = {}
    done: list[Any] = []
    opened = -1
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == opened + 1 == len(done)
            opened += 1
            assert event["item"].get("content", []) == []
            assert event["item"].get("arguments", "") == ""
            continue
        assert event["output_index"] == opened
        if kind == "output_item.done":
            done.append(event["item"])
            continue
        assert event["item_id"]
        name, _, action = kind.rpartition(".")
        if action == "delta":
            texts[opened, name] = texts.get((opened, name), "") + event["delta"]
        elif action == "done" and name != "content_part":
            whole = event["arguments"] if "arguments" in event else event["text"]
            assert whole == texts.get((opened, name), "")
    assert done == final["output"]
    return _responses(final)


def _messages_stream(found: list[Any]) -> Said:
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    said = Said(
        finish=FINISH[found[-2]["delta"]["stop_reason"]], num_tokens=_used(found[-2]["usage"])
    )
    opened, is_open, arguments = -1, False, ""
    for event in found[1:-2]:
        if event["type"] == "ping":
            continue
        if event["type"] == "content_block_start":
            assert not is_open
            opened, is_open, block = opened + 1, True, event["content_block"]
            if block["type"] == "tool_use":
                assert block["input"] == {}
                said.calls.append((block["name"], ""))
        assert event["index"] == opened
        assert is_open
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            said.text += delta.get("text", "")
            said.reasoning += delta.get("thinking", "")
            arguments += delta.get("partial_json", "")
        elif event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                said.calls[-1] = (said.calls[-1][0], json.dumps(json.loads(arguments)))
            arguments = ""
    assert not is_open
    return said


def _ollama_stream(found: list[Any]) -> Said:
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    said = _ollama(found[-1])
    for line in found[:-1]:
        more = _ollama(line | {"done_reason": "", "eval_count": 0})
        said.text, said.reasoning = said.text + more.text, said.reasoning + more.reasoning
        said.calls += more.calls
    if said.calls and said.finish == "stop":
        said.finish = "tool_calls"
    return said


STREAM = {
    "completions": _completions_stream,
    "chat": _chat_stream,
    "responses": _responses_stream,
    "messages": _messages_stream,
    "ollama": _ollama_stream,
}
