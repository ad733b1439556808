"""The engine against the formula: prescribed acceptance, real drafting costs.

    python benchmarks/efficiency.py [--prompts 6] [--tokens 96] [--turns 240] [-o FILE]

    efficiency = measured speedup / (E[tokens] / (K c + v(K)))

Four things take turns, one step or call each: a speculative step of the engine, a plain step of
it, a bare cycle of drafter and target, a bare pass of the target (c and v(K) come from the last
two). Each turn gives four neighbours in time, and what counts are medians of their ratios: a busy
moment of the machine falls on all four or is an outlier.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from outrider.bench.contenders import Job, Ours, make_jobs, plain
from outrider.bench.formula import CONTEXT, BareCycle
from outrider.bench.report import Result, Row
from outrider.bench.statistics import estimate
from outrider.bench.synthetic import add_synthetic
from outrider.bench.workloads import load_workload
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.llm import LLM
from outrider.policy.fixed import FixedPolicy
from outrider.theory import expected_tokens

ALPHAS = (0.4, 0.6, 0.8, 0.9, 1.0)
COUNTS = (2, 4, 8)
BENEATH = "draft-model"
RESULTS = Path(__file__).parent / "results"


@dataclass
class Turns:
    """What one acceptance and K took, turn by turn."""

    engine_ratio: list[float] = field(default_factory=list)  # plain step / speculative step
    bare_ratio: list[float] = field(default_factory=list)  # bare pass / bare cycle
    num_emitted: int = 0

    def row(self, alpha: float, k: int) -> Row:
        expected = expected_tokens(alpha, k)
        share = [a / b for a, b in zip(self.engine_ratio, self.bare_ratio, strict=True)]
        efficiency = median(self.engine_ratio) / median(self.bare_ratio)
        spread = estimate(share)
        return {
            "alpha": alpha,
            "num_draft_tokens": k,
            "contender": f"alpha {alpha:g}",
            "proposer": f"alpha {alpha:g}",
            "expected_tokens": expected,
            "tokens_per_step": self.num_emitted / len(share),
            "speedup": expected * median(self.engine_ratio),
            "formula": expected * median(self.bare_ratio),
            "efficiency": efficiency,
            "efficiency_low": efficiency * spread.low / spread.value,
            "efficiency_high": efficiency * spread.high / spread.value,
            "num_turns": len(share),
        }


def run_turns(engine: Engine, job: Job, name: str, k: int, turns: Turns) -> None:
    """Until the speculative side has written its text; the plain one starts anew as needed."""
    fast = Ours("fast", engine, Speculation(proposer=name, num_draft_tokens=k), FixedPolicy())
    slow = plain(engine)
    lane, beside = fast.start([job]), slow.start([job])
    with BareCycle(engine, BENEATH, k, CONTEXT) as bare:
        while not lane.is_finished:
            if beside.is_finished:
                beside.finish()
                beside = slow.start([job])
            beside.step()
            [event] = lane.step().events
            ratio = bare.plain_s() / bare.cycle_s()
            if len(event.draft_tokens) == k:  # the last drafts of a text are shorter
                turns.engine_ratio.append(beside.steps[-1][1] / lane.steps[-1][1])
                turns.bare_ratio.append(ratio)
                turns.num_emitted += len(event.tokens)
    lane.finish()
    while not beside.is_finished:
        beside.step()
    beside.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=240, help="of each cell, at least")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "efficiency")
    options = parser.parse_args()
    engine = LLM("bundled", num_draft_tokens=4, prefix_caching=False).engine
    jobs = make_jobs(engine, load_workload("code", options.prompts).prompts, options.tokens)
    outputs = [plain(engine).run([job]).outputs[0] for job in jobs]
    jobs = [replace(job, prediction=output) for job, output in zip(jobs, outputs, strict=True)]
    names = {alpha: add_synthetic(engine, alpha, BENEATH) for alpha in ALPHAS}
    turns = {(alpha, k): Turns() for alpha in ALPHAS for k in COUNTS}
    # Where a step emits much a text has few of them.
    while open_ := [key for key, found in turns.items() if len(found.bare_ratio) < options.turns]:
        for job in jobs:
            for alpha, k in open_:
                run_turns(engine, job, names[alpha], k, turns[alpha, k])
    rows = [found.row(alpha, k) for (alpha, k), found in turns.items()]
    columns = [key for key in rows[0] if key not in ("contender", "proposer")]
    columns = [key for key in columns if not key.endswith(("_low", "_high"))]
    notes = (
        "Bundled pair, batch 1. `speedup`: expected tokens times the ratio of a plain step and a "
        "step with K drafts, both seen from outside the engine. `formula`: the same with bare "
        "calls of the models. Medians over turns, in which all four run one after the other; the "
        "interval is the bootstrap's. The drafter underneath works as if as many of its own tokens "
        "were accepted."
    )
    result = Result("sweep-k", "Engine efficiency at prescribed acceptance", rows, columns, notes)
    print(result.markdown())
    result.write(options.out)


if __name__ == "__main__":
    main()
