"""Every proposer on every kind of work, on the bundled models: what it drafts and what that gains.

    python benchmarks/proposers.py [--rounds 3] [--only NAME,NAME] [--workloads NAME,NAME]

One engine, one request at a time, proposers in random order. Before and after every run a few
tokens of the same prompt are decoded plainly, and the run counts against these: shared machines
change their speed from one second to the next. Only decoding is timed: from the first step's end,
and a step counts as at most twice the median of its run. A prompt's figure is the median of its
rounds, a workload's the time that all its prompts would take. Every output is compared with plain
decoding's, token by token.

Then hybrid meets the two best others of each workload, run beside run: which of several is best is
chance where they are close, and a ratio of neighbours in time is surer than one of two ratios.
About ten minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import report
from workloads import Workload, workloads

from outrider import native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams

PLAIN = "plain"
HYBRID = "hybrid"
NUM_REFERENCE = 24  # tokens of plain decoding between two runs
# What each is asked for: nodes of a tree, places of a block, or the length of a chain. Look-ups
# cost nothing to ask for much; a model's chain pays for every token.
BUDGETS = {
    PLAIN: 0,
    "draft-model": 5,
    "draft-tree": 10,
    "cascade": 6,
    "cross-vocab": 4,
    "early-exit": 2,
    "quantized": 3,
    "medusa": 4,
    "eagle3": 8,
    "dflash": 7,
    "ngram": 16,
    "suffix": 16,
    "prediction": 16,
    "lookahead": 8,
    HYBRID: 16,
}


@dataclass(slots=True)
class Run:
    """One request's decoding, its first step left out."""

    tokens: list[int]
    seconds: float  # without bursts
    num_tokens: int
    num_steps: int
    draft_s: float
    verify_s: float
    clock_s: float  # with them: what draft_s and verify_s are parts of


def decode(
    engine: Engine,
    name: str,
    workload: Workload,
    index: int,
    num_tokens: int | None = None,
) -> Run:
    speculation = Speculation(
        proposer=None if name == PLAIN else name, num_draft_tokens=BUDGETS[name]
    )
    params = SamplingParams(
        temperature=workload.temperature,
        seed=index,
        max_tokens=num_tokens or workload.num_tokens,
        ignore_eos=True,
    )
    request = engine.add(
        workload.prompts[index],
        params,
        speculation=speculation,
        prediction=workload.prediction(index),
        salt=fresh_salt(),  # no run drafts from an earlier run's output
    )
    steps: list[float] = []
    num_tokens, draft_s, verify_s = 0, 0.0, 0.0
    started: float | None = None
    for step in engine.run([request]):
        if started is not None:
            # Not the time between two of them: several may have been computed at once.
            timing = step.timing
            steps.append(timing.draft_s + timing.verify_s + timing.other_s)
            num_tokens += sum(len(event.tokens) for event in step.events)
            draft_s += timing.draft_s
            verify_s += timing.verify_s
        elif step.events:
            started = perf_counter()
    assert started is not None
    clock_s = perf_counter() - started
    tokens = engine.collect(request).tokens
    most = 2 * statistics.median(steps)
    seconds = clock_s - sum(max(0.0, step - most) for step in steps)
    return Run(tokens, seconds, num_tokens, len(steps), draft_s, verify_s, clock_s)


