"""Same seed, same tokens, with drafting heads: chunks, preemption, cached prefixes, mixtures."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from exactness.same_tokens import assert_same, run, seeded
from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama

KINDS = ("medusa", "eagle3", "dflash")
MAX_TOKENS = 20
PARAMS = {
    "greedy": SamplingParams(max_tokens=MAX_TOKENS),
    "sampled": SamplingParams(temperature=1.0, seed=1, max_tokens=MAX_TOKENS),
    "everything": SamplingParams(
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
    "stops": SamplingParams(
        temperature=1.0, seed=4, stop=("e",), stop_ids=(7,), n=2, max_tokens=MAX_TOKENS
    ),
}
BACKENDS = [
    "torch",
    pytest.param(
        "native",
        marks=needs_native,
    ),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_tiny_llama(folder / "target", max_positions=128)
    for kind in KINDS:
        write_tiny_head(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path, backend: str) -> dict[str, list[Result]]:
    """The oracle: every prompt alone, one token a pass, no drafts."""
    engine = engine_for(folder, backend=backend)
    off = Speculation(proposer=None)
    return {
        name: [run(engine, [p], seeded(params, i), off)[0] for i, p in enumerate(prompts())]
        for name, params in PARAMS.items()
    }


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


def engine_for(folder: Path, **options: object) -> Engine:
    config: dict[str, object] = {
        "model": str(folder / "target"),
        "draft_model": str(folder / "target"),
        "proposer": "ngram",
        "proposer_options": {kind: {"head": str(folder / kind)} for kind in KINDS},
        "block_size": 8,
        "kv_tokens": 2048,
    }
    return build(EngineConfig(**config | options))  # type: ignore[arg-type]


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 64) for _ in range(n)] for n in (1, 3, 9, 17, 40, 33, 5, 64)]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_invisible(
    folder: Path, plain: dict[str, list[Result]], backend: str, kind: str
) -> None:
    num_accepted = num_preemptions = num_cached = 0
    for step_tokens, kv_tokens in ((12, 160), (512, 2048)):
        engine = engine_for(
            folder, backend=backend, max_step_tokens=step_tokens, kv_tokens=kv_tokens
        )
        for (batch, k), (name, params) in itertools.product([(1, 10), (8, 4)], PARAMS.items()):
            how = Speculation(proposer=kind, num_draft_tokens=k)
            results = run(engine, prompts()[:batch], params, how)
            label = f"{kind} K={k} batch={batch} step={step_tokens} kv={kv_tokens} {name}"
            expected = plain[name][:batch]
            assert_same(engine, results, expected, params, label, bitwise=backend == "native")
            num_accepted += sum(r.stats.num_accepted for r in results)
            num_cached += sum(r.num_cached_tokens for r in results)
            assert engine.kv.usage == 0, f"{label}: KV blocks leaked"
        num_preemptions += engine.scheduler.num_preemptions
    assert num_accepted > 20, "hardly anything was accepted: this run proved little"
    assert num_preemptions > 0, "the small cache was meant to force preemption"
    assert num_cached > 0, "prompts seen before were meant to be found in the prefix cache"


def test_heads_among_other_proposers(
    folder: Path, plain: dict[str, list[Result]], backend: str
) -> None:
    names = ["medusa", "draft-model", "eagle3", None, "dflash", "suffix", "eagle3", "draft-tree"]
    choices = [Speculation(proposer=name, num_draft_tokens=5) for name in names]
    engine = engine_for(folder, backend=backend, max_step_tokens=60)
    for name, params in PARAMS.items():
        results = run(engine, prompts(), params, choices)
        label = f"mixed {name}"
        assert_same(engine, results, plain[name], params, label, bitwise=backend == "native")


@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        ("eagle3", {"children": 1}, "token"),
        ("eagle3", {"children": 1}, "block"),
        ("dflash", {"floor": 0.3}, "block"),
        ("medusa", {}, "tree"),
    ],
)
def test_ratio_rules_keep_the_law(
    tmp_path: Path, kind: str, options: dict[str, object], rule: str
) -> None:
    """Tokens 2 and 3 of 2000 samples against the target's own law; one fixed seed."""
    size, prompt, num_samples = 6, [1, 2, 3], 2000
    target = write_tiny_llama(tmp_path / "target", vocab_size=size, sharpness=1.5, eos_token_id=[])
    write_tiny_head(tmp_path / kind, kind, vocab_size=size)
    engine = build(
        EngineConfig(
            model=str(target),
            draft_model=str(tmp_path / kind),
            proposer=kind,
            proposer_options={kind: options},
            num_draft_tokens=2,
            verifier=rule,
        )
    )
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=3, n=num_samples, ignore_eos=True)
    outputs = [c.tokens for c in run(engine, [prompt], params)[0].completions]
    driver = Driver(load_model(target, backend="torch"), num_blocks=1024)
    texts = list(itertools.product(range(size), repeat=2))
    rows = driver.forward({str(t): [*prompt, *t] for t in texts}).logits
    expected_VV = torch.zeros(size, size, dtype=torch.float64)
    for text in texts:
        first, second, third = rows[str(text)][2:].double().softmax(-1)
        expected_VV[text[1]] += first[text[0]] * second[text[1]] * third
    observed_VV = torch.zeros(size, size, dtype=torch.float64)
    for _, second_token, third_token in outputs:
        observed_VV[second_token, third_token] += 1
    result = chisquare(observed_VV.flatten(), num_samples * expected_VV.flatten())
    assert result.pvalue > 1e-3, result
