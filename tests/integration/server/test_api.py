"""What real clients exercise: OpenAI's SDK, unmodified, and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import openai
import pytest

from outrider.engine import async_engine
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.server.generation import Generation
from outrider.server.reply import Writer
from outrider.server.stream import DONE, frame, frames

from .live import PROBE, Live, Target, chunks_of

MESSAGES: Any = [{"role": "user", "content": "tell me a story"}]


@pytest.fixture
def sdk(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_health_version(live: Live, sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 512)  # type: ignore[attr-defined]
    assert sdk.models.retrieve("tiny").owned_by == "outrider"
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4o")
    assert live.client.get("/health").json() == {"status": "ok"}
    assert live.client.get("/version").json()["version"]


def test_chat_whole_and_streamed_agree(sdk: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "seed": 7, "n": 2}
    whole = sdk.chat.completions.create(**options, max_completion_tokens=30)
    texts = {choice.index: "" for choice in whole.choices}
    reasons: dict[int, str | None] = {}
    usage = None
    stream = sdk.chat.completions.create(
        **options, max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert texts[0] != texts[1]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_async_clients_are_batched(live: Live) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="x") as client:
            replies = await asyncio.gather(
                *(
                    client.completions.create(
                        model="tiny", prompt=f"prompt {i}", max_tokens=20, temperature=0
                    )
                    for i in range(8)
                )
            )
            return [reply.choices[0].text for reply in replies]

    texts = asyncio.run(main())
    assert texts == [
        live.text(prompt=f"prompt {i}", max_tokens=20, temperature=0) for i in range(8)
    ]


def test_the_chat_template_frames_the_prompt(live: Live) -> None:
    reply = live.post("/tokenize", {"messages": MESSAGES}).json()
    text = live.post("/detokenize", {"tokens": reply["tokens"]}).json()["prompt"]
    assert text == "[user] tell me a story\n[assistant] "
    assert reply["count"] == len(reply["tokens"])
    parts = [{"type": "text", "text": "tell me "}, {"type": "text", "text": "a story"}]
    split = live.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()
    assert split["tokens"] == reply["tokens"]
    strings = live.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert strings["token_strs"] == ["a", "b"]


def test_prompts_as_text_ids_and_batches(live: Live) -> None:
    texts = ["first one", "second one"]
    ids = [live.post("/tokenize", {"prompt": text}).json()["tokens"] for text in texts]
    alone = [live.text(prompt=text, max_tokens=12, temperature=0) for text in texts]
    options = {"max_tokens": 12, "temperature": 0}
    for prompt in (texts, ids):
        choices = live.complete(prompt=prompt, **options)["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1]
    assert live.text(prompt=ids[0], **options) == alone[0]
    several = live.complete(prompt=texts, n=2, seed=1, max_tokens=6)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["completion_tokens"] <= 24


def test_streamed_batches_interleave_but_agree(live: Live) -> None:
    body: dict[str, Any] = {"prompt": ["one", "two", "three"], "n": 2, "seed": 5, "max_tokens": 15}
    whole = live.complete(**body)
    texts = [""] * 6
    for chunk in live.stream(**body):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_echo_scores_the_prompt_like_an_evaluation_harness_wants(live: Live) -> None:
    prompt = live.post("/tokenize", {"prompt": "the quick brown fox"}).json()["tokens"]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 2}
    (choice,) = live.complete(**body)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("the quick brown fox")
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["token_logprobs"]) == len(prompt) + 1
    assert logprobs["text_offset"] == list(range(len(prompt) + 1))
    assert "".join(logprobs["tokens"]) == choice["text"]
    # Each is what the model says when it decodes there.
    for i in (1, 5, len(prompt) - 1):
        there = live.complete(prompt=prompt[:i], max_tokens=1, logprobs=20, temperature=0)
        top = there["choices"][0]["logprobs"]["top_logprobs"][0]
        assert max(logprobs["top_logprobs"][i].values()) == pytest.approx(
            max(top.values()), abs=1e-4
        )
    # The last one is greedy: its own value is the largest, to the last bit.
    assert logprobs["token_logprobs"][-1] == max(logprobs["top_logprobs"][-1].values())
    only = live.complete(**body | {"max_tokens": 0})
    assert only["choices"][0]["text"] == "the quick brown fox"
    assert only["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
        logprobs["token_logprobs"][1:-1]
    )
    streamed = live.stream(**body)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


def test_chat_logprobs(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=5, temperature=0
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 5
    joined = b"".join(bytes(entry.bytes or ()) for entry in content)
    assert joined.decode(errors="replace") == reply.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)


def test_usage_along_the_way(live: Live) -> None:
    chunks = live.stream(
        prompt="count", max_tokens=10, stream_options={"continuous_usage_stats": True}
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert chunks[-1]["usage"]["prompt_tokens"] == 5
    assert all("usage" not in chunk for chunk in live.stream(prompt="count", max_tokens=4))
    talk = live.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "count"}],
        max_tokens=4,
        stream_options={"continuous_usage_stats": True},
    )
    for usage in [chunk["usage"] for chunk in talk]:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_what_load_generators_send(live: Live) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "benchmark",
        "max_tokens": 16,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "stop": None,
        "logprobs": None,
        "stream_options": {"include_usage": True},
    }
    chunks = live.stream(**body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 16


def test_every_sampling_option_reaches_the_engine(live: Live) -> None:
    """The served text is what the engine gives for the same parameters."""
    prompt = live.post("/tokenize", {"prompt": "options"}).json()["tokens"]
    options: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 11,
        "max_tokens": 40,
        "min_tokens": 3,
    }
    served = live.text(prompt=prompt, **options, logit_bias={"5": 4.0}, stop=["qq"])
    params = SamplingParams(**options, logit_bias={5: 4.0}, stop=("qq",))
    assert served == live.direct(prompt, params=params, speculation=Speculation()).text


def test_speculation_is_the_requests_own_choice(live: Live) -> None:
    def figures(**wish: Any) -> tuple[str, dict[str, Any]]:
        reply = live.complete(**PROBE, speculation={"metrics": "detailed"} | wish)
        return reply["choices"][0]["text"], reply["metrics"]["speculative_decoding"]

    assert "metrics" not in live.complete(**PROBE)
    plain, none = figures(off=True)
    assert none["num_draft_tokens"] == 0
    assert none["mean_acceptance_length"] == 1.0
    wishes: list[dict[str, Any]] = [
        {"proposer": "draft-model", "num_draft_tokens": 5},
        {"proposer": "ngram", "num_draft_tokens": 2, "verifier": "token"},
        {"num_draft_tokens": "auto"},
        {"num_draft_tokens": 0},
        {},
    ]
    for wish in wishes:
        text, found = figures(**wish)
        assert text == plain
        assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]
        assert sum(found["per_step_accepted"]) == found["num_accepted_draft_tokens"]
        assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
        if isinstance(wish.get("num_draft_tokens"), int):
            assert max(found["per_step_drafted"], default=0) <= wish["num_draft_tokens"]
    chunks = live.stream(**PROBE, speculation={"metrics": "summary"})
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"proposer": "nrgam"}, "Did you mean 'ngram'"),
        ({"proposer": "medusa"}, "unknown proposer"),  # known to us, not offered by this server
        ({"verifier": "blok"}, "Did you mean 'block'"),
        ({"proposer": "prediction"}, "needs a prediction"),
        ({"num_draft_tokens": 10**6}, "less than or equal"),
        ({"num_draft_tokens": -1}, "greater than or equal"),
        ({"off": True, "proposer": "ngram"}, "without a proposer"),
        ({"tokens": 3}, "unknown parameter"),
    ],
)
def test_impossible_speculation_is_refused(live: Live, wish: dict[str, Any], says: str) -> None:
    response = live.post("/v1/completions", {**PROBE, "speculation": wish})
    assert response.status_code == 400
    error = response.json()["error"]
    assert says in error["message"]
    assert error["param"] == "speculation"


def test_predictions_are_counted(sdk: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 30}
    plain = sdk.chat.completions.create(**options)
    text = plain.choices[0].message.content or ""
    guessed = sdk.chat.completions.create(
        **options, prediction={"type": "content", "content": text}
    )
    assert guessed.choices[0].message.content == text
    assert guessed.usage is not None
    details = guessed.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) >= 15
    wrong = sdk.chat.completions.create(
        **options, prediction={"type": "content", "content": "zzzzzzzzzzzzzzzzzzzzzzzzz"}
    )
    assert wrong.choices[0].message.content == text
    assert wrong.usage is not None
    details = wrong.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == 0
    assert (details.rejected_prediction_tokens or 0) > 0


def test_prefix_caching_shows_in_usage(live: Live) -> None:
    body = {"prompt": "shared words " * 12, "max_tokens": 2, "temperature": 0}
    live.complete(**body)
    cached = live.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 100
    apart = live.complete(**body, cache_salt="apart")["usage"]
    assert apart["prompt_tokens_details"]["cached_tokens"] == 0


def test_metrics_speak_vllms_language(live: Live) -> None:
    names = [
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_success_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
    ]
    before = {name: live.figure(name) for name in names}
    reply = live.complete(**PROBE, speculation={"metrics": "summary"})
    gained = {name: live.figure(name) - before[name] for name in names}
    found = reply["metrics"]["speculative_decoding"]
    assert gained["prompt_tokens_total"] == reply["usage"]["prompt_tokens"]
    assert gained["generation_tokens_total"] == 24
    assert gained["spec_decode_num_drafts_total"] == found["num_spec_steps"]
    assert gained["spec_decode_num_draft_tokens_total"] == found["num_draft_tokens"]
    assert gained["spec_decode_num_accepted_tokens_total"] == found["num_accepted_draft_tokens"]
    per_position = gained["spec_decode_num_accepted_tokens_per_pos_total"]
    assert per_position == found["num_accepted_draft_tokens"]
    assert gained["request_success_total"] == 1
    assert gained["time_to_first_token_seconds_count"] == 1
    assert gained["inter_token_latency_seconds_count"] > 0
    page = live.client.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in page
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in page


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_streams_line_by_line(live: Live) -> None:
    body = json.dumps(PROBE | {"stream": True})
    command = ["curl", "-sSN", "--fail", f"{live.url}/v1/completions", "-d", body]
    command += ["-H", "content-type: application/json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks_of(done.stdout))
    assert text == live.expected_probe


def test_frames_collect_tokens_while_others_stream(
    live: Live, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream alone gets its tokens as they come; first and last tokens never wait."""
    monkeypatch.setattr(async_engine, "HANDLING_S", 30.0)  # however busy the server's thread is
    target.delay_s = 0.02
    alone = live.stream(**PROBE, speculation={"off": True})
    assert len(alone) > 12  # 24, but for those that come while the reply begins
    target.delay_s = 0.0
    monkeypatch.setattr(async_engine, "GATHER_S", 1.0)  # however slow the passes are
    monkeypatch.setattr(async_engine, "MAX_GATHER_S", 1.0)
    body = PROBE | {"prompt": [PROBE["prompt"]] * 8}
    merged = live.stream(**body, speculation={"off": True})
    assert len(merged) < 8 * 24
    texts = [""] * 8
    for chunk in merged:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [live.expected_probe] * 8


