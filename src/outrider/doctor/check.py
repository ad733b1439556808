"""Whether the doctor was right: what its advice gives, measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider.bench.contenders import Contender, Job, Lane, Ours, fit_together, plain, take_turns
from outrider.bench.measure import Tell
from outrider.control.fixed import FixedController
from outrider.doctor.advice import Advice
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation

REPEATS = 3
LEAST_JOBS = 8


def measure_advice(
    engine: Engine, jobs: Sequence[Job], advice: Sequence[Advice], tell: Tell
) -> dict[int, float]:
    """Speedup of the advised proposer and K over plain decoding, by batch size.

    Of steps in which the whole batch decodes, as the prediction is: where outputs that end are
    followed by the next, there are no others.
    """
    found = {}
    for entry in advice:
        if entry.proposer is None:
            continue
        wish = Speculation(proposer=entry.proposer, num_draft_tokens=entry.num_draft_tokens)
        contenders = [plain(engine), Ours("advised", engine, wish, FixedController())]
        size = max(entry.batch, min(LEAST_JOBS, len(jobs)))
        group = [jobs[i % len(jobs)] for i in range(size - size % entry.batch)]
        speedups = []
        for repeat in range(REPEATS + 1):
            tell(f"batch {entry.batch}, round {repeat} of {REPEATS}")
            base, advised = _rates(contenders, group, entry.batch)
            if repeat > 0:  # the first warms up
                speedups.append(advised / base)
        found[entry.batch] = median(speedups)
    return found


def _rates(contenders: Sequence[Ours], jobs: Sequence[Job], batch: int) -> list[float]:
    """Tokens per second of each, in turns."""
    num_tokens = dict.fromkeys((c.name for c in contenders), 0)
    seconds = dict.fromkeys(num_tokens, 0.0)
    for start in range(0, len(jobs), batch):
        group = jobs[start : start + batch]
        everybody: Sequence[Contender] = contenders
        together = fit_together(everybody, group)
        for some in [contenders] if together else [[c] for c in contenders]:
            lanes: dict[Lane, str] = {c.start(group): c.name for c in some}
            for lane, report in take_turns(list(lanes)):
                if len(report.events) == batch:
                    num_tokens[lanes[lane]] += sum(len(event.tokens) for event in report.events)
                    seconds[lanes[lane]] += lane.steps[-1][1]
            for lane in lanes:
                lane.finish()
    return [num_tokens[c.name] / seconds[c.name] for c in contenders]
