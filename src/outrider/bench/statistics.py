"""Medians with confidence intervals for few repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def to_dict(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def estimate(values: Sequence[float]) -> Estimate:
    """The bootstrap's percentile interval; deterministic."""
    random = Random(0)
    drawn = sorted(median(random.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = round((1.0 - CONFIDENCE) / 2 * RESAMPLES)
    return Estimate(median(values), drawn[tail], drawn[-1 - tail])
