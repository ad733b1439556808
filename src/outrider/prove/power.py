"""A chi-squared test with sample sizes from a required power.

Pearson's statistic over m cells with true probabilities p' against expected p is, for large n,
non-central chi-squared with m - 1 degrees of freedom and non-centrality

    n * sum (p' - p)^2 / p  >=  n * (sum |p' - p|)^2 / sum p  =  4 n TV^2        (Cauchy-Schwarz)

whatever the error looks like. So n = lambda / (4 TV^2), with lambda from significance and power,
detects *every* error of that total variation with at least that power.

Cells with too few expected counts are merged into one. The test does not see errors inside this
cell, but they cannot exceed its mass, which is subtracted from the error to detect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

SIGNIFICANCE = 1e-3  # of the whole test: how often it rejects a correct rule
POWER = 0.99
ERROR = 0.01  # total variation that it must detect
LEAST_EXPECTED = 10.0  # per cell
LOOKS = (16, 4, 1)  # the test is evaluated at n / 16, n / 4 and n: large errors show early

Cell = TypeVar("Cell", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Plan:
    """How many samples to take, over which cells, for a promised power."""

    num_samples: int
    num_cells: int  # the merged one included
    rest: float  # probability of the merged cell
    level: float  # significance of each look
    error: float
    power: float

    @property
    def looks(self) -> list[int]:
        """After how many samples the statistic is evaluated."""
        return [self.num_samples // part for part in LOOKS]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a look. `p_value` is that of the look that decided."""

    num_samples: int
    statistic: float
    p_value: float
    rejected: bool


def plan(dist: Mapping[Cell, float], *, error: float = ERROR, power: float = POWER) -> Plan:
    """The smallest plan for `dist`. Merging depends on n, so both are iterated until stable."""
    level = SIGNIFICANCE / len(LOOKS)
    num_cells, rest = len(dist), 0.0
    while True:
        num_samples = needed(num_cells - 1, level, power) / (4 * (error - rest) ** 2)
        floor = LEAST_EXPECTED / num_samples
        rare = [p for p in dist.values() if p < floor]
        merged = sum(rare) if len(rare) > 1 else 0.0
        if merged >= error / 2:
            raise ValueError("too many rare outcomes to test this distribution at this power")
        cells = len(dist) - (len(rare) - 1 if len(rare) > 1 else 0)
        if merged <= rest:
            size = -(-int(num_samples + 1) // LOOKS[0]) * LOOKS[0]
            return Plan(size, max(2, num_cells), rest, level, error, power)
        num_cells, rest = cells, merged


def examine(plan: Plan, dist: Mapping[Cell, float], counts: Mapping[Cell, int]) -> Verdict:
    """Pearson's statistic of `counts`; an impossible outcome rejects at once."""
    n = sum(counts.values())
    if any(dist.get(cell, 0.0) == 0.0 for cell, count in counts.items() if count):
        return Verdict(n, float("inf"), 0.0, True)
    floor = LEAST_EXPECTED / n  # an early look merges more
    rare = [cell for cell, p in dist.items() if p < floor]
    cells = [(p, counts.get(cell, 0)) for cell, p in dist.items() if p >= floor]
    if rare:
        cells.append((sum(dist[c] for c in rare), sum(counts.get(c, 0) for c in rare)))
    statistic = sum((count - n * p) ** 2 / (n * p) for p, count in cells if p > 0)
    p_value = tail(statistic, len([p for p, _ in cells if p > 0]) - 1)
    return Verdict(n, statistic, p_value, p_value < plan.level)


def tail(statistic: float, freedom: int) -> float:
    """P(chi-squared > statistic)."""
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power_at(freedom: int, level: float, noncentrality: float) -> float:
    """P(non-central chi-squared > the critical value): a Poisson mixture of central ones."""
    critical = _solve(lambda x: tail(x, freedom) - level, float(freedom))
    centre, spread = noncentrality / 2, 12 * (noncentrality / 2) ** 0.5 + 30
    j = torch.arange(max(0, int(centre - spread)), int(centre + spread), dtype=torch.float64)
    log_weight = j * math.log(centre) - centre - torch.lgamma(j + 1)
    tails = torch.special.gammaincc(freedom / 2 + j, torch.full_like(j, critical / 2))
    return float((log_weight.exp() * tails).sum())


def needed(freedom: int, level: float, power: float) -> float:
    """The non-centrality at which a test of this level has this power."""
    freedom = max(1, freedom)
    return _solve(lambda x: power - power_at(freedom, level, x), 1.0)


def _solve(falling: Callable[[float], float], start: float) -> float:
    """Where a falling function crosses zero, by doubling and halving."""
    high = start
    while falling(high) > 0:
        high *= 2
    low = high / 2 if high > start else 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high