def measure(
    engine: Engine, workload: Workload, names: list[str], rounds: int
) -> list[dict[str, Any]]:
    names = [n for n in names if n != "prediction" or workload.predictions]
    indices = range(len(workload.prompts))
    plain = [decode(engine, PLAIN, workload, i).tokens for i in indices]
    runs: dict[str, list[Run]] = defaultdict(list)
    ratios: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = random.Random(0)

    def reference(index: int) -> float:
        run = decode(engine, PLAIN, workload, index, NUM_REFERENCE)
        return run.seconds / run.num_tokens

    for _ in range(rounds):
        for index in indices:
            before = reference(index)
            for name in order.sample(names, len(names)):
                run = decode(engine, name, workload, index)
                assert run.tokens == plain[index], f"{name} changed the output"
                after = reference(index)
                plain_s = (before + after) / 2 * run.num_tokens
                ratios[name][index].append(plain_s / run.seconds)
                runs[name].append(run)
                before = after
    rows = []
    for name in names:
        everything = runs[name]
        seconds = sum(run.clock_s for run in everything)
        prompts = [statistics.median(ratios[name][index]) for index in indices]
        rows.append(
            {
                "proposer": name,
                "K": BUDGETS[name],
                "acceptance length": sum(r.num_tokens for r in everything)
                / sum(r.num_steps for r in everything),
                "tokens/s": statistics.median(r.num_tokens / r.seconds for r in everything),
                "against plain": statistics.harmonic_mean(prompts),
                "drafting": sum(r.draft_s for r in everything) / seconds,
                "verifying": sum(r.verify_s for r in everything) / seconds,
            }
        )
    return rows


def duels(
    engine: Engine, workload: Workload, table: list[dict[str, Any]], rounds: int
) -> list[dict[str, Any]]:
    """Hybrid against the best of the table."""
    others = [row for row in table if row["proposer"] not in (PLAIN, HYBRID)]
    others.sort(key=lambda row: -float(row["against plain"]))
    names = [HYBRID, *(row["proposer"] for row in others[:2])]
    indices = range(len(workload.prompts))
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_ in range(rounds):
        for index in indices:
            turn = (round_ + index) % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name][index].append(decode(engine, name, workload, index).seconds)
    rows = []
    for name in names[1:]:
        prompts = [
            statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in ((seconds[HYBRID][i], seconds[name][i]) for i in indices)
        ]
        rows.append(
            {
                "workload": workload.name,
                "against": name,
                "hybrid over it": statistics.harmonic_mean(prompts),
                "by prompt": " ".join(f"{ratio:.2f}" for ratio in sorted(prompts)),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--duel-rounds", type=int, default=12)
    parser.add_argument("--only", help="proposers, by name")
    parser.add_argument("--workloads", help="workloads, by name")
    options = parser.parse_args()
    engine = build(EngineConfig(num_draft_tokens=0, prefix_caching=False))
    names = [PLAIN, *(options.only.split(",") if options.only else list(BUDGETS)[1:])]
    chosen = [
        w for w in workloads() if not options.workloads or w.name in options.workloads.split(",")
    ]
    for name in names:  # loads what it needs, and touches its memory for the first time
        decode(engine, name, chosen[0], 0)
    tables = {w.name: measure(engine, w, names, options.rounds) for w in chosen}
    met = [
        row
        for w in chosen
        if HYBRID in names and len(names) > 2
        for row in duels(engine, w, tables[w.name], options.duel_rounds)
    ]
    if options.only or options.workloads:
        for rows in (*tables.values(), met):
            for row in rows:
                print(
                    " ".join(
                        f"{v:.3g}" if isinstance(v, float) else f"{v:14}" for v in row.values()
                    )
                )
        return
    target = engine.target
    report.write(
        "proposers",
        "Proposers by workload, on the bundled models",
        tables,
        f"Target {target.spec.name} ({getattr(target, 'dtype', '')} weights, {native.isa()}, "
        f"{native.num_threads()} threads), one request at a time. Speed against plain: the time "
        f"for all prompts, each the median of {options.rounds} rounds, each run against plain "
        "decoding of the same prompt just before and after it (the first row shows how far equals "
        "differ). The "
        "acceptance length counts the correction or bonus token; K is the "
        "budget of nodes; drafting and verifying are shares of the time. Outputs were equal to "
        "plain decoding's in every run.",
    )
    report.write(
        "hybrid",
        "Hybrid against the best single proposers",
        {"hybrid's speed over theirs": met},
        f"The bundled models, one request at a time: {options.duel_rounds} rounds in which hybrid "
        "and the two proposers that were best in `proposers` decode the same prompts beside each "
        "other, in changing order. A prompt's figure is the median of the rounds' ratios, a "
        "workload's the time for all prompts. From one prompt to the next nothing is learnt of the "
        "outputs; what costs and drafts are worth stays known.",
    )


if __name__ == "__main__":
    main()
