"""The engine against the formula: prescribed acceptance, real drafting costs.

    python benchmarks/efficiency.py [--rounds 6] [--tokens 64]

    efficiency = measured speedup / (E[tokens] / (K c + v(K)))

c and v(K) are bare costs: the drafter's and the target's calls alone, in this process, in turns
with the engine's steps. Both sides are medians over steps, so that a busy moment of the machine
falls on neither.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter

from outrider.bench.contenders import Job, make_jobs, plain
from outrider.bench.formula import BareCosts
from outrider.bench.report import Result
from outrider.bench.synthetic import add_synthetic
from outrider.bench.workloads import load_workload
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.llm import LLM
from outrider.theory import expected_tokens

ALPHAS = (0.0, 0.4, 0.6, 0.8, 0.9, 1.0)
COUNTS = (2, 4, 8)
RESULTS = Path(__file__).parent / "results"


def steps(engine: Engine, job: Job, wish: Speculation, width: int) -> tuple[list[float], list[int]]:
    """Seconds and tokens of the steps over `width` tokens, seen from outside the engine."""
    request = engine.add(job.prompt, job.params, speculation=wish, prediction=job.prediction)
    seconds, tokens = [], []
    while not engine.is_finished(request):
        started = perf_counter()
        report = engine.step()
        took = perf_counter() - started
        if report is not None and report.timing.num_tokens == width:
            seconds.append(took)
            tokens += [len(event.tokens) for event in report.events]
    engine.collect(request)
    return seconds[1:], tokens[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    engine = LLM("bundled", num_draft_tokens=4, prefix_caching=False).engine
    jobs = make_jobs(engine, load_workload("code", options.rounds).prompts, options.tokens)
    outputs = [plain(engine).run([job]).outputs[0] for job in jobs]
    jobs = [replace(job, prediction=output) for job, output in zip(jobs, outputs, strict=True)]
    names = {alpha: add_synthetic(engine, alpha, "draft-model") for alpha in ALPHAS}
    took: defaultdict[tuple[float, int], list[float]] = defaultdict(list)
    emitted: defaultdict[tuple[float, int], list[int]] = defaultdict(list)
    plain_s: list[float] = []
    bare: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    off = Speculation(num_draft_tokens=0)
    for job in jobs:
        for k in COUNTS:
            bare[k].append(BareCosts(engine, "draft-model").seconds(k))
            plain_s += steps(engine, job, off, 1)[0]
            for alpha, name in names.items():
                wish = Speculation(proposer=name, num_draft_tokens=k)
                seconds, tokens = steps(engine, job, wish, k + 1)
                took[alpha, k] += seconds
                emitted[alpha, k] += tokens
    rows = []
    bare_plain = median(one for pairs in bare.values() for one, _ in pairs)
    for alpha in ALPHAS:
        for k in COUNTS:
            ratio = median(plain_s) / median(took[alpha, k])
            promised = bare_plain / median(cycle for _, cycle in bare[k])
            tokens_per_step = sum(emitted[alpha, k]) / len(emitted[alpha, k])
            rows.append(
                {
                    "alpha": alpha,
                    "num_draft_tokens": k,
                    "contender": f"alpha {alpha:g}",
                    "expected_tokens": expected_tokens(alpha, k),
                    "tokens_per_step": tokens_per_step,
                    "speedup": expected_tokens(alpha, k) * ratio,
                    "formula": expected_tokens(alpha, k) * promised,
                    "efficiency": ratio / promised,
                    "proposer": f"alpha {alpha:g}",
                    "num_steps": len(took[alpha, k]),
                }
            )
    columns = [key for key in rows[0] if key not in ("contender", "proposer")]
    notes = (
        "Bundled pair, batch 1. `speedup`: expected tokens times the ratio of the medians of a "
        "plain step and of a step with K drafts, both seen from outside the engine. `formula`: the "
        f"same with bare calls of the models. {options.rounds} prompts in turns."
    )
    result = Result("sweep-k", "Engine efficiency at prescribed acceptance", rows, columns, notes)
    print(result.markdown())
    result.write(RESULTS / "efficiency")


if __name__ == "__main__":
    main()
