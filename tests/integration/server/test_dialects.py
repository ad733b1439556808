"""Every dialect says the same of the same request, whole and streamed, with and without drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.engine.build import EngineConfig
from outrider.testing import write_tiny_llama

from . import dialects
from .conftest import TEMPLATE
from .dialects import DIALECTS, FORCED, Said, streamed, whole
from .live import Live, Script, Target, wait_for

pytest.importorskip("llguidance")

CHATS = DIALECTS[1:]
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "oslo", "unit": "c"}}\n</tool_call>'
)
ARGUMENTS = '{"city": "oslo", "unit": "c"}'


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("roomy")
    size: dict[str, Any] = {"vocab_size": 320, "num_tokens": 300, "max_positions": 4096}
    target = write_tiny_llama(root / "target", **size)
    template = TEMPLATE.replace("[assistant] {%", "{# <think> #}[assistant] {%")
    (target / "chat_template.jinja").write_text(template)
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


@pytest.mark.parametrize("dialect", CHATS)
def test_reasoning_text_and_calls_in_their_order(live: Live, script: Script, dialect: str) -> None:
    written = f"<think>\nlet me see\n</think>\n\nI will look.\n{CALL}"
    expected = Said("I will look.", "let me see", [("get_weather", ARGUMENTS)], "tool_calls")
    for wish in ({}, {"speculation": {"off": True}}):
        script.say(written)
        found = whole(live, dialect, "weather?", tools=True, temperature=0, max_tokens=300, **wish)
        assert replace(found, num_tokens=0) == expected
        script.say(written)
        found, _ = streamed(
            live, dialect, "weather?", tools=True, temperature=0, max_tokens=300, **wish
        )
        assert replace(found, num_tokens=0) == expected


@pytest.mark.parametrize("dialect", CHATS)
@pytest.mark.parametrize("text", ["plain words", "", "two\n\nlines "])
def test_text_alone(live: Live, script: Script, dialect: str, text: str) -> None:
    for tools in (False, True):
        script.say(text)
        found = whole(live, dialect, "x", temperature=0, tools=tools)
        assert (found.text, found.calls, found.finish) == (text, [], "stop")
        script.say(text)
        assert streamed(live, dialect, "x", temperature=0, tools=tools)[0] == found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_length_ends_a_reply(live: Live, dialect: str) -> None:
    found = whole(live, dialect, "x", temperature=0, max_tokens=5)
    assert (found.finish, found.num_tokens) == ("length", 5)
    assert streamed(live, dialect, "x", temperature=0, max_tokens=5)[0] == found


WISHES: dict[str, dict[str, Any]] = {
    "free": {},
    "tools": {"tools": True},
    "forced": {"tools": True, "choice": FORCED, "max_tokens": 200},
    "schema": {"schema": True, "max_tokens": 200},
}


def anonymous(found: list[Any]) -> str:
    """The events without ids and times, with neighbouring pieces of text joined."""
    parts: list[tuple[str, str]] = []
    for event in found:
        pieces = _pieces(event)
        if pieces and parts and parts[-1][0] == pieces[0]:
            parts[-1] = (pieces[0], parts[-1][1] + pieces[1])
        elif pieces:
            parts.append(pieces)
        if (text := _rest(event)) is not None:
            parts.append((text, ""))
    return repr(parts)


def _rest(event: dict[str, Any]) -> str | None:
    """What an event says besides a piece of text; None: nothing."""
    bare = _bare(event)
    if event.get("choices") and event["choices"][0].get("delta") == {}:
        del bare["choices"][0]["delta"]
    if _pieces(event) is not None:
        if not event.get("choices") or event["choices"][0]["finish_reason"] is None:
            return None
        bare["choices"][0].pop("text", None)
        bare["choices"][0].pop("delta", None)
    return json.dumps(bare, sort_keys=True)


VARYING = frozenset(
    {
        "id",
        "call_id",
        "item_id",
        "created",
        "created_at",
        "sequence_number",
        "total_duration",
        "prompt_eval_duration",
        "eval_duration",
        "usage",
    }
)


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if k not in VARYING}
    return [_bare(inner) for inner in value] if isinstance(value, list) else value


def _pieces(event: dict[str, Any]) -> tuple[str, str] | None:
    """Kind and text, if the event is nothing but a piece of text."""
    kind = str(event.get("type", ""))
    if kind.endswith(".delta"):
        return f"{kind} {event['output_index']}", event["delta"]
    if kind == "content_block_delta":
        delta = event["delta"]
        texts = [v for k, v in delta.items() if k != "type"]
        return f"{delta['type']} {event['index']}", texts[0]
    if event.get("choices"):
        (choice,) = event["choices"]
        if "text" in choice:
            return "text", choice["text"]
        delta = choice["delta"]
        if set(delta) in ({"content"}, {"reasoning_content", "reasoning"}):
            return next(iter(delta)), delta[next(iter(delta))]
        if "tool_calls" in delta and "id" not in delta["tool_calls"][0]:
            return "arguments", delta["tool_calls"][0]["function"]["arguments"]
    if "done" in event and not event["done"] and set(event["message"]) == {"role", "content"}:
        return "content", event["message"]["content"]
    if "done" in event and not event["done"] and "thinking" in event["message"]:
        return "thinking", event["message"]["thinking"]
    return None


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("wish", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_events_with_drafts_are_those_without(
    live: Live, dialect: str, wish: dict[str, Any], temperature: float
) -> None:
    """Five seeds of each of 40 kinds: 200 requests, each with four ways of drafting."""
    if dialect == "completions" and wish:
        wish = {"max_tokens": 60}
    if dialect == "ollama" and wish.get("choice"):
        wish = {"tools": True, "max_tokens": 60}  # it has no tool_choice
    for seed in range(5):
        body = {**wish, "temperature": temperature, "seed": seed}
        text = f"what is the weather in town {seed}?"
        plain, events = streamed(live, dialect, text, **body, speculation={"off": True})
        expected = anonymous(events)
        assert whole(live, dialect, text, **body) == plain
        for way in ({"proposer": "ngram"}, {"proposer": "draft-model", "num_draft_tokens": 6}):
            found, events = streamed(live, dialect, text, **body, speculation=way)
            assert found == plain
            assert anonymous(events) == expected
        if wish.get("choice"):
            assert plain.calls
            if plain.finish != "length":
                assert set(json.loads(plain.calls[0][1])) == {"city", "unit"}
        if wish.get("schema") and plain.finish != "length":
            assert set(json.loads(plain.text)) == {"city", "unit"}


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/responses", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/v1/messages/count_tokens", {"type", "message"}),
        ("/api/chat", None),
        ("/api/generate", None),
    ],
)
def test_errors_have_the_form_of_their_dialect(
    live: Live, path: str, form: set[str] | None
) -> None:
    for body in ({}, {"model": "other", "messages": [], "input": "x"}, {"model": 5}):
        response = live.post(path, body)
        assert 400 <= response.status_code < 500
        error = response.json()["error"]
        if form is None:
            assert isinstance(error, str)
        else:
            assert set(error) == form


def test_padded_streams_hide_their_sizes(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame of every dialect has one of few sizes."""
    monkeypatch.setattr(live.service, "config", replace(live.config, pad=True))
    for dialect in DIALECTS:
        path, body = dialects.asked(dialect, "x", max_tokens=30, temperature=0.5, seed=1)
        text = live.post(path, body | {"stream": True}).text
        frames = text.splitlines(keepends=True) if dialect == "ollama" else text.split("\n\n")[:-1]
        sizes = {len(f.encode()) + (0 if dialect == "ollama" else 2) for f in frames}
        sizes -= {len("data: [DONE]\n\n")}
        assert sizes <= {256 << i for i in range(6)}, dialect


