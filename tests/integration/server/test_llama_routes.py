"""llama-server's routes, embeddings, filling gaps, and other servers' names for structure."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine.build import EngineConfig
from outrider.layout import Slice, pack

from .live import PROBE, Live, Target, chunks_of, with_options

LLAMA = {"prompt": PROBE["prompt"], "n_predict": 24, "temperature": 0, "ignore_eos": True}


def test_completion_says_what_ours_says(live: Live) -> None:
    reply = live.post("/completion", LLAMA | {"return_tokens": True, "n_probs": 2}).json()
    assert reply["content"] == live.expected_probe
    assert (reply["stop"], reply["stop_type"]) == (True, "limit")
    assert reply["tokens_predicted"] == len(reply["tokens"]) == 24
    assert reply["tokens_evaluated"] == len(PROBE["prompt"])
    assert [len(entry["top_logprobs"]) for entry in reply["completion_probabilities"]] == [2] * 24
    assert reply["timings"]["predicted_n"] == 24
    assert live.post("/completions", LLAMA).json()["content"] == live.expected_probe
    tokens = live.post("/tokenize", {"content": "in the dark"}).json()["tokens"]
    whole = LLAMA | {"prompt": {"prompt_string": "a probe in the dark"}}
    assert live.post("/completion", whole).json()["content"] == live.expected_probe
    mixed = LLAMA | {"prompt": ["a probe ", *tokens]}
    assert live.post("/completion", mixed).json()["content"] == live.expected_probe


def test_a_stream_of_completion_ends_without_done(live: Live) -> None:
    text = live.post("/completion", LLAMA | {"stream": True}).text
    chunks = chunks_of(text + "data: [DONE]\n\n")
    assert "".join(chunk["content"] for chunk in chunks) == live.expected_probe
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_a_stop_word_is_named(live: Live) -> None:
    word = live.expected_probe[5:7]
    reply = live.post("/completion", LLAMA | {"stop": [word]}).json()
    assert (reply["stop_type"], reply["stopping_word"]) == ("word", word)


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"grammar": 'root ::= "<" [a-z] [a-z] ">"'}, "<[a-z]{2}>"),
        ({"json_schema": {"enum": [10, 20]}}, "10|20"),
    ],
)
def test_grammars_of_llama_cpp(live: Live, more: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance")
    reply = live.post("/completion", LLAMA | {"ignore_eos": False, "temperature": 1} | more).json()
    assert re.fullmatch(pattern, reply["content"])
    assert live.post("/completion", LLAMA | {"grammar": "root ::= ("}).status_code == 400


@pytest.mark.parametrize(
    ("more", "pattern"),
    [
        ({"guided_json": {"enum": [10, 20]}}, "10|20"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"guided_grammar": 'start: "a" | "b"'}, "a|b"),
        ({"json_schema": '{"enum": [10]}'}, "10"),
        ({"regex": "[xy]"}, "[xy]"),
        ({"ebnf": 'root ::= "a" | "b"'}, "a|b"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
    ],
)
def test_other_names_for_structure(live: Live, more: dict[str, Any], pattern: str) -> None:
    pytest.importorskip("llguidance")
    text = live.text(prompt="value: ", max_tokens=20, seed=8, **more)
    assert re.fullmatch(pattern, text)
    twice = {"prompt": "x", "regex": "a", **more, "guided_regex": "b"}
    assert live.post("/v1/completions", twice).status_code == 400


def test_biases_are_pairs(live: Live) -> None:
    (token,) = live.post("/tokenize", {"content": "q"}).json()["tokens"]
    body = LLAMA | {"n_predict": 4, "logit_bias": [[token, 100.0]]}
    assert live.post("/completion", body).json()["content"] == "qqqq"
    for form in ([["q", 100]], {"q": 100}, {str(token): 100}):
        assert live.post("/completion", body | {"logit_bias": form}).json()["content"] == "qqqq"
    banned = live.post("/completion", body | {"logit_bias": [[token, 100], ["q", False]]}).json()
    assert "q" not in banned["content"]
    for wrong in (5, [5], [[token]], [[token, "x"]], [[token, True]], {"q": "x"}):
        assert live.post("/completion", LLAMA | {"logit_bias": wrong}).status_code == 400


def test_facts_about_the_server(live: Live) -> None:
    props = live.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    slots = live.client.get("/slots").json()
    assert len(slots) == props["total_slots"] == 32
    messages = [{"role": "user", "content": "x"}]
    assert live.post("/apply-template", {"messages": messages}).json() == {
        "prompt": "[user] x\n[assistant] "
    }
    assert live.client.get("/models").json()["data"][0]["id"] == "tiny"
    body = {"messages": messages, "max_tokens": 2}
    assert live.post("/chat/completions", body).status_code == 200
    counted: dict[str, dict[str, Any]] = {
        "chat/completions/input_tokens": body,
        "messages/count_tokens": {"model": "tiny", "messages": messages},
    }
    for path, asked in counted.items():
        short = live.post(f"/{path}", asked)
        assert short.status_code == 200
        assert short.json() == live.post(f"/v1/{path}", asked).json()
    spelled = live.post("/tokenize", {"content": "ab", "with_pieces": True}).json()["tokens"]
    assert [entry["piece"] for entry in spelled] == ["a", "b"]
    ids = [entry["id"] for entry in spelled]
    assert live.post("/detokenize", {"tokens": ids}).json()["content"] == "ab"


def test_timings_on_request(live: Live) -> None:
    reply = live.complete(**PROBE, timings_per_token=True)
    assert reply["timings"]["predicted_n"] == 24
    assert reply["timings"]["draft_n"] >= reply["timings"]["draft_n_accepted"] > 0
    assert "timings" in live.stream(**PROBE, timings_per_token=True)[-1]
    assert "timings" not in live.complete(**PROBE)


def test_facts_of_the_tokenizer(live: Live) -> None:
    facts = live.client.get("/tokenizer_info").json()
    assert facts["vocab_size"] == live.core.tokenizer.num_tokens
    assert (
        facts["model_max_length"]
        == live.client.get("/v1/models").json()["data"][0]["max_model_len"]
    )
    assert "add_generation_prompt" in facts["chat_template"]
    assert live.post("/detokenize", {"model": "tiny", "tokens": [5]}).json().keys() == {"prompt"}


def test_long_prompts_are_cut_where_the_request_says(live: Live) -> None:
    text = "a probe in the dark"
    for side, kept in (("left", text[-4:]), ("right", text[:4])):
        cut = {"truncate_prompt_tokens": 4, "truncation_side": side}
        reply = live.complete(**PROBE | cut, return_token_ids=True)
        tokens = live.post("/tokenize", {"prompt": kept}).json()["tokens"]
        assert reply["choices"][0]["prompt_token_ids"] == tokens
    for wrong in (0, 4096):
        assert live.post("/v1/completions", PROBE | {"truncate_prompt_tokens": wrong}).is_error


# --- embeddings -----------------------------------------------------------------------------------


def expected_vector(live: Live, text: str) -> torch.Tensor:
    """The same by hand, in one pass over fresh blocks."""
    core = live.core
    tokens = core.tokenizer.encode(text)
    (id,) = core.kv.scratch(1)
    assert core.kv.reserve(id, len(tokens))
    depth = core.target.spec.num_layers
    batch = pack([Slice(tokens, 0, core.kv.table(id), None)], taps=(depth,))
    states = core.target.forward(batch).taps[depth].float().clone()
    core.kv.free(id, keep=False)
    mean = (states / states.norm(dim=-1, keepdim=True)).mean(dim=0)
    vector: torch.Tensor = mean / mean.norm()
    return vector


def test_vectors_are_the_pooled_states_in_every_dialect(live: Live) -> None:
    texts = ["a cat sat", "quite another text " * 20]
    wanted = [expected_vector(live, text) for text in texts]
    ours = live.post("/v1/embeddings", {"input": texts}).json()
    ollama = live.post("/api/embed", {"model": "tiny", "input": texts}).json()
    llama = live.post("/embedding", {"content": texts}).json()
    packed = live.post("/v1/embeddings", {"input": texts, "encoding_format": "base64"}).json()
    raw = [base64.b64decode(entry["embedding"]) for entry in packed["data"]]
    for i, vector in enumerate(wanted):
        for found in (
            ours["data"][i]["embedding"],
            ollama["embeddings"][i],
            llama[i]["embedding"][0],
            struct.unpack(f"<{len(raw[i]) // 4}f", raw[i]),
        ):
            torch.testing.assert_close(torch.tensor(found), vector, rtol=1e-4, atol=1e-5)
    assert ours["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_forms_of_vectors(live: Live) -> None:
    def first(**body: Any) -> Any:
        return live.post("/v1/embeddings", body).json()["data"][0]["embedding"]

    whole = torch.tensor(first(input="a cat sat"))
    raw = torch.tensor(first(input="a cat sat", use_activation=False))
    assert abs(float(raw.norm()) - 1) > 1e-3
    torch.testing.assert_close(raw / raw.norm(), whole)
    form = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    halves = struct.unpack(f">{len(whole)}e", base64.b64decode(first(input="a cat sat", **form)))
    torch.testing.assert_close(torch.tensor(halves), whole, rtol=1e-2, atol=1e-3)
    assert first(input="a cat sat", truncate_prompt_tokens=5) == first(input="a cat")
    assert len(first(input="x" * 600, truncate_prompt_tokens=-1)) == len(whole)
    messages = [{"role": "user", "content": "hi"}]
    prompt = live.post("/apply-template", {"messages": messages, "add_generation_prompt": False})
    text = prompt.json()["prompt"]
    assert first(messages=messages) == first(input=text, add_special_tokens=False)


def test_ranks_are_cosines_of_vectors(live: Live) -> None:
    texts = ["a cat sat", "another", "a cat ran"]
    query, *others = (expected_vector(live, text) for text in ["a cat", *texts])
    wanted = [float(query @ other) for other in others]
    best = sorted(range(3), key=lambda i: -wanted[i])
    ranked = live.post("/v1/rerank", {"query": "a cat", "documents": texts, "top_n": 2}).json()
    assert [one["index"] for one in ranked["results"]] == best[:2]
    assert [one["document"]["text"] for one in ranked["results"]] == [texts[i] for i in best[:2]]
    scores = [one["relevance_score"] for one in ranked["results"]]
    assert scores == pytest.approx([wanted[i] for i in best[:2]], abs=1e-4)
    bare = live.post("/rerank", {"query": "a cat", "texts": texts, "return_text": True}).json()
    assert [one["text"] for one in bare] == [texts[i] for i in best]
    pairs = live.post("/score", {"text_1": "a cat", "text_2": texts}).json()["data"]
    assert [one["score"] for one in pairs] == pytest.approx(wanted, abs=1e-4)
    for path, body in (
        ("/rerank", {"query": "a", "documents": []}),
        ("/rerank", {"query": "a", "documents": [1]}),
        ("/rerank", {"query": "a"}),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
    ):
        assert live.post(path, body).status_code == 400


def test_long_texts_are_read_in_pieces(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a long text " * 30
    whole = live.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"]
    config = replace(live.core.scheduler.config, max_step_tokens=64)
    monkeypatch.setattr(live.core.scheduler, "config", config)
    pieces = live.post("/v1/embeddings", {"input": text}).json()["data"][0]["embedding"]
    torch.testing.assert_close(torch.tensor(pieces), torch.tensor(whole), rtol=1e-4, atol=1e-5)
    last = live.post("/v1/embeddings", {"input": text, "pooling": "last"}).json()
    assert last["data"][0]["embedding"] != whole


def test_vectors_beside_a_running_stream_change_nothing(live: Live, target: Target) -> None:
    target.delay_s = 0.002
    body = json.dumps(PROBE | {"stream": True, "max_tokens": 24}).encode()
    headers = {"content-type": "application/json"}
    with live.client.stream("POST", "/v1/completions", content=body, headers=headers) as stream:
        assert live.post("/v1/embeddings", {"input": "meanwhile"}).status_code == 200
        text = "".join(stream.iter_text())
    said = "".join(chunk["choices"][0]["text"] for chunk in chunks_of(text))
    assert said == live.expected_probe


@pytest.mark.parametrize(
    "body",
    [
        {"input": []},
        {"input": ""},
        {"input": ["x"] * 600},
        {"input": [[]]},
        {"input": [-1]},
        {"input": [300]},
        {"input": "x" * 600},
        {"input": "x", "dimensions": 3},
        {"input": "x", "encoding_format": "binary"},
        {"input": "x", "messages": [{"role": "user", "content": "x"}]},
        {"input": "x", "truncate_prompt_tokens": 4096},
        {"input": "x", "truncate_prompt_tokens": 0},
        {},
    ],
)
def test_inputs_that_cannot_be(live: Live, body: dict[str, Any]) -> None:
    assert live.post("/v1/embeddings", body).status_code == 400


# --- filling gaps ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def filling(
    folders: tuple[Path, Path],
    engine_config: EngineConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("filling") / "target"
    shutil.copytree(folders[0], folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    last = sorted(vocabulary, key=vocabulary.get)[-3:]
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    for old, new in zip(last, names, strict=True):
        id = vocabulary.pop(old)
        vocabulary[new] = id
        content["added_tokens"].append(token | {"id": id, "content": new, "special": True})
    path.write_text(json.dumps(content))
    with Live(with_options(engine_config, model=str(folder), draft_model=None)) as live:
        yield live
        live.check()


def test_gaps_are_filled_where_there_are_tokens_for_it(live: Live, filling: Live) -> None:
    marked = "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>"
    ids = filling.core.tokenizer.encode(marked)
    assert len(ids) == len("def f():") + 3
    common = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    wanted = filling.text(prompt=ids, **common)
    assert filling.text(prompt="def f(", suffix="):", **common) == wanted
    body = {"input_prefix": "def f(", "input_suffix": "):", "n_predict": 12} | common
    body.pop("max_tokens")
    assert filling.post("/infill", body).json()["content"] == wanted
    for path, wrong in (("/infill", body), ("/v1/completions", {"prompt": "x", "suffix": "y"})):
        response = live.post(path, wrong)
        assert response.status_code == 400
        assert "no tokens for filling" in response.json()["error"]["message"]


# --- what evaluation and RL need ------------------------------------------------------------------


def test_token_ids_of_prompt_and_reply(live: Live) -> None:
    encode = live.core.tokenizer.encode
    (choice,) = live.complete(**PROBE, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == encode(PROBE["prompt"])
    said = live.post("/detokenize", {"tokens": choice["token_ids"]}).json()["prompt"]
    assert said == live.expected_probe
    chunks = live.stream(**PROBE, return_token_ids=True)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert [id for part in streamed for id in part["token_ids"]] == choice["token_ids"]
    assert streamed[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert not any("prompt_token_ids" in part for part in streamed[1:])
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "ignore_eos": True}
    reply = live.post("/v1/chat/completions", body | {"return_token_ids": True}).json()
    assert len(reply["choices"][0]["token_ids"]) == 4


def test_scores_of_the_prompt_are_those_of_an_echo(live: Live) -> None:
    body = {"prompt": "once upon", "max_tokens": 1, "temperature": 0}
    (echoed,) = live.complete(**body, echo=True, logprobs=1)["choices"]
    (scored,) = live.complete(**body, prompt_logprobs=1, return_token_ids=True)["choices"]
    scores, ids = scored["prompt_logprobs"], scored["prompt_token_ids"]
    assert scores[0] is None
    assert len(scores) == len(ids) == len("once upon")
    for i in range(1, len(ids)):
        entry = scores[i][str(ids[i])]
        assert entry["logprob"] == pytest.approx(echoed["logprobs"]["token_logprobs"][i], abs=1e-4)
        assert entry["decoded_token"] == "once upon"[i]
    streamed = body | {"prompt_logprobs": 1, "stream": True}
    assert live.post("/v1/completions", streamed).status_code == 400


def test_tokens_of_scores_as_ids(live: Live) -> None:
    more = {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = live.complete(**PROBE, **more)["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_metrics_that_dashboards_for_vllm_read(live: Live) -> None:
    before = live.figure("request_params_max_tokens_sum"), live.figure("iteration_tokens_total_sum")
    live.complete(**PROBE, speculation={"off": True})
    assert live.figure("request_params_max_tokens_sum") == before[0] + PROBE["max_tokens"]
    assert live.figure("iteration_tokens_total_sum") == before[1] + 24
    assert live.figure("request_inference_time_seconds_count") > 0
    assert live.figure("prefix_cache_queries_total") >= live.figure("prefix_cache_hits_total")
    assert live.figure("request_params_n_count") > 0
    page = live.client.get("/metrics").text
    blocks = live.core.kv.num_blocks
    assert f'num_gpu_blocks="{blocks}"' in page


def test_several_prompts_in_one_request(live: Live) -> None:
    text = str(LLAMA["prompt"])
    tokens = live.post("/tokenize", {"content": text, "add_special": True}).json()["tokens"]
    prompts = [text, tokens, {"prompt_string": text}]
    replies = live.post("/completion", LLAMA | {"prompt": prompts}).json()
    assert [reply["content"] for reply in replies] == [live.expected_probe] * 3
    assert [reply["index"] for reply in replies] == [0, 1, 2]


def test_chosen_fields_of_a_reply(live: Live) -> None:
    fields = ["content", "generation_settings/n_predict", "no/such/field"]
    reply = live.post("/completion", LLAMA | {"response_fields": fields}).json()
    assert reply == {"content": live.expected_probe, "generation_settings/n_predict": 24}


def test_verbose_shows_the_prompt_and_the_settings(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 0.5}
    bias = {"7": 1.5}
    more = {"verbose": True, "ignore_eos": True, "logit_bias": bias}
    whole = live.post("/v1/chat/completions", chat | more).json()
    shown = whole["__verbose"]
    assert shown["prompt"] == "[user] x\n[assistant] "
    assert shown["content"] == whole["choices"][0]["message"]["content"]
    assert (shown["generation_settings"]["temperature"], shown["tokens_predicted"]) == (0.5, 3)
    biases = shown["generation_settings"]["logit_bias"]
    assert {"token": 7, "bias": 1.5} in biases
    assert [one for one in biases if one["bias"] is None]  # the tokens that end a text
    chunks = live.stream("/v1/chat/completions", **chat, **more)
    assert [i for i, chunk in enumerate(chunks) if "__verbose" in chunk] == [len(chunks) - 1]
    assert "__verbose" not in live.post("/v1/chat/completions", chat | {"verbose": False}).json()


def test_metrics_under_the_names_of_llama_server(live: Live) -> None:
    def read() -> dict[str, float]:
        reply = live.client.get("/metrics")
        assert int(reply.headers["process-start-time-unix"]) > 1e9
        lines = [line for line in reply.text.splitlines() if line.startswith("llamacpp:")]
        return {name: float(value) for name, _, value in (one.partition(" ") for one in lines)}

    before = read()
    body = LLAMA | {"prompt": "names of metrics " * 3, "n_predict": 4}
    replies = [live.post("/completion", body).json() for _ in range(2)]
    live.post("/v1/embeddings", {"input": "abc"})
    after = read()
    gained = {name: after[name] - before[name] for name in before}
    timings = [reply["timings"] for reply in replies]
    assert timings[1]["cache_n"] > 0
    assert gained["llamacpp:prompt_tokens_total"] == sum(one["prompt_n"] for one in timings) + 3
    assert gained["llamacpp:prompt_tokens_cached_total"] == sum(one["cache_n"] for one in timings)
    assert gained["llamacpp:tokens_predicted_total"] == 8
    assert gained["llamacpp:n_decode_total"] > 1
    assert after["llamacpp:n_tokens_max"] >= len(body["prompt"]) + 4
    assert after["llamacpp:requests_processing"] == 0
    text = live.client.get("/metrics").text
    for name in after:
        assert f"# HELP {name} " in text
        assert re.search(rf"# TYPE {name} (counter|gauge)\n", text)


def test_the_speed_of_a_completion_leaves_out_its_first_token(live: Live) -> None:
    """It comes with the prompt, whose time has a figure of its own."""
    one = live.post("/completion", LLAMA | {"n_predict": 1}).json()["timings"]
    assert (one["predicted_n"], one["predicted_per_second"]) == (1, 0)
    many = live.post("/completion", LLAMA | {"n_predict": 9}).json()["timings"]
    assert many["predicted_per_second"] == pytest.approx(8e3 / many["predicted_ms"])


def test_the_envelope_of_vertex_ai(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "seed": 3}
    asked = [{"@requestFormat": "chatCompletions", **chat | {"seed": seed}} for seed in (3, 4)]
    reply = live.post("/predict", {"instances": asked}).json()["predictions"]
    said = [one["choices"][0]["message"]["content"] for one in reply]
    alone = live.post("/v1/chat/completions", chat).json()
    assert said[0] == alone["choices"][0]["message"]["content"] != said[1]
    for wrong in ([], [chat], [asked[0] | {"stream": True}], [asked[0] | {"messages": []}]):
        assert live.post("/predict", {"instances": wrong}).status_code == 400
    late = [asked[0], asked[0] | {"max_tokens": 100, "min_tokens": 101}]
    refused = live.post("/predict", {"instances": late})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_the_routes_of_sagemaker(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    bodies: list[tuple[dict[str, Any], str]] = [
        (chat, "choices"),
        ({"prompt": "x", "max_tokens": 2}, "choices"),
        ({"input": "x"}, "data"),
        ({"query": "x", "documents": ["y"]}, "results"),
    ]
    for body, field in bodies:
        assert field in live.post("/invocations", body).json()
    assert live.post("/invocations", {}).status_code == 404
    assert live.client.get("/ping").status_code == 200
    assert live.client.get("/load").json() == {"server_load": 0}
