"""Whether the doctor was right: what its advice gives, measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider.bench.contenders import Job, Ours, plain
from outrider.bench.measure import Tell, decode
from outrider.doctor.advice import Advice
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.policy.fixed import FixedPolicy

REPEATS = 5
LEAST_JOBS = 8


def measure_advice(
    engine: Engine, jobs: Sequence[Job], advice: Sequence[Advice], tell: Tell
) -> dict[int, float]:
    """Speedup of the advised proposer and K over plain decoding, by batch size."""
    found = {}
    for entry in advice:
        if entry.proposer is None:
            continue
        wish = Speculation(proposer=entry.proposer, num_draft_tokens=entry.num_draft_tokens)
        contenders = [plain(engine), Ours("advised", engine, wish, FixedPolicy())]
        size = max(entry.batch, min(LEAST_JOBS, len(jobs)))
        some = [jobs[i % len(jobs)] for i in range(size)]
        speedups = []
        for repeat in range(REPEATS + 1):
            tell(f"batch {entry.batch}, round {repeat} of {REPEATS}")
            runs = decode(contenders, some, entry.batch)
            base, advised = (run.num_tokens / run.seconds for run in runs)
            if repeat > 0:  # the first warms up
                speedups.append(advised / base)
        found[entry.batch] = median(speedups)
    return found