def test_responses_go_on_from_earlier_ones(live: Live) -> None:
    first = {"model": "tiny", "input": "my name is eve", "max_output_tokens": 8, "temperature": 0}
    one = live.post("/v1/responses", first).json()
    assert live.client.get(f"/v1/responses/{one['id']}").json() == one
    more = {"max_output_tokens": 8, "temperature": 0, "instructions": "be kind"}
    body = more | {"input": "and now?", "previous_response_id": one["id"]}
    two = live.post("/v1/responses", body).json()
    said = one["output"][0]["content"][0]["text"]
    history = [
        {"role": "user", "content": "my name is eve"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "and now?"},
    ]
    whole = live.post("/v1/responses", more | {"input": history}).json()
    assert two["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert two["output"][0]["content"] == whole["output"][0]["content"]
    assert live.client.delete(f"/v1/responses/{one['id']}").json()["deleted"]
    for response in (
        live.client.get(f"/v1/responses/{one['id']}"),
        live.post("/v1/responses", body),
        live.client.delete(f"/v1/responses/{one['id']}"),
    ):
        assert response.status_code == 404
    kept = live.post("/v1/responses", first | {"store": False}).json()
    assert live.client.get(f"/v1/responses/{kept['id']}").status_code == 404


def test_calls_of_a_response_are_remembered(live: Live, script: Script) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": dialects.SCHEMA}
    script.say(CALL)
    body = {"input": "weather?", "tools": [tool], "temperature": 0}
    one = live.post("/v1/responses", body).json()
    (call,) = [item for item in one["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    script.say("It rains.")
    body |= {"input": [result], "previous_response_id": one["id"]}
    two = live.post("/v1/responses", body).json()
    assert two["output"][0]["content"][0]["text"] == "It rains."
    echoed = [{"type": "message", "role": "user", "content": "weather?"}, call, result]
    script.say("It rains.")
    same = live.post("/v1/responses", body | {"input": echoed, "previous_response_id": None})
    assert same.json()["usage"]["input_tokens"] == two["usage"]["input_tokens"]


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_only_allowed_tools_are_offered(live: Live, kind: str) -> None:
    """The prompt is that of a request with these tools only."""
    path, body = dialects.asked(kind, "weather?", tools=True, max_tokens=2)
    named = {"name": "get_weather"}
    other: dict[str, Any] = {"type": "function", "name": "fly"}
    allowed: dict[str, Any] = {"type": "allowed_tools", "mode": "auto"}
    if kind == "chat":
        other = {"type": "function", "function": {"name": "fly"}}
        tools = {"mode": "auto", "tools": [{"type": "function", "function": named}]}
        allowed = {"type": "allowed_tools", "allowed_tools": tools}
    else:
        allowed["tools"] = [{"type": "function", **named}]
    name = "prompt_tokens" if kind == "chat" else "input_tokens"

    def num_read(**more: Any) -> int:
        found: int = live.post(path, body | more).json()["usage"][name]
        return found

    alone = num_read()
    body["tools"] = [*body["tools"], other]
    assert num_read() > alone
    assert num_read(tool_choice=allowed) == alone
    body["tools"] = [other]
    assert live.post(path, body | {"tool_choice": allowed}).status_code == 400


def test_a_flood_of_responses_is_forgotten() -> None:
    from outrider.server.errors import ApiError
    from outrider.server.stored import MAX_STORED, MAX_STORED_CHARS, Store, Stored

    def entry(id: str, text: str = "") -> Stored:
        return Stored({"id": id}, "salt", [{"content": text}], [])

    store = Store()
    for i in range(MAX_STORED + 5):
        store.put(entry(str(i)))
    assert store.get(str(MAX_STORED), "salt").reply == {"id": str(MAX_STORED)}
    for id, salt in (("4", "salt"), (str(MAX_STORED), "another")):
        with pytest.raises(ApiError):
            store.get(id, salt)
    store.put(entry("large", "x" * MAX_STORED_CHARS))
    with pytest.raises(ApiError):
        store.get("large", "salt")
    store.put(entry("small"))
    assert store.get("small", "salt")
    shown = entry("shown")
    shown.reply["metadata"] = {"text": "x" * MAX_STORED_CHARS}
    store.put(shown)
    with pytest.raises(ApiError):
        store.get("shown", "salt")


def test_a_conversation_keeps_what_was_said(live: Live) -> None:
    """The same as a history in the request."""
    talk = live.post("/v1/conversations", {"metadata": {"topic": "seas"}}).json()
    where = f"/v1/conversations/{talk['id']}"
    more = {"max_output_tokens": 6, "temperature": 0}
    history: list[dict[str, Any]] = []
    for text in ("tell me", "and more"):
        asked = more | {"input": text, "conversation": talk["id"]}
        said = live.post("/v1/responses", asked).json()
        history.append({"role": "user", "content": text})
        whole = live.post("/v1/responses", more | {"input": history}).json()
        assert said["output"][0]["content"] == whole["output"][0]["content"]
        assert said["conversation"] == {"id": talk["id"]}
        history += said["output"]
    items = live.client.get(f"{where}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"] * 2
    assert items == live.client.get(f"{where}/items").json()["data"][::-1]
    one = f"{where}/items/{items[0]['id']}"
    assert live.client.get(one).json()["content"][0]["text"] == "tell me"
    assert live.client.delete(one).json() == talk
    assert live.client.get(one).status_code == 404
    added = {"items": [{"role": "user", "content": "by hand"}]}
    assert live.post(f"{where}/items", added).json()["data"][0]["id"]
    assert len(live.client.get(f"{where}/items").json()["data"]) == 4
    assert live.post(where, {"metadata": {"a": "b"}}).json()["metadata"] == {"a": "b"}
    assert live.client.get(where).json()["metadata"] == {"a": "b"}
    both = {"input": "x", "conversation": talk["id"], "previous_response_id": "resp_1"}
    assert live.post("/v1/responses", both).status_code == 400
    assert live.client.delete(where).json()["deleted"]
    assert live.client.get(where).status_code == 404
    gone = live.post("/v1/responses", {"input": "x", "conversation": {"id": talk["id"]}})
    assert gone.status_code == 404


def test_a_response_in_the_background(live: Live, target: Target) -> None:
    body = {"input": "tell me", "max_output_tokens": 6, "temperature": 0}
    wanted = live.post("/v1/responses", body).json()
    queued = live.post("/v1/responses", body | {"background": True}).json()
    assert queued["status"] == "queued"
    assert queued["background"]
    path = f"/v1/responses/{queued['id']}"
    wait_for(lambda: live.client.get(path).json()["status"] != "queued")
    found = live.client.get(path).json()
    assert found["status"] == "incomplete"
    assert found["output"][0]["content"] == wanted["output"][0]["content"]
    assert live.client.get(f"{path}/input_items").json()["data"][0]["role"] == "user"
    target.delay_s = 0.05
    long = body | {"background": True, "max_output_tokens": 400, "ignore_eos": True}
    slow = f"/v1/responses/{live.post('/v1/responses', long).json()['id']}"
    on = {"input": "more", "previous_response_id": slow.rpartition("/")[2]}
    assert live.post("/v1/responses", on).status_code == 400
    assert live.post(f"{slow}/cancel", {}).json()["status"] == "cancelled"
    assert live.client.get(slow).json()["status"] == "cancelled"
    again = live.post("/v1/responses", long).json()
    assert live.client.delete(f"/v1/responses/{again['id']}").json()["deleted"]
    for wrong in ({"store": False}, {"stream": True}):
        assert live.post("/v1/responses", long | wrong).status_code == 400
    assert live.post(f"/v1/responses/{wanted['id']}/cancel", {}).status_code == 400


def test_nothing_goes_on_from_a_response_that_failed() -> None:
    from outrider.server.dialects.responses import Turn
    from outrider.server.dialects.responses_input import ResponsesBody
    from outrider.server.errors import ApiError
    from outrider.server.stored import Store, Stored

    store = Store()
    body = ResponsesBody.model_validate({"input": "and?", "previous_response_id": "resp_1"})
    past = [{"role": "user", "content": "tell me"}]
    for status in ("completed", "incomplete", "failed", "cancelled", "queued"):
        store.put(Stored({"id": "resp_1", "status": status}, "", past, []))
        if status in ("completed", "incomplete"):
            assert Turn(body, "", store, Store()).past == past
        else:
            with pytest.raises(ApiError, match="not complete"):
                Turn(body, "", store, Store())


def test_anthropic_counts_the_tokens_it_would_read(live: Live) -> None:
    path, body = dialects.asked("messages", "weather?", tools=True, max_tokens=2)
    used = live.post(path, body).json()["usage"]
    for name in ("max_tokens",):
        body.pop(name)
    counted = live.post("/v1/messages/count_tokens", body).json()
    assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_anthropic_names_the_stop_sequence(live: Live, script: Script) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50, "temperature": 0}
    body["stop_sequences"] = ["END", "STOP"]
    script.say("some words STOP and more")
    reply = live.post("/v1/messages", body).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "STOP")
    assert reply["content"][0]["text"] == "some words "
    script.say("some words STOP and more")
    events = dialects.events("messages", live.post("/v1/messages", body | {"stream": True}).text)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}


