"""A fast executor that fails: an error in tests, a counted event in production."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.executors.base import StepPlan, StepResult
from outrider.sampling import SamplingParams
from outrider.server.metrics import Metrics
from outrider.testing import write_tiny_llama

PARAMS = SamplingParams(max_tokens=30, temperature=0.8, seed=1, ignore_eos=True)


class Faulty:
    """Fails in every third call."""

    name = "native"

    def __init__(self) -> None:
        self.num_calls = 0

    def can_run(self, plan: StepPlan) -> bool:
        return True

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("the kernel is broken")
        return []


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    target = write_tiny_llama(tmp_path / "target")
    engine = build(
        EngineConfig(
            model=str(target), proposer="ngram", num_draft_tokens=4, backend="torch", kv_tokens=512
        )
    )
    engine.executors.fast[:] = [Faulty()]
    return engine


def decode(engine: Engine) -> list[int]:
    request = engine.add([5, 9, 5, 9, 5, 9, 2], PARAMS)
    for _ in engine.run([request]):
        engine.kv.check()
    return engine.collect(request).tokens


def test_in_tests_it_is_an_error(engine: Engine) -> None:
    assert engine.executors.strict
    with pytest.raises(RuntimeError, match="the kernel is broken"):
        decode(engine)


def test_in_production_it_is_counted_and_the_step_runs_again(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.executors.strict = False
    with caplog.at_level(logging.ERROR):
        tokens = decode(engine)
    num_faults = engine.executors.faults["native"]
    assert num_faults >= 5
    assert len(caplog.records) == num_faults
    assert caplog.messages[0] == "executor native failed; python runs the step"
    metrics = Metrics("tiny")
    metrics.watch(engine)
    line = f'outrider_executor_faults_total{{executor="native",model_name="tiny"}} {num_faults}.0'
    assert line in metrics.text().decode()
    engine.executors.fast.clear()
    assert decode(engine) == tokens
