"""The smallest fleet that keeps a latency goal: tensor-parallel degree, replicas, cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.plan.costs import Costs, best_k, break_even_batch
from outrider.plan.simulate import Load, Outcome, percentile, simulate

DEGREES = (1, 2, 4, 8)
STAYS = 5  # so many times the longest stay is simulated, to see a queue build up
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """95 of 100 requests stay below these, in seconds."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05

    def is_met(self, outcome: Outcome) -> bool:
        return (
            outcome.is_stable
            and percentile(outcome.ttft_s, 0.95) <= self.ttft_s
            and percentile(outcome.tpot_s, 0.95) <= self.tpot_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """How one replica of a degree behaves."""

    costs: Costs
    degree: int = 1
    capacity: float = float("inf")  # tokens of KV
    max_sequences: int = EngineConfig.max_sequences


@dataclass(frozen=True, slots=True)
class Fleet:
    """A plan: so many replicas of so many devices, and what they do under the load."""

    degree: int
    num_replicas: int
    outcome: Outcome
    cost_per_million: float | None
    k_by_batch: dict[int, int]
    break_even: int | None

    @property
    def num_devices(self) -> int:
        return self.degree * self.num_replicas

    def figures(self) -> dict[str, Any]:
        return {
            "tensor_parallel_size": self.degree,
            "replicas": self.num_replicas,
            "devices": self.num_devices,
            "utilisation": self.outcome.utilisation,
            "mean_batch": self.outcome.mean_batch,
            "ttft_p95_s": percentile(self.outcome.ttft_s, 0.95),
            "tpot_p95_s": percentile(self.outcome.tpot_s, 0.95),
            "cost_per_million_tokens": self.cost_per_million,
            "num_draft_tokens_by_batch": self.k_by_batch,
            "break_even_batch": self.break_even,
        }


def plan(
    make: Callable[[int], Replica | None],
    load: Load,
    goal: Goal,
    *,
    alpha: float,
    price: float | None = None,
    num_requests: int = 400,
) -> Fleet:
    """The fleet with the fewest devices; ConfigError where no degree keeps the goal.

    `make(degree)` is a replica, None where the models do not fit; `alpha` 0 is plain decoding;
    `price` is per device and hour.
    """
    found: list[Fleet] = []
    for degree in DEGREES:
        replica = make(degree)
        if replica is None:
            continue

        def run(num_replicas: int, replica: Replica = replica) -> Outcome:
            rate = load.rate / num_replicas
            stay_s = goal.ttft_s + goal.tpot_s * load.output_tokens
            return simulate(
                replica.costs,
                replace(load, rate=rate),
                alpha=alpha,
                max_sequences=replica.max_sequences,
                capacity=replica.capacity,
                num_requests=max(num_requests, int(STAYS * rate * stay_s)),
            )

        fewest = _fewest(run, goal)
        if fewest is not None:
            found.append(_fleet(replica, *fewest, load, alpha, price))
    if not found:
        raise ConfigError("no fleet keeps this goal: even an idle replica is too slow or too small")
    return min(found, key=lambda fleet: (fleet.num_devices, fleet.degree))


def _fewest(run: Callable[[int], Outcome], goal: Goal) -> tuple[int, Outcome] | None:
    """The smallest number of replicas that keeps the goal, by doubling and halving."""
    high = 1
    while not goal.is_met(outcome := run(high)):
        if outcome.is_stable and outcome.utilisation < 0.02:
            return None  # idle, and still too slow
        high *= 2
        if high > 1 << 24:
            return None
    low = high // 2
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        tried = run(middle)
        if goal.is_met(tried):
            high, outcome = middle, tried
        else:
            low = middle
    return high, outcome


def _fleet(
    replica: Replica,
    num_replicas: int,
    outcome: Outcome,
    load: Load,
    alpha: float,
    price: float | None,
) -> Fleet:
    costs, context = replica.costs, load.prompt_tokens + load.output_tokens / 2
    reading_s = load.reading_s(costs)
    ks = {n: best_k(costs, alpha, n, n * context, reading_s) if alpha else 0 for n in BATCHES}
    even = break_even_batch(costs, alpha, context, 4096, reading_s) if alpha else None
    cost = None
    if price is not None:
        tokens_per_hour = load.rate * load.output_tokens * 3600
        cost = price * replica.degree * num_replicas / tokens_per_hour * 1e6
    return Fleet(replica.degree, num_replicas, outcome, cost, ks, even)
