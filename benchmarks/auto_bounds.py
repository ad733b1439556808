"""K = auto beside plain decoding and fixed K at every batch size, and with drafts that never hold.

    python benchmarks/auto_bounds.py [--rounds 10] [--batches 1,2] [--part batch,short] [-o PATH]

Two bounds. `batch`: auto over the best of plain decoding and K = 2, 4, 8; all decode the same texts
at the same time, the contender with the least progress steps next, and each ratio compares medians
over the rounds. `short`: a drafter that is never right answers three single requests of 96 tokens
with a policy that has seen nothing yet; the clock runs from the first prompt to the last token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import report

from outrider.bench.contenders import Job, Ours, fit_together, make_jobs, race
from outrider.bench.decode import jobs_of, ours
from outrider.bench.settings import Settings
from outrider.bench.workloads import load_workload
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.lane import Lane, take_turns
from outrider.policy.controller import AdaptivePolicy

NOTES = (
    "The bundled models. By batch: tokens per second over plain decoding's, medians of the rounds; "
    "greedy code, 128 tokens each, all at the same time step by step (`together`), outputs equal "
    "in every run. Single short requests: seconds of plain decoding over auto's, the prompts "
    "included."
)
PROPOSER, JUNK = "draft-model", "synthetic:0@draft-model"
FIXED = (2, 4, 8)
NUM_ANSWERS, ANSWER = 3, 96


def by_batch(engine: Engine, batch: int, rounds: int) -> dict[str, Any]:
    """auto's speed and that of each other way, as ratios to plain decoding."""
    num_jobs = max(8, batch)
    jobs = make_jobs(engine, load_workload("code", num_jobs).prompts, 128)
    ways = [c for c in ours(engine, [PROPOSER], [*FIXED, "auto"]) if isinstance(c, Ours)]
    together = fit_together(ways, jobs, batch)
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for round_ in range(rounds + 1):
        order = ways[round_ % len(ways) :] + ways[: round_ % len(ways)]
        if together:
            runs = race([way.start(jobs, batch) for way in order])
        else:
            runs = [way.run(jobs, batch) for way in order]
        outputs = runs[0].outputs
        for way, run in zip(order, runs, strict=True):
            assert run.outputs == outputs, f"{way.name} changed the output"
            if round_:  # the first one measures costs
                rates[way.name].append(run.num_tokens / run.seconds)
    plain, *fixed, auto = (rates[way.name] for way in ways)
    best = max([plain, *fixed], key=median)
    return {
        "batch": batch,
        **{
            f"K = {k}": f"{_ratio(found, plain):.3f}" for k, found in zip(FIXED, fixed, strict=True)
        },
        "auto": f"{_ratio(auto, plain):.3f}",
        "auto over the best": f"{_ratio(auto, best):.3f}",
        "together": "yes" if together else "no",
    }


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    return median([a / b for a, b in zip(some, others, strict=True)])


class AnswerLane(Lane):
    """Single requests, one after the other, their prompts included."""

    def __init__(self, contender: Ours, jobs: Sequence[Job]) -> None:
        super().__init__(contender.engine, contender.policy)
        self._contender = contender
        self._left = list(jobs)
        self.num_tokens = 0
        self._go_on()

    def _go_on(self) -> None:
        job = self._left.pop(0)
        self.add(
            job.prompt,
            job.params,
            speculation=self._contender.speculation,
            prediction=job.prediction,
        )

    def _compute(self) -> None:
        super()._compute()
        if self._left and self.engine.is_finished(self.ids[-1]):
            self._go_on()

    @property
    def progress(self) -> float:
        return float(self.stats.num_tokens)


def short(engine: Engine, rounds: int) -> dict[str, Any]:
    """Over plain decoding, with a policy that is new in every round."""
    plain, junk = (c for c in ours(engine, [JUNK], ["auto"]) if isinstance(c, Ours))
    settings = Settings(max_tokens=ANSWER)
    prompts = load_workload("code", 8 * NUM_ANSWERS)
    jobs = jobs_of(engine, prompts, [plain, junk], settings)
    ratios = []
    for round_ in range(rounds + 1):
        at = NUM_ANSWERS * (round_ % 8)
        some = jobs[at : at + NUM_ANSWERS]
        ways = [plain, *(c for c in ours(engine, [JUNK], ["auto"])[1:] if isinstance(c, Ours))]
        for way in ways:
            if isinstance(way.policy, AdaptivePolicy):  # as an engine does at its start
                way.policy.prepare(way.speculation.proposer or "")
        lanes = [AnswerLane(way, some) for way in (ways if round_ % 2 else ways[::-1])]
        for _ in take_turns(lanes, lambda lane: lane.progress):
            pass
        for lane in lanes:
            lane.close()
        if round_:
            a, b = lanes if round_ % 2 else lanes[::-1]
            ratios.append(a.seconds / b.seconds)
    return {
        "answers": f"{NUM_ANSWERS} of {ANSWER} tokens",
        "auto over plain": f"{median(ratios):.3f}",
        "least": f"{min(ratios):.3f}",
        "most": f"{max(ratios):.3f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--part", default="batch,short")
    parser.add_argument("-o", "--out", type=Path, help="results/auto-bounds if all is run")
    asked = parser.parse_args()
    engine = build(EngineConfig(num_draft_tokens="auto", proposer=PROPOSER, max_sequences=64))
    tables: dict[str, list[dict[str, Any]]] = {}
    if "batch" in asked.part:
        rows = tables["auto by batch, over plain decoding"] = []
        for batch in map(int, asked.batches.split(",")):
            rows.append(by_batch(engine, batch, asked.rounds))
            print(rows[-1], flush=True)
    if "short" in asked.part:
        rows = tables["drafts that never hold, single short requests"] = [
            short(engine, 3 * asked.rounds)
        ]
        print(rows[-1], flush=True)
    if asked.out is not None:
        report.write(asked.out.name, "K = auto and its bounds", tables, NOTES, asked.out.parent)


if __name__ == "__main__":
    main()