def test_request_ids_are_echoed_or_made(live: Live) -> None:
    given = live.client.get("/version", headers={"x-request-id": "trace-1.a"})
    assert given.headers["x-request-id"] == "trace-1.a"
    odd = live.client.get("/version", headers={"x-request-id": "a b\tc" * 30})
    assert len(odd.headers["x-request-id"]) == 24


def test_what_ends_a_stream_goes_in_one_piece() -> None:
    """Each piece is a packet: the last words, the usage and [DONE] are known together."""

    class Told:
        is_complete = False

        async def deltas(self) -> AsyncIterator[list[int]]:
            yield [1]
            self.is_complete = True
            yield [2]

    class Said:
        done = DONE

        def delta(self, delta: int) -> list[dict[str, Any]]:
            return [{"delta": delta}]

        def end(self) -> list[dict[str, Any]]:
            return [{"usage": True}]

        def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
            return frame(payload, padded=padded)

    async def pieces() -> list[bytes]:
        told, said = cast("Generation", Told()), cast("Writer", Said())
        stream = frames(told, said, padded=False, rate=None)
        return [piece async for piece in stream]

    first, last = asyncio.run(pieces())
    assert first.count(b"data: ") == 1
    assert last.count(b"data: ") == 3
    assert last.endswith(b"data: [DONE]\n\n")


