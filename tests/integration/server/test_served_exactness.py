"""The output is the target's, whatever drafts for it. Rows 22-29 of the fault matrix."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from scipy.stats import chi2

from outrider.engine.build import EngineConfig, build
from outrider.errors import ConfigError, ModelError
from outrider.events import StepReport
from outrider.registry import proposer_names
from outrider.sampling import SamplingParams

from .live import LONG, PROBE, Live

MESSAGES = [{"role": "user", "content": "tell me a story"}]
RULES = ["coupled", "token", "block", "tree"]


@pytest.fixture(scope="module")
def everything(engine_config: EngineConfig) -> Iterator[Live]:
    """A server that offers every proposer this pair of models allows."""
    engine = build(engine_config)
    offered = []
    for name in proposer_names():
        try:
            _ = engine.proposers[name]
        except (ConfigError, ModelError):
            continue  # needs a head, or another tokenizer
        offered.append(name)
    assert {"draft-model", "ngram", "prediction", "suffix"} <= set(offered)
    with Live(engine, proposers=tuple(offered)) as live:
        yield live
        live.check()


def wishes(live: Live) -> list[dict[str, Any]]:
    names = sorted(live.service.served.proposers - {"prediction"})
    return [{"proposer": name, "num_draft_tokens": k} for name in names for k in (1, 4, "auto")]


def test_row_22_greedy_output_is_the_same_for_every_proposer(everything: Live) -> None:
    body = {"prompt": "one two one two one", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    plain = everything.text(**body, speculation={"off": True})
    for wish in wishes(everything):
        assert everything.text(**body, speculation=wish) == plain, wish


def test_row_23_sampled_output_follows_the_law(live: Live) -> None:
    """Pairs of tokens of 1,600 seeded samples, by every rule, against the law of plain decoding."""
    prompt = live.post("/tokenize", {"prompt": "the law of "}).json()["tokens"]
    k = 6

    def law(tokens: list[int]) -> dict[int, float]:
        result = live.direct(tokens, params=SamplingParams(max_tokens=1, logprobs=k))
        (entry,) = result.completions[0].logprobs or []
        weights = {token: math.exp(p) for token, p in entry.top.items()}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    expected: dict[tuple[int, int], float] = {}
    for first, p in law(prompt).items():
        for second, q in law([*prompt, first]).items():
            expected[first, second] = p * q
    seen: Counter[tuple[int, ...]] = Counter()

    def watch(report: StepReport) -> None:
        for event in report.events:
            outputs.setdefault((event.request_id, event.sample_index), []).extend(event.tokens)

    outputs: dict[tuple[str, int], list[int]] = {}
    live.core.observers.append(watch)
    try:
        for seed in range(100):
            live.complete(
                prompt=prompt,
                max_tokens=2,
                n=16,
                seed=seed,
                temperature=1.0,
                top_k=k,
                ignore_eos=True,
                speculation={"num_draft_tokens": 2, "verifier": RULES[seed % 4]},
            )
    finally:
        live.core.observers.remove(watch)
    seen.update(tuple(tokens) for tokens in outputs.values())
    assert set(seen) <= set(expected)
    total = sum(seen.values())
    assert total == 1600
    cells = [(seen[pair], p * total) for pair, p in expected.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = [cell for cell in cells if cell[1] < 5]
    large.append((sum(o for o, _ in rest), sum(e for _, e in rest)))
    statistic = sum((o - e) ** 2 / e for o, e in large if e > 0)
    assert chi2.sf(statistic, len(large) - 1) > 1e-3


def test_row_24_the_same_seed_alone_and_in_a_batch(live: Live) -> None:
    bodies = [
        {"prompt": f"seeded {i}", "max_tokens": 40, "temperature": 1.0, "seed": 100 + i}
        for i in range(8)
    ]
    alone = [live.text(**body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda body: live.text(**body), bodies)) == alone
    off = [live.text(**body, speculation={"off": True}) for body in bodies]
    assert off == alone


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.7, "min_p": 0.05},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0},
    {"logit_bias": {"7": 5, "9": -100}, "n": 2},
    {"logprobs": 3, "echo": True},
    {"stop": ["a", "e"], "min_tokens": 3},
    {"temperature": 0, "stream": True},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: "+".join(p))
def test_row_25_every_proposer_takes_every_parameter(
    everything: Live, parameters: dict[str, Any]
) -> None:
    """200 or a 400 that says why, never a 5xx; and with the coupled rule the very same text."""
    body = {"prompt": "a b a b a", "max_tokens": 12, "seed": 4} | parameters
    plain = everything.post("/v1/completions", body | {"speculation": {"off": True}})
    for name in sorted(everything.service.served.proposers - {"prediction"}):
        for rule in RULES:
            wish = {"proposer": name, "num_draft_tokens": 3, "verifier": rule}
            response = everything.post("/v1/completions", body | {"speculation": wish})
            assert response.status_code in (200, 400), (wish, response.text)
            if response.status_code == 400:
                assert rule != "coupled", (wish, response.text)
                assert response.json()["error"]["param"] == "speculation"
            elif rule == "coupled" and "stream" not in parameters:
                texts = [choice["text"] for choice in response.json()["choices"]]
                assert texts == [choice["text"] for choice in plain.json()["choices"]], wish


def test_row_26_only_true_tokens_come_out(live: Live) -> None:
    """The embedding has 320 rows, the vocabulary 300 tokens: the rest is never emitted."""
    seen: set[int] = set()

    def watch(report: StepReport) -> None:
        seen.update(token for event in report.events for token in event.tokens)

    live.core.observers.append(watch)
    try:
        live.complete(prompt="hot", max_tokens=300, temperature=50.0, n=4, ignore_eos=True, seed=1)
    finally:
        live.core.observers.remove(watch)
    assert len(seen) > 200
    assert max(seen) < 300


def test_row_27_when_every_draft_is_unwelcome_it_still_ends(live: Live) -> None:
    body = LONG | {"max_tokens": 20}
    banned = {str(token): -100 for token in range(300)}
    assert live.complete(**body, logit_bias=banned)["choices"][0]["finish_reason"] == "length"
    # A prediction whose tokens are all biased away: drafted, refused, never in the output.
    (token,) = live.post("/tokenize", {"prompt": "z"}).json()["tokens"]
    chat = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    chat |= {"logit_bias": {str(token): -100}}
    plain = live.post("/v1/chat/completions", chat).json()
    guessed = live.post(
        "/v1/chat/completions", chat | {"prediction": {"type": "content", "content": "z" * 40}}
    ).json()
    assert guessed["choices"][0]["message"] == plain["choices"][0]["message"]
    details = guessed["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 0
    assert details["rejected_prediction_tokens"] > 0


def test_row_28_stop_strings_inside_what_was_accepted_at_once(live: Live) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 60, "temperature": 1.0, "seed": 3}
    chat |= {"ignore_eos": True, "speculation": {"num_draft_tokens": 8}}
    whole = live.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    guess = {"prediction": {"type": "content", "content": whole}}
    for start in range(2, 30, 3):
        stop = whole[start : start + 3]
        if "\ufffd" in stop:
            continue
        body = chat | guess | {"stop": [stop]}
        choice = live.post("/v1/chat/completions", body).json()["choices"][0]
        assert choice["message"]["content"] == whole[: whole.index(stop)]
        assert choice["finish_reason"] == "stop"
        chunks = live.stream("/v1/chat/completions", **body)
        streamed = "".join(c["choices"][0]["delta"]["content"] for c in chunks)
        assert streamed == whole[: whole.index(stop)]


def test_row_29_characters_are_never_cut(live: Live) -> None:
    """Chunks concatenate to the text; a character of several tokens comes whole."""
    euro = live.post("/tokenize", {"prompt": "€"}).json()["tokens"]
    assert len(euro) == 3
    bias = {str(token): 60 + i for i, token in enumerate(euro)}
    for seed in range(6):
        body: dict[str, Any] = {"prompt": "€€€", "max_tokens": 60, "temperature": 2.0, "seed": seed}
        body |= {"logit_bias": bias, "ignore_eos": True, "presence_penalty": -1.0}
        whole = live.text(**body)
        chunks = live.stream(**body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
        plain = live.stream(**body, speculation={"off": True})
        pieces = [chunk["choices"][0]["text"] for chunk in plain]
        assert "".join(pieces) == whole
        assert whole.count("€") == sum(piece.count("€") for piece in pieces)


def test_the_probe_is_the_same_through_every_door(live: Live) -> None:
    tokens = live.post("/tokenize", {"prompt": PROBE["prompt"]}).json()["tokens"]
    streamed = "".join(chunk["choices"][0]["text"] for chunk in live.stream(**PROBE))
    assert streamed == live.text(**PROBE | {"prompt": tokens}) == live.expected_probe
