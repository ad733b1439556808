"""Times contenders against each other, in turns, and compares their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from outrider.bench.contenders import PLAIN, Contender, Job, Ours, Run, fit_together, race
from outrider.bench.statistics import Estimate, estimate
from outrider.engine.request import Request, Speculation
from outrider.prove.checks import near_tie
from outrider.prove.identity import explain
from outrider.statistics import SpeculationStats

DISTURBED = 1.3  # times the median: longer steps were disturbed by other load

Tell = Callable[[str], None]


@dataclass(slots=True)
class Record:
    """The measurements of one contender, by repeat."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    stats: SpeculationStats | None = None
    steps: list[tuple[int, float]] = field(default_factory=list)
    num_outputs: int = 0
    num_identical: int = 0
    num_near_ties: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [n / s for n, s in zip(self.num_tokens, self.seconds, strict=True)]

    def speedup(self, other: Record) -> Estimate:
        """Ratio of the rates within each repeat."""
        return estimate([a / b for a, b in zip(self.rates, other.rates, strict=True)])

    @property
    def undisturbed_rate(self) -> float:
        """Tokens per second without the effect of other load on single steps.

        A step that took much longer than the median over as many tokens counts as that median.
        """
        kinds: dict[int, list[float]] = {}
        for num_tokens, seconds in self.steps:
            kinds.setdefault(num_tokens, []).append(seconds)
        usual = {n: median(found) for n, found in kinds.items()}
        total = sum(s if s < DISTURBED * usual[n] else usual[n] for n, s in self.steps)
        return sum(self.num_tokens) / total

    @property
    def exactness(self) -> str:
        if self.contender.reference is None:
            return "-"
        ties = f" + {self.num_near_ties} near-ties" if self.num_near_ties else ""
        return f"{self.num_identical}/{self.num_outputs}{ties}"

    @property
    def is_exact(self) -> bool:
        return not self.differences


def measure(
    contenders: Sequence[Contender],
    jobs: Sequence[Job],
    *,
    batch: int = 1,
    repeats: int = 5,
    tell: Tell = lambda what: None,
) -> dict[str, Record]:
    """All contenders decode all jobs, `batch` at once, `repeats` times, in rotating order.

    Contenders of one engine decode at the same time, step by step: see `race`. A first round, which
    is not counted, warms up caches, threads and the controller.
    """
    records = {contender.name: Record(contender) for contender in contenders}
    for repeat in range(-1, repeats):
        turn = repeat % len(contenders)
        order = [*contenders[turn:], *contenders[:turn]]
        tell(f"round {repeat + 1} of {repeats}")
        found = decode(order, jobs, batch)
        runs = {contender.name: run for contender, run in zip(order, found, strict=True)}
        if repeat >= 0:
            for record in records.values():
                _count(record, runs[record.contender.name])
            _compare(records, runs, jobs)
    return records


def decode(contenders: Sequence[Contender], jobs: Sequence[Job], batch: int) -> list[Run]:
    """All at once, step by step in turns, if possible; else one after the other."""
    if fit_together(contenders, jobs, batch):
        return race([c.start(jobs, batch) for c in contenders if isinstance(c, Ours)])
    return [contender.run(jobs, batch) for contender in contenders]


def _sum(a: SpeculationStats | None, b: SpeculationStats | None) -> SpeculationStats | None:
    if a is None or b is None:
        return a or b
    a.merge(b)
    return a


def _count(record: Record, run: Run) -> None:
    record.seconds.append(run.seconds)
    record.num_tokens.append(run.num_tokens)
    record.stats = _sum(record.stats, run.stats)
    record.steps += run.steps


def _compare(records: dict[str, Record], runs: dict[str, Run], jobs: Sequence[Job]) -> None:
    """Counts outputs equal to the reference's, and near-ties of floating point."""
    for record in records.values():
        reference = records.get(record.contender.reference or "")
        if reference is None:
            continue
        mine = runs[record.contender.name].outputs
        theirs = runs[reference.contender.name].outputs
        for job, got, expected in zip(jobs, mine, theirs, strict=True):
            record.num_outputs += 1
            if got == expected:
                record.num_identical += 1
            elif _is_near_tie(records, job, expected, got):
                record.num_near_ties += 1
            else:
                at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False))
                           if a != b), min(len(got), len(expected)))  # fmt: skip
                record.differences.append(f"differs from {reference.contender.name} at token {at}")


def _is_near_tie(records: dict[str, Record], job: Job, expected: list[int], got: list[int]) -> bool:
    plain = records[PLAIN].contender
    assert isinstance(plain, Ours)
    seed = job.params.seed or 0
    request = Request("explain", job.prompt, job.params, Speculation(num_draft_tokens=0), seed)
    found = explain(plain.engine, request, 0, expected, got)
    return found is not None and found.margin < near_tie(plain.engine)


def row(record: Record, plain: Record, **labels: Any) -> dict[str, Any]:
    """One contender's figures, ready for a result file."""
    entry: dict[str, Any] = {
        **labels,
        "contender": record.contender.name,
        **estimate(record.rates).to_dict("tokens_per_s"),
        **record.speedup(plain).to_dict("speedup"),
        "identical": record.exactness,
        "is_exact": record.is_exact,
        "num_repeats": len(record.seconds),
    }
    if record.stats is not None:
        entry["undisturbed_speedup"] = record.undisturbed_rate / plain.undisturbed_rate
        entry |= figures(record.stats)
    return entry


def figures(stats: SpeculationStats) -> dict[str, Any]:
    return {
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_pass": stats.tokens_per_pass,
        "draft_share": stats.draft_s / stats.total_s if stats.total_s else 0.0,
        "verify_share": stats.verify_s / stats.total_s if stats.total_s else 0.0,
        "other_share": stats.other_s / stats.total_s if stats.total_s else 0.0,
        "conditional_acceptance": stats.conditional_acceptance,
        "unconditional_acceptance": stats.unconditional_acceptance,
        "accepted_lengths": list(stats.accepted_lengths),
    }