def test_best_of_keeps_the_most_probable(live: Live) -> None:
    body = {"prompt": "in the beginning", "max_tokens": 6, "temperature": 1.5, "seed": 3}

    def mean(choice: dict[str, Any]) -> float:
        scores = choice["logprobs"]["token_logprobs"]
        return float(sum(scores) / len(scores))

    every = live.complete(**body, n=5, logprobs=0)["choices"]
    ranked = sorted(every, key=mean, reverse=True)
    best = live.complete(**body, n=2, best_of=5)
    assert [choice["text"] for choice in best["choices"]] == [c["text"] for c in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 30
    assert best["system_fingerprint"].startswith("b")


def test_scores_of_chosen_tokens(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
    more = {"logprobs": True, "top_logprobs": 3, "return_tokens_as_token_ids": True}
    reply = live.post(
        "/v1/chat/completions",
        body | more | {"logprob_token_ids": [5, 9], "allowed_token_ids": [7, 11]},
    ).json()
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert entry["token"] in ("token_id:7", "token_id:11")
        found = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
        assert found.keys() == {"token_id:5", "token_id:9", entry["token"]}
        assert found[entry["token"]] == entry["logprob"]
    assert reply["prompt_logprobs"] is None
    for field in ("logprob_token_ids", "allowed_token_ids"):
        error = live.post("/v1/chat/completions", body | {field: [100_000]}).json()["error"]
        assert error["param"] == field


def test_a_reply_may_begin_with_the_message_that_it_continues(live: Live) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, "}]
    body = {"messages": said, "max_tokens": 4, "temperature": 0, "echo": True}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    reply = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert reply.startswith("well, ")
    chunks = live.stream("/v1/chat/completions", **body)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == reply


def test_an_error_names_the_keys_that_are_no_tokens(live: Live) -> None:
    body = {"prompt": "x", "logit_bias": {"5": 1, "bad": 1, "worse": 2}}
    error = live.post("/v1/completions", body).json()["error"]
    assert "'bad', 'worse'" in error["message"]
