"""Several plain steps in one call of the python executor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from counted import count_runs, take_your_time
from outrider.contracts import StepBatch, StepOutput
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.errors import EngineError
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [1, 2, 3], [7] * 20]


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    take_your_time(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("plain") / "target", max_positions=160)


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


@pytest.mark.parametrize("nan", [False, True])
def test_a_step_that_fails_once_is_repeated_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch, nan: bool
) -> None:
    """The steps before it in the same call stand."""
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True)
    expected = texts(decode(make(model, 1), params))
    engine = make(model, 16)
    runs = count_runs(engine)["python"]
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
    assert runs.calls[1] == 10  # of up to 16: the prompts' pass came first
    assert passes == runs.num_steps + 1


def test_a_model_that_fails_for_good_ends_the_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
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
