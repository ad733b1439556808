"""The engine's promises beyond exactness: refusals, finish conditions, failures, memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.contracts import Draw, Needs, Proposal, SequenceView
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, LossyPairing, RequestError, UnknownName
from outrider.llm import LLM
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from scripted import Drafter

PROMPT = [5, 9, 5, 9, 5, 9, 2]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", max_positions=96)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=96)


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> Engine:
    return build(
        EngineConfig(
            model=str(pair[0]),
            draft_model=str(pair[1]),
            num_draft_tokens=4,
            backend="torch",
            block_size=8,
            kv_tokens=512,
        )
    )


def finish(
    engine: Engine, prompt: list[int] = PROMPT, **params: object
) -> tuple[list[int], str, str]:
    request = engine.add(prompt, SamplingParams(**params))  # type: ignore[arg-type]
    for _ in engine.run([request]):
        pass
    (completion,) = engine.collect(request).completions
    return completion.tokens, completion.text, completion.finish_reason


def scripted(engine: Engine, answer: object, k: int = 4) -> Drafter:
    drafter = Drafter(answer)
    engine.proposers["scripted"] = drafter
    engine.default = Speculation(proposer="scripted", num_draft_tokens=k)
    return drafter


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "speculation", "error", "says"),
    [
        ([], {}, RequestError, "empty"),
        ([1] * 96, {}, RequestError, "shorten the prompt"),
        ([64], {}, RequestError, "0..63"),
        ([-1], {}, RequestError, "0..63"),
        (PROMPT, {"proposer": "draftmodel"}, UnknownName, "Did you mean 'draft-model'"),
        (PROMPT, {"verifier": "tokens"}, UnknownName, "Did you mean 'token'"),
        (PROMPT, {"num_draft_tokens": -1}, RequestError, "num_draft_tokens"),
        (PROMPT, {"num_draft_tokens": 96}, RequestError, "num_draft_tokens"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    engine: Engine,
    prompt: list[int],
    speculation: dict[str, object],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says) as caught:
        engine.add(prompt, speculation=Speculation(**speculation))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not engine.has_work


@pytest.mark.parametrize(
    "options",
    [
        {"num_draft_tokens": -1},
        {"num_draft_tokens": 96},
        {"proposer": "nrgam"},
        {"verifier": "blok"},
        {"block_size": 0},
        {"kv_tokens": 1},
        {"device": "gpu"},
        {"backend": "jax"},
        {"unknown": 1},
    ],
)
def test_bad_configurations_are_refused(pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(str(pair[0]), **options)
    assert "\n" not in str(caught.value)


def test_a_lossy_pair_is_refused(engine: Engine) -> None:
    scripted(engine, lambda view, budget: Proposal())  # may draft trees
    with pytest.raises(LossyPairing):
        engine.add(PROMPT, speculation=Speculation(proposer="scripted", verifier="token"))
    assert not engine.has_work


@pytest.mark.parametrize("draw", [Draw.COUPLED, Draw.DETERMINISTIC])
def test_the_first_token_waits_for_no_model_that_drafts(engine: Engine, draw: Draw) -> None:
    """It would have to read the prompt too. A look-up need not; nor need those who go on."""
    scripted(engine, lambda view, budget: Proposal([1, 2, 3], draw=draw)).draws = frozenset({draw})
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drafted: list[list[int]] = []
    ids = []
    for prompt in (PROMPT, [*PROMPT, 3]):
        ids.append(engine.add(prompt, params))
        report = engine.step()
        assert report is not None
        drafted.append([len(event.draft_tokens) for event in report.events])
    at_once = 3 if draw is Draw.DETERMINISTIC else 0
    assert drafted == [[at_once], [3, at_once]]
    for _ in engine.run(ids):
        pass


# --- finish conditions inside a block ------------------------------------------------------


def oracle(engine: Engine, tokens: list[int]) -> Drafter:
    """Drafts the true continuation, so that whole blocks are accepted."""

    def answer(view: SequenceView, budget: int) -> Proposal:
        done = len(view.tokens) - view.num_prompt_tokens
        return Proposal(tokens[done : done + budget])

    return scripted(engine, answer, k=6)


def test_length_stops_inside_an_accepted_block(engine: Engine) -> None:
    engine.default = Speculation()
    tokens, _, _ = finish(engine, max_tokens=20, ignore_eos=True)
    oracle(engine, tokens)
    for limit in range(1, 12):
        assert finish(engine, max_tokens=limit, ignore_eos=True)[::2] == (tokens[:limit], "length")


def test_stop_ids_and_stop_strings_end_where_plain_decoding_ends(engine: Engine) -> None:
    engine.default = Speculation()
    tokens, text, _ = finish(engine, max_tokens=20, ignore_eos=True)
    oracle(engine, tokens)
    for i in range(3, 12):
        first = tokens.index(tokens[i])
        got, _, reason = finish(engine, max_tokens=20, ignore_eos=True, stop_ids=(tokens[i],))
        assert (got, reason) == (tokens[: first + 1], "stop")
    for start in range(2, len(text) - 3):
        stop = text[start : start + 2]
        _, shown, reason = finish(engine, max_tokens=20, ignore_eos=True, stop=(stop,))
        assert (shown, reason) == (text[: text.index(stop)], "stop")


def test_the_context_is_a_hard_limit(engine: Engine) -> None:
    prompt = PROMPT * 13
    plain = finish(engine, prompt, max_tokens=50, ignore_eos=True)
    assert len(prompt) + len(plain[0]) == 96
    assert plain[2] == "length"
    oracle(engine, plain[0])
    assert finish(engine, prompt, max_tokens=50, ignore_eos=True) == plain


# --- a broken drafter costs speed, never the request ----------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("drafter on fire"),
        lambda view, budget: Proposal([1] * (budget + 1)),
        lambda view, budget: Proposal([64]),
        lambda view, budget: Proposal([-1]),
        lambda view, budget: Proposal([1, 2], parents=[1, -1]),
        lambda view, budget: Proposal([1, 2], parents=[-1]),
    ],
)
def test_a_failing_drafter_is_switched_off(
    engine: Engine, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    engine.default = Speculation()
    expected = finish(engine, max_tokens=20)
    drafter = scripted(engine, answer)
    with caplog.at_level(logging.CRITICAL + 1):
        assert finish(engine, max_tokens=20) == expected
    assert drafter.num_calls == 1
    assert drafter.released


@pytest.mark.parametrize(
    ("every_step", "drafts", "told"),
    [(True, False, True), (False, False, False), (False, True, True)],
)
def test_steps_without_drafts_are_told_to_who_asks_for_them(
    engine: Engine,
    every_step: bool,
    drafts: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = scripted(engine, lambda view, budget: Proposal([1] if drafts else []))
    drafter.needs = Needs(every_step=every_step)
    seen: list[int] = []
    monkeypatch.setattr(drafter, "observe", lambda views, _: seen.append(len(views)))
    finish(engine, max_tokens=6, ignore_eos=True)
    assert bool(seen) == told


@pytest.mark.parametrize("method", ["observe", "release"])
def test_a_drafter_that_fails_afterwards_costs_nothing_either(
    engine: Engine, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.default = Speculation()
    expected = finish(engine, max_tokens=20)
    drafter = scripted(engine, lambda view, budget: Proposal([1] * budget))

    def broken(*_: object) -> None:
        raise RuntimeError("drafter on fire")

    monkeypatch.setattr(drafter, method, broken)
    with caplog.at_level(logging.CRITICAL + 1):
        assert finish(engine, max_tokens=20) == expected
    assert engine.kv.usage == 0


def test_rejected_trees_leave_no_memory_behind(engine: Engine) -> None:
    """Blocks taken for a draft are back in the pool when the step that rejected it returns."""

    def junk(view: SequenceView, budget: int) -> Proposal:
        return Proposal([1] * budget, parents=[-1, -1, 0, 1, *range(3, 40)][:budget])

    scripted(engine, junk, k=40)
    request = engine.add(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, banned_ids=(1,)))
    for report in engine.run([request]):
        (event,) = report.events
        assert event.draft_tokens or event.finish_reason
        assert event.path == []
        if event.finish_reason is None:
            num_slots = engine.scheduler.running[0].num_computed
            held = engine.kv.num_blocks - engine.kv.num_free_blocks
            assert held == -(-num_slots // 8)
    assert engine.kv.usage == 0
    engine.collect(request)


# --- streaming, cancelling, collecting --------------------------------------------------------


def test_a_stream_only_ever_grows_into_the_result(pair: tuple[Path, Path]) -> None:
    llm = LLM(str(pair[0]), draft_model=str(pair[1]), backend="torch", block_size=8)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "stop": ("zq",)}
    whole = llm.generate(PROMPT, **options)  # type: ignore[call-overload]
    events = list(llm.stream(PROMPT, **options))  # type: ignore[arg-type]
    assert [t for event in events for t in event.tokens] == whole.tokens
    assert "".join(event.text for event in events) == whole.text
    assert [e.finish_reason for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.completions[0].finish_reason


def test_walking_away_from_a_stream_frees_everything(pair: tuple[Path, Path]) -> None:
    llm = LLM(str(pair[0]), draft_model=str(pair[1]), backend="torch", block_size=8)
    for _ in llm.stream(PROMPT, max_tokens=50):
        break
    assert not llm.engine.has_work
    assert llm.engine.kv.usage == 0


def test_one_bad_prompt_of_a_batch_queues_nothing(pair: tuple[Path, Path]) -> None:
    llm = LLM(str(pair[0]), draft_model=str(pair[1]), backend="torch")
    with pytest.raises(RequestError):
        llm.generate([[1, 2], []])
    assert not llm.engine.has_work


def test_cancelling_a_queued_request_never_runs_it(engine: Engine) -> None:
    request = engine.add(PROMPT)
    engine.cancel(request)
    assert engine.step() is None
    assert engine.collect(request).completions[0].finish_reason == "cancelled"


def test_prefix_caching_skips_what_was_computed(engine: Engine) -> None:
    prompt = PROMPT * 5
    first = engine.add(prompt, SamplingParams(max_tokens=4))
    sizes = [report.timing.num_tokens for report in engine.run([first])]
    again = engine.add(prompt, SamplingParams(max_tokens=4))
    cached = [report.timing.num_tokens for report in engine.run([again])]
    assert engine.collect(first).tokens == engine.collect(again).tokens
    assert cached[0] <= sizes[0] - 4 * 8
    other = engine.add(prompt, SamplingParams(max_tokens=4), salt="another tenant")
    assert next(engine.run([other])).timing.num_tokens == sizes[0]


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """Under speculation and filters, logprobs are those of the unprocessed model, per position."""
    params = SamplingParams(
        temperature=0.7, top_k=5, repetition_penalty=1.5, seed=1, max_tokens=12, logprobs=3
    )
    request = engine.add(PROMPT, params)
    for _ in engine.run([request]):
        pass
    result = engine.collect(request)
    entries = result.completions[0].logprobs
    assert entries is not None
    assert [entry.token for entry in entries] == result.tokens
    for i, entry in enumerate(entries):
        plain = engine.add(
            PROMPT + result.tokens[:i],
            SamplingParams(max_tokens=1, logprobs=20),
            speculation=Speculation(),
        )
        for _ in engine.run([plain]):
            pass
        (expected,) = engine.collect(plain).completions[0].logprobs or []
        top = sorted(expected.top.items(), key=lambda item: -item[1])[:3]
        assert list(entry.top.values()) == pytest.approx([value for _, value in top], abs=1e-4)
        if entry.token in expected.top:
            assert entry.logprob == pytest.approx(expected.top[entry.token], abs=1e-4)
    total = torch.tensor(list(expected.top.values())).exp().sum()
    assert total <= 1 + 1e-5


def test_statistics_add_up(engine: Engine) -> None:
    request = engine.add(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    events = [event for report in engine.run([request]) for event in report.events]
    stats = engine.collect(request).stats
    assert stats.num_accepted == sum(len(e.path) for e in events)
    assert stats.num_drafted == sum(len(e.draft_tokens) for e in events)
    assert stats.tokens_per_pass == pytest.approx(30 / len(events))
    assert 1 <= stats.acceptance_length <= 5
