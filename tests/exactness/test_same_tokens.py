"""Same seed, same tokens: speculation must be invisible, whatever drafts, K, batch or schedule."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from exactness.same_tokens import assert_same, run, seeded
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from scripted import Cautious

DRAFTS = [
    *itertools.product(["draft-model", "ngram", "prediction"], [1, 2, 4, 8]),
    *itertools.product(["suffix", "draft-tree", "lookahead", "hybrid"], [3, 10]),
]
MAX_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS),
    "sampled": SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS),
    "filtered": SamplingParams(
        temperature=0.7, top_k=20, top_p=0.9, min_p=0.05, seed=2, max_tokens=MAX_TOKENS
    ),
    "penalised": SamplingParams(
        temperature=0.7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={5: 1.5, 9: -4.0},
        banned_ids=(3, 4),
        min_tokens=8,
        seed=3,
        max_tokens=MAX_TOKENS,
    ),
    "greedy-penalised": SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.2, max_tokens=MAX_TOKENS
    ),
    "stops": SamplingParams(
        temperature=1.0,
        seed=4,
        stop=("e", "ab"),
        stop_ids=(7,),
        min_tokens=4,
        n=2,
        max_tokens=MAX_TOKENS,
    ),
    "ignore-eos": SamplingParams(
        temperature=1.0, seed=5, ignore_eos=True, logit_bias={0: 3.0}, max_tokens=MAX_TOKENS
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", num_layers=2, max_positions=128)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=128)


@lru_cache
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    lengths = [1, 3, 9, 17, 40, 33, 5, 64]
    made = []
    for length in lengths:
        phrase = [rng.randrange(1, 64) for _ in range(5)]  # repeats: something to look up
        made.append([rng.choice(phrase) for _ in range(length)])
    return made


def engine_for(
    pair: tuple[Path, Path],
    *,
    proposer: str = "ngram",
    k: int = 0,
    backend: str = "torch",
    **options: object,
) -> Engine:
    target, draft = pair
    config = EngineConfig(
        model=str(target),
        draft_model=str(draft),
        proposer=proposer,
        num_draft_tokens=k,
        backend=backend,  # type: ignore[arg-type]
        block_size=8,
        **options,  # type: ignore[arg-type]
    )
    return build(config)


@pytest.fixture(
    scope="module",
    params=[
        "torch",
        pytest.param(
            "native",
            marks=needs_native,
        ),
    ],
)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path], backend: str) -> dict[str, list[Result]]:
    """The oracle: every prompt alone, one token a pass, no drafts."""
    engine = engine_for(pair, backend=backend)
    return {
        name: [run(engine, [prompt], seeded(params, i))[0] for i, prompt in enumerate(prompts())]
        for name, params in PARAMS.items()
    }


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failing drafter costs speed only, so that nothing else here would notice."""
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


def predictions(results: list[Result]) -> list[list[int]]:
    """What a caller might guess: mostly right, a token missing here, one wrong there."""
    guesses = []
    for result in results:
        guess = list(result.tokens)
        del guess[4:5]
        if len(guess) > 10:
            guess[10] = (guess[10] + 1) % 64
        guesses.append(guess)
    return guesses


@pytest.mark.parametrize(("proposer", "k"), DRAFTS)
def test_speculation_is_invisible(
    pair: tuple[Path, Path], plain: dict[str, list[Result]], backend: str, proposer: str, k: int
) -> None:
    num_accepted = num_preemptions = num_cached = 0
    # Every schedule at one K, the two extremes at the others: the suite has to stay short.
    schedules = [(8, 160), (512, 2048), *([(8, 2048), (512, 160)] if k == 4 else [])]
    for step_tokens, kv_tokens in schedules:
        engine = engine_for(
            pair,
            proposer=proposer,
            k=k,
            backend=backend,
            max_step_tokens=step_tokens,
            kv_tokens=kv_tokens,
        )
        for batch, (name, params) in itertools.product([1, 3, 8], PARAMS.items()):
            expected = plain[name][:batch]
            results = run(engine, prompts()[:batch], params, predictions=predictions(expected))
            label = f"{proposer} K={k} batch={batch} step={step_tokens} kv={kv_tokens} {name}"
            assert_same(engine, results, expected, params, label, bitwise=backend == "native")
            num_accepted += sum(r.stats.num_accepted for r in results)
            num_cached += sum(r.num_cached_tokens for r in results)
            assert engine.kv.usage == 0, f"{label}: KV blocks leaked"
            engine.kv.check()
        num_preemptions += engine.scheduler.num_preemptions
    assert num_accepted > 50, "hardly anything was accepted: this run proved little"
    assert num_preemptions > 0, "the small cache was meant to force preemption"
    assert num_cached > 0, "prompts seen before were meant to be found in the prefix cache"


def test_drafters_that_stop_by_themselves_are_invisible(
    pair: tuple[Path, Path], plain: dict[str, list[Result]], backend: str
) -> None:
    auto = Speculation(proposer="draft-model", num_draft_tokens="auto")
    sizes: set[int] = set()
    for step_tokens, kv_tokens in [(8, 160), (512, 2048)]:
        engine = engine_for(
            pair, k=4, backend=backend, max_step_tokens=step_tokens, kv_tokens=kv_tokens
        )
        engine.policy = Cautious()
        engine.observers.append(
            lambda report: sizes.update(len(event.draft_tokens) for event in report.events)
        )
        for batch, (name, params) in itertools.product([1, 8], PARAMS.items()):
            results = run(engine, prompts()[:batch], params, auto)
            label = f"cautious batch={batch} step={step_tokens} kv={kv_tokens} {name}"
            expected = plain[name][:batch]
            assert_same(engine, results, expected, params, label, bitwise=backend == "native")
            assert engine.kv.usage == 0, f"{label}: KV blocks leaked"
    assert {0, 1, 2, 3} < sizes


def test_every_request_chooses_for_itself(
    pair: tuple[Path, Path], plain: dict[str, list[Result]], backend: str
) -> None:
    """One batch in which proposers, K and off are mixed."""
    choices = [
        Speculation(proposer="hybrid", num_draft_tokens=5),
        Speculation(proposer="ngram", num_draft_tokens=8),
        Speculation(proposer=None),
        Speculation(proposer="prediction", num_draft_tokens=5),
        Speculation(proposer="lookahead", num_draft_tokens=12),
        Speculation(proposer="draft-model", num_draft_tokens=0),
        Speculation(proposer="suffix", num_draft_tokens=6),
        Speculation(proposer="draft-tree", num_draft_tokens=9),
    ]
    engine = engine_for(pair, proposer="draft-model", k=4, backend=backend, max_step_tokens=40)
    for name, params in PARAMS.items():
        results = run(engine, prompts(), params, choices, predictions(plain[name]))
        assert_same(engine, results, plain[name], params, f"mixed {name}")


def test_samples_of_one_request_differ_and_repeat(pair: tuple[Path, Path]) -> None:
    engine = engine_for(pair, proposer="draft-model", k=4)
    params = SamplingParams(temperature=1.0, seed=9, n=4, max_tokens=16)
    first, second = (run(engine, [prompts()[3]], params)[0] for _ in range(2))
    assert [c.tokens for c in first.completions] == [c.tokens for c in second.completions]
    assert len({tuple(c.tokens) for c in first.completions}) > 1
