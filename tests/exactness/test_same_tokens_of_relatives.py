"""Same seed, same tokens, where the target's relatives draft: parts and copies of itself, middle
models with drafters of their own, models of another vocabulary."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from exactness.same_tokens import assert_same, run, seeded
from exactness.test_same_tokens import PARAMS as ALL_PARAMS
from exactness.test_same_tokens import prompts
from native_models import needs_native
from other_vocabulary import write_with_other_ids
from outrider import native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.testing import write_tiny_llama

PARAMS = {name: ALL_PARAMS[name] for name in ("greedy", "sampled", "penalised", "stops")}


@dataclass(frozen=True)
class Family:
    target: Path
    mid: Path
    draft: Path
    foreign: Path  # the draft under other ids


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    target, mid, draft = (
        write_tiny_llama(folder / name, num_layers=num_layers, max_positions=128)
        for name, num_layers in (("target", 3), ("mid", 2), ("draft", 1))
    )
    return Family(target, mid, draft, write_with_other_ids(draft, folder / "foreign"))


def options(family: Family, proposer: str, inner: str) -> dict[str, dict[str, object]]:
    if proposer == "cross-vocab" and inner:
        return {"cross-vocab": {"method": inner}}
    if proposer != "cascade":
        return {}
    if inner == "cascade":  # three levels: n-grams for the draft, which drafts for the middle
        inside = {"mid": str(family.draft), "proposer": "ngram", "passes": 3}
        return {"cascade": {"mid": str(family.mid), "proposer": "cascade", "options": inside}}
    return {"cascade": {"mid": str(family.mid), "proposer": inner, "passes": 3}}


def engine_for(
    family: Family, backend: str, *, proposer: str = "ngram", inner: str = "", **config: object
) -> Engine:
    return build(
        EngineConfig(
            model=str(family.target),
            draft_model=str(family.foreign if proposer == "cross-vocab" else family.draft),
            proposer=proposer,
            proposer_options=options(family, proposer, inner),
            num_draft_tokens=4 if inner else 5,
            backend=backend,  # type: ignore[arg-type]
            block_size=8,
            **config,  # type: ignore[arg-type]
        )
    )


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=needs_native)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(family: Family, backend: str) -> dict[str, list[Result]]:
    engine = engine_for(family, backend)
    off = Speculation(proposer=None)
    return {
        name: [run(engine, [p], seeded(params, i), off)[0] for i, p in enumerate(prompts())]
        for name, params in PARAMS.items()
    }


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("proposer", "inner"),
    [
        pytest.param("quantized", "", marks=needs_native),
        ("early-exit", ""),
        ("cross-vocab", ""),
        ("cross-vocab", "intersection"),
        ("cascade", "draft-model"),
        ("cascade", "draft-tree"),
        ("cascade", "early-exit"),
        ("cascade", "suffix"),
        ("cascade", "cascade"),
    ],
)
def test_speculation_is_invisible(
    family: Family, plain: dict[str, list[Result]], backend: str, proposer: str, inner: str
) -> None:
    num_accepted = num_preemptions = num_cached = 0
    for step_tokens, kv_tokens in [(8, 160), (512, 2048)]:
        engine = engine_for(
            family,
            backend,
            proposer=proposer,
            inner=inner,
            max_step_tokens=step_tokens,
            kv_tokens=kv_tokens,
        )
        for batch, (name, params) in itertools.product([1, 8], PARAMS.items()):
            expected = plain[name][:batch]
            results = run(engine, prompts()[:batch], params)
            label = f"{proposer} {inner} batch={batch} step={step_tokens} kv={kv_tokens} {name}"
            assert_same(engine, results, expected, params, label, bitwise=backend == "native")
            num_accepted += sum(r.stats.num_accepted for r in results)
            num_cached += sum(r.num_cached_tokens for r in results)
            assert engine.kv.usage == 0, f"{label}: KV blocks leaked"
            engine.kv.check()
        num_preemptions += engine.scheduler.num_preemptions
    assert num_accepted > 100, "hardly anything was accepted: this run proved little"
    assert num_preemptions > 0, "the small cache was meant to force preemption"
    assert num_cached > 0, "prompts seen before were meant to be found in the prefix cache"


def test_tokens_without_text_stop_no_drafter(family: Family, backend: str) -> None:
    """The end of a text goes into no other vocabulary: the drafter has read everything before."""
    params = ALL_PARAMS["ignore-eos"]
    engine = engine_for(family, backend, proposer="cross-vocab", inner="intersection")
    expected = run(engine, prompts(), params, Speculation(proposer=None))
    assert any(0 in result.tokens for result in expected)
    results = run(engine, prompts(), params)
    assert_same(engine, results, expected, params, "ignore-eos", bitwise=backend == "native")


def test_they_share_a_batch(family: Family, plain: dict[str, list[Result]], backend: str) -> None:
    engine = engine_for(
        family, backend, proposer="cascade", inner="draft-model", max_step_tokens=40
    )
    names = ["early-exit", "cascade", "draft-model", "cross-vocab"]
    if native.available():
        names.append("quantized")
    choices = [
        Speculation(proposer=name, num_draft_tokens=k)
        for name, k in zip(itertools.cycle(names), [4, 3, 2, 4, 6, 1, 5, 3], strict=False)
    ]
    for name, params in PARAMS.items():
        results = run(engine, prompts(), params, choices)
        assert_same(engine, results, plain[name], params, f"mixed {name}")
