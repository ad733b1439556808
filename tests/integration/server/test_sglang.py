"""SGLang's own routes, and what ended an output under the names of other servers."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest

from outrider.server import labels

from .live import PROBE, Live, chunks_of

SAMPLING = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
ASKED: dict[str, Any] = {"text": PROBE["prompt"], "sampling_params": SAMPLING}


def test_generate_says_what_ours_says(live: Live) -> None:
    reply = live.post("/generate", ASKED).json()
    assert reply["text"] == live.expected_probe
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 24}
    assert meta["completion_tokens"] == len(reply["output_ids"]) == 24
    tokens = live.post("/tokenize", {"prompt": PROBE["prompt"]}).json()["tokens"]
    assert meta["prompt_tokens"] == len(tokens)
    by_ids = {"input_ids": [tokens, tokens], "sampling_params": SAMPLING}
    both = live.post("/generate", by_ids).json()
    assert [one["text"] for one in both] == [live.expected_probe] * 2
    off = live.post("/generate", ASKED | {"speculation": {"off": True}}).json()
    assert off["output_ids"] == reply["output_ids"]


def test_a_stream_of_generate_holds_the_text_so_far(live: Live) -> None:
    chunks = chunks_of(live.post("/generate", ASKED | {"stream": True}).text)
    texts = [chunk["text"] for chunk in chunks]
    assert texts[-1] == live.expected_probe
    assert all(later.startswith(text) for text, later in pairwise(texts))
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_scores_of_the_prompt_and_the_output(live: Live) -> None:
    wish = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = live.post("/generate", ASKED | wish | {"logprob_start_len": 0}).json()["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert "".join(text for _, _, text in meta["input_token_logprobs"]) == PROBE["prompt"]
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[0] for entry in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    later = live.post("/generate", ASKED | wish | {"logprob_start_len": 3}).json()["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][3:]
    tokens = [token for _, token, _ in meta["input_token_logprobs"]]
    only = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    reply = live.post("/generate", only | {"logprob_start_len": 0}).json()
    assert reply["output_ids"] == []
    assert reply["meta_info"]["output_token_logprobs"] == []
    (chunk,) = chunks_of(live.post("/generate", only | {"stream": True}).text)
    assert (chunk["text"], chunk["output_ids"]) == ("", [])
    assert chunk["meta_info"]["completion_tokens"] == 0
    scores = [score for score, _, _ in reply["meta_info"]["input_token_logprobs"][1:]]
    expected = [score for score, _, _ in meta["input_token_logprobs"][1:]]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_forms_of_the_output(live: Live) -> None:
    pytest.importorskip("llguidance")
    for form, pattern in (
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": json.dumps({"enum": [10, 20]})}, "10|20"),
    ):
        body = {"text": "value: ", "sampling_params": {"max_new_tokens": 9, "n": 2} | form}
        for reply in live.post("/generate", body).json():
            assert re.fullmatch(pattern, reply["text"])


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"input_ids": []},
        {"text": "a", "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}},
        {"text": "a", "sampling_params": {"stop_regex": "a"}},
        {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}},
        {"text": "a", "custom_logit_processor": "x"},
        {"text": "a", "token_ids_logprob": [1], "top_logprobs_num": 1},
    ],
)
def test_what_generate_refuses(live: Live, body: dict[str, Any]) -> None:
    assert live.post("/generate", body).status_code == 400


def test_facts_for_its_clients(live: Live) -> None:
    for path in ("/model_info", "/get_model_info"):
        assert live.client.get(path).json()["is_generation"] is True
    facts = live.client.get("/get_server_info").json()
    assert facts["context_length"] == live.service.served.max_model_len


@pytest.mark.parametrize("streamed", [False, True])
def test_what_ended_an_output_is_named(live: Live, streamed: bool) -> None:
    word = live.expected_probe[5:7]
    first = live.complete(**PROBE, return_token_ids=True)["choices"][0]["token_ids"][0]

    def ended(**more: Any) -> tuple[Any, Any]:
        body = PROBE | more | {"stream": streamed}
        response = live.post("/v1/completions", body)
        reply = chunks_of(response.text)[-1] if streamed else response.json()
        (choice,) = reply["choices"]
        return choice["stop_reason"], choice["matched_stop"]

    assert ended() == (None, None)
    assert ended(stop=[word]) == (word, word)
    assert ended(stop_token_ids=[first]) == (first, first)
    matched = live.post("/generate", ASKED | {"sampling_params": SAMPLING | {"stop": word}}).json()
    assert matched["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}


def test_how_probable_labels_are(live: Live) -> None:
    asked = {"query": "a probe ", "items": ["in", "the"], "label_token_ids": [5, 6, 7]}
    reply = live.post("/v1/score", asked).json()
    body = {"prompt": "a probe in", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [5, 6, 7]}
    (entry,) = live.complete(**body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    expected = [math.exp(entry[f"token_id:{label}"]) for label in (5, 6, 7)]
    assert reply["scores"][0] == pytest.approx(expected, rel=1e-3)
    shares = live.post("/v1/score", asked | {"apply_softmax": True}).json()["scores"]
    assert [sum(row) for row in shares] == pytest.approx([1, 1])
    assert live.post("/v1/score", asked | {"items": []}).json()["scores"] == []
    whole = live.post("/generative_scoring", asked).json()
    assert [one["score"] for one in whole["data"]] == pytest.approx([row[0] for row in shares])
    first = asked | {"item_first": True, "query": "in", "items": "a probe "}
    (row,) = live.post("/v1/score", first).json()["scores"]
    assert row == pytest.approx(reply["scores"][0], rel=1e-3)
    refused: list[dict[str, Any]] = [
        {"items": 4},
        {"label_token_ids": []},
        {"label_token_ids": [1 << 30]},
        {"items": [[5]] * 65},
    ]
    for wrong in refused:
        assert live.post("/v1/score", asked | wrong).status_code == 400


def test_a_long_query_is_refused_before_it_is_repeated(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each item, it would be many times the size of the body."""
    read: list[int] = []
    tokens_of = labels._tokens

    async def counted(given: str | list[int], *rest: Any, special: bool) -> list[int]:
        read.append(len(given))
        return await tokens_of(given, *rest, special=special)

    monkeypatch.setattr(labels, "_tokens", counted)
    asked = {"query": [5] * 100_000, "items": [[5]] * 64, "label_token_ids": [5]}
    assert live.post("/v1/score", asked).status_code == 400
    assert read == [100_000, 1]