def test_anthropic_history_with_blocks(live: Live) -> None:
    used = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "oslo"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "rain"}],
    }
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    cached = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}
    body = {
        "system": [cached],
        "messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": [thought, used]},
            {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        ],
        "max_tokens": 4,
    }
    assert live.post("/v1/messages", body).status_code == 200
    for block in ({"type": "image", "source": {}}, {"type": "document", "source": {}}):
        wrong = body | {"messages": [{"role": "user", "content": [block]}]}
        response = live.post("/v1/messages", wrong)
        assert response.status_code == 400
        assert block["type"] in response.json()["error"]["message"]


def test_the_key_of_anthropic_clients(roomy: Live) -> None:
    config = EngineConfig(model=str(roomy.core.tokenizer.folder), proposer="ngram", threads=1)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    with Live(config, api_keys=("open-sesame",)) as live:
        anonymous = {"authorization": ""}
        for key, status in (("open-sesame", 200), ("wrong", 401)):
            headers = {"x-api-key": key} | (
                {"authorization": f"Bearer {key}"} if key == "wrong" else {}
            )
            assert live.post("/v1/messages", body, headers=headers).status_code == status
        refused = live.post("/v1/messages", body, headers=anonymous)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"


def test_ollama_without_a_content_type(live: Live) -> None:
    """As curl -d sends it; but not what a web page could send unasked."""
    body = (
        b'{"model": "tiny:latest", "prompt": "x", "stream": false, "options": {"num_predict": 3}}'
    )
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert live.client.post("/api/generate", content=body, headers=form).status_code == 200
    assert live.client.post("/api/generate", content=body).status_code == 200
    for header in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert (
            live.client.post("/api/generate", content=body, headers=form | header).status_code
            == 415
        )
    show = live.client.post("/api/show", content=b'{"model": "tiny"}').json()
    assert show["model_info"]["outrider.context_length"] == 4096
    assert "tools" in show["capabilities"]


