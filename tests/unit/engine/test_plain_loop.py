"""Plain steps ahead with a model that cannot run ahead by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.contracts import AheadBatch, AheadStep, StepBatch, StepOutput
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.plain_loop import PlainLoop
from outrider.engine.request import Speculation
from outrider.errors import EngineError
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [1, 2, 3], [7] * 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain") / "target", max_positions=160)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps came of each call."""
    counted: list[int] = []
    real = PlainLoop.run_ahead

    def run_ahead(
        self: PlainLoop, batch: AheadBatch, most_steps: int, limit_s: float
    ) -> list[AheadStep]:
        steps = real(self, batch, most_steps, limit_s)
        counted.append(len(steps))
        return steps

    monkeypatch.setattr(PlainLoop, "run_ahead", run_ahead)
    monkeypatch.setattr("outrider.engine.ahead.LIMIT_S", 60.0)  # however busy the machine is
    return counted


def make(model: Path, most: int) -> Engine:
    return build(
        EngineConfig(
            model=str(model), backend="torch", kv_tokens=1024, block_size=8, max_ahead_steps=most
        )
    )


def decode(engine: Engine, params: SamplingParams) -> list[Result]:
    plain = Speculation(num_draft_tokens=0)
    requests = [engine.add(prompt, params, speculation=plain) for prompt in PROMPTS]
    for _ in engine.run(requests):
        engine.kv.check()
    return [engine.collect(request) for request in requests]


def texts(results: list[Result]) -> list[tuple[list[int], str]]:
    return [(c.tokens, c.finish_reason) for result in results for c in result.completions]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, top_p=0.9, min_p=0.02, top_k=20, seed=5, max_tokens=33),
        SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop_ids=tuple(range(0, 256, 7))),
        SamplingParams(temperature=0.9, seed=1, max_tokens=30, n=2),
    ],
    ids=["greedy", "filtered", "stops", "two samples"],
)
def test_the_same_tokens(model: Path, runs: list[int], params: SamplingParams) -> None:
    expected = decode(make(model, 1), params)
    assert not runs
    assert texts(decode(make(model, 16), params)) == texts(expected)
    assert max(runs) > 1


@pytest.mark.parametrize("nan", [False, True])
def test_a_pass_that_fails_later_is_the_steps_own_affair(
    model: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch, nan: bool
) -> None:
    """Once: the steps before it stand, and the step by itself, which does not fail, goes on."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
    expected = texts(decode(make(model, 1), params))
    engine = make(model, 16)
    real, passes = engine.target.forward, 0

    def forward(batch: StepBatch) -> StepOutput:
        nonlocal passes
        passes += 1
        if passes == 12:
            if not nan:
                raise RuntimeError("once")
            return StepOutput(torch.full_like(real(batch).logits_RV, torch.nan))
        return real(batch)

    monkeypatch.setattr(engine.target, "forward", forward)
    assert texts(decode(engine, params)) == expected
    assert runs[0] < 12 < sum(runs)


def test_a_model_that_fails_for_good_ends_the_request(
    model: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(model, 16)
    real, passes = engine.target.forward, 0

    def forward(batch: StepBatch) -> StepOutput:
        nonlocal passes
        passes += 1
        output = real(batch)
        return output if passes < 12 else StepOutput(torch.full_like(output.logits_RV, torch.nan))

    monkeypatch.setattr(engine.target, "forward", forward)
    with pytest.raises(EngineError, match="NaN"):
        decode(engine, SamplingParams(max_tokens=40, ignore_eos=True))


def test_interrupted_it_goes_on_step_by_step(model: Path, runs: list[int]) -> None:
    engine = make(model, 16)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.interrupt()
    expected = texts(decode(engine, params))
    assert set(runs) == {1}
    engine.resume()
    assert texts(decode(engine, params)) == expected
    assert max(runs) > 1