def test_conversations_in_one_request(live: Live) -> None:
    talks = [[{"role": "user", "content": word}] for word in ("one", "two")]
    options = {"temperature": 0, "max_tokens": 8}
    reply = live.post("/v1/chat/completions/batch", options | {"messages": talks}).json()
    alone = [
        live.post("/v1/chat/completions", options | {"messages": talk}).json()["choices"][0]
        for talk in talks
    ]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["message"] for choice in reply["choices"]] == [one["message"] for one in alone]
    assert live.post("/v1/chat/completions/batch", {"messages": [[]]}).status_code == 400


def test_the_size_of_a_request_before_it_is_sent(live: Live) -> None:
    talk = {"messages": [{"role": "user", "content": "how long am I"}]}
    counted = live.post("/v1/chat/completions/input_tokens", talk).json()["input_tokens"]
    usage = live.post("/v1/chat/completions", talk | {"n_predict": 3}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (counted, 3)
    same = live.post("/v1/responses/input_tokens", {"input": "how long am I"}).json()
    assert same["input_tokens"] == counted


def test_a_schema_where_llama_server_has_it(live: Live) -> None:
    pytest.importorskip("llguidance")
    talk = {"messages": [{"role": "user", "content": "a number"}], "max_tokens": 9}
    for kind in ("json_object", "json_schema"):
        form = {"type": kind, "schema": {"const": 42}}
        reply = live.post("/v1/chat/completions", talk | {"response_format": form}).json()
        assert reply["choices"][0]["message"]["content"] == "42"