def test_ollama_lists_and_loads(live: Live) -> None:
    assert live.client.get("/api/tags").json()["models"][0]["name"] == "tiny"
    assert live.client.get("/api/ps").json()["models"][0]["context_length"] == 4096
    assert live.client.get("/api/version").json()["version"]
    for path in ("/api/generate", "/api/chat"):
        reply = live.post(path, {"model": "tiny"}).json()
        assert (reply["done"], reply["done_reason"]) == (True, "load")
        assert live.post(path, {"model": "other"}).status_code == 404


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"num_ctx": 99, "num_gpu": 1, "num_thread": 2}, 200),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0}, 200),
        ({"repeat_last_n": 64, "repeat_penalty": 1.1}, 400),
        ({"mirostat": 0, "mirostat_tau": 5.0}, 200),
        ({"mirostat": 2}, 400),
        ({"typical_p": 0.5}, 400),
        ({"unheard_of": 1}, 400),
        ({"stop": ["a"], "seed": -1, "top_k": -1, "num_predict": -1}, 200),
    ],
)
def test_ollama_options_change_tokens_or_are_refused(
    live: Live, options: dict[str, Any], status: int
) -> None:
    body = {
        "model": "tiny",
        "prompt": "x",
        "stream": False,
        "options": {"num_predict": 2} | options,
    }
    assert live.post("/api/generate", body).status_code == status


def test_ollama_generate_raw_and_with_a_system_text(live: Live) -> None:
    body = {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 2}}
    raw = live.post("/api/generate", body | {"raw": True}).json()
    framed = live.post("/api/generate", body | {"system": "be kind"}).json()
    assert raw["prompt_eval_count"] == 1
    assert framed["prompt_eval_count"] == len("[system] be kind\n[user] x\n[assistant] ")
