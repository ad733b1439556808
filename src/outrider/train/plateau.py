"""Ends a run early when held-out acceptance no longer rises.

Most of the gain of a run comes from its last part, in which the learning rate falls. So the run is
not cut off: the fall begins now, and the rest is as long as its share of the shorter run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

NUM_CHECKS = 16  # over a whole run
PATIENCE = 3  # checks without a gain
LEAST_GAIN = 0.003  # of the acceptance length


@dataclass
class Plateau:
    """`measure` is the held-out acceptance length of the weights now."""

    measure: Callable[[], float]
    checks: list[tuple[int, float]] = field(default_factory=list)  # (step, length)

    def shortened(self, step: int, num_steps: int, decay_share: float) -> int:
        """The run's number of steps, looked at after step `step`."""
        every = max(1, num_steps // NUM_CHECKS)
        if step % every or not 0 < step <= num_steps * (1 - decay_share):
            return num_steps
        self.checks.append((step, self.measure()))
        lengths = [length for _, length in self.checks]
        before, recent = lengths[:-PATIENCE], lengths[-PATIENCE:]
        if not before or max(recent) > max(before) * (1 + LEAST_GAIN):
            return num_steps
        return min(num_steps, math.ceil(step / (1 - decay_share)))
