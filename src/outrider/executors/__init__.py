"""Ways to run steps: python (the reference), native and cuda, with one interface.

`Executors` picks the first that can run a batch.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from outrider.contracts import Model, Proposer, Verifier
from outrider.executors.base import Executor, StepPlan, StepResult
from outrider.executors.python import PythonExecutor
from outrider.kv.cache import KVCache

STRICT = "OUTRIDER_STRICT"  # environment: 1 raises an executor's fault, as the tests want it

logger = logging.getLogger(__name__)


class Executors:
    """Fast executors in order of preference, then the reference."""

    def __init__(self, fast: Seq[Executor], python: Executor, *, strict: bool | None = None):
        """`strict`: a fault of a fast executor raises; None: as the environment says."""
        self.fast = list(fast)
        self.python = python
        self.strict = os.environ.get(STRICT) == "1" if strict is None else strict
        self.faults: Counter[str] = Counter()  # by name of the executor

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        """At least one step. The caller ends `plan` by `let_go` after the last is committed."""
        for executor in self.fast:
            if executor.can_run(plan):
                try:
                    results = executor.run(plan, max_steps, limit_s)
                except Exception:
                    if self.strict:
                        raise
                    self.faults[executor.name] += 1
                    logger.exception("executor %s failed; python runs the step", executor.name)
                    results = []
                if results:
                    return results
                plan.let_go()
        return self.python.run(plan, max_steps, limit_s)


def executors_for(
    target: Model,
    kv: KVCache,
    proposers: Mapping[str, Proposer],
    verifiers: Mapping[str, Verifier],
) -> Executors:
    """Imports the target's own executor only."""
    fast: list[Executor] = []
    name = getattr(target, "executor", None)
    if name == "native":
        from outrider.executors.native import NativeExecutor

        fast.append(NativeExecutor(target, kv, proposers, verifiers))
    elif name == "cuda":
        from outrider.executors.cuda import CudaExecutor

        fast.append(CudaExecutor(target, kv, proposers, verifiers))
    return Executors(fast, PythonExecutor(target, kv, proposers, verifiers))
