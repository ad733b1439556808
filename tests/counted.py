"""How often an engine's executors ran, and how many steps came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from outrider.engine.engine import Engine
from outrider.executors.base import Executor, StepPlan, StepResult


@dataclass
class Runs:
    """Calls of an executor that ran steps, and the steps of each."""

    calls: list[int] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        return len(self.calls)

    @property
    def num_steps(self) -> int:
        return sum(self.calls)


@dataclass
class Counted:
    """An executor that counts."""

    inner: Executor
    runs: Runs = field(default_factory=Runs)

    @property
    def name(self) -> str:
        return self.inner.name

    def can_run(self, plan: StepPlan) -> bool:
        return self.inner.can_run(plan)

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        results = self.inner.run(plan, max_steps, limit_s)
        if results:
            self.runs.calls.append(len(results))
        return results


def count_runs(engine: Engine) -> dict[str, Runs]:
    """Counts from now on, by the executor's name."""
    executors = engine.executors
    fast = [Counted(executor) for executor in executors.fast]
    python = Counted(executors.python)
    executors.fast[:] = fast
    executors.python = python
    return {counted.name: counted.runs for counted in [*fast, python]}


def take_your_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call ends early because the machine is busy."""
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
