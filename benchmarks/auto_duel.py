"""K = auto beside the two best fixed K of each workload: `auto-duel`.

    python benchmarks/auto_duel.py [--rounds 12] [--workloads NAME,NAME] [--quick] [-o PATH]

Which of several close K comes first in one run is chance, and the winner's figure is too high. So
the two best of `auto-by-workload` decode the same texts again, beside auto: the contender with the
least progress steps next, and a slow moment of the machine falls on all three. About ten minutes.
Some workloads alone, or a quick run, are printed; -o keeps them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import report

from outrider.bench.contenders import Job, Ours, make_jobs, race
from outrider.bench.decode import ours
from outrider.bench.workloads import load_workload
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine

PROPOSER = "draft-model"
NUM_BEST = 2


def best_fixed() -> dict[str, list[int]]:
    """By workload: its best K in `auto-by-workload`, the best first."""
    rows = json.loads((report.RESULTS / "auto-by-workload.json").read_text())["rows"]
    found: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        k = row["num_draft_tokens"]
        if k not in (0, "auto"):
            found.setdefault(row["workload"], []).append((row["undisturbed_speedup"], int(k)))
    return {name: [k for _, k in sorted(some)[::-1][:NUM_BEST]] for name, some in found.items()}


def duel(engine: Engine, jobs: list[Job], counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for every K: auto's speed over its, round by round."""
    auto, *others = [
        contender
        for contender in ours(engine, [PROPOSER], ["auto", *counts])[1:]
        if isinstance(contender, Ours)
    ]
    ratios: dict[str, list[float]] = {contender.name: [] for contender in others}
    for round_ in range(rounds + 1):
        mine, *theirs = race([contender.start(jobs) for contender in (auto, *others)])
        for other, run in zip(others, theirs, strict=True):
            assert run.outputs == mine.outputs, f"{other.name} changed the output"
            if round_:  # the first one measures costs
                rate = run.num_tokens / run.seconds
                ratios[other.name].append(mine.num_tokens / mine.seconds / rate)
    return [
        {
            "against": name,
            "auto over it": f"{median(found):.3f}",
            "least": f"{min(found):.3f}",
            "most": f"{max(found):.3f}",
        }
        for name, found in ratios.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--workloads", help="only these, by name")
    parser.add_argument("--quick", action="store_true", help="one round over two texts")
    parser.add_argument("-o", "--out", type=Path, help="results/auto-duel if all is run")
    asked = parser.parse_args()
    best = best_fixed()
    names = asked.workloads.split(",") if asked.workloads else list(best)
    for name in names:
        if name not in best:
            parser.error(f"there is no {name!r} in auto-by-workload: {', '.join(best)}")
    rounds, num_prompts = (1, 2) if asked.quick else (asked.rounds, asked.prompts)
    engine = build(EngineConfig(num_draft_tokens="auto", proposer=PROPOSER))
    rows: list[dict[str, Any]] = []
    for name in names:
        jobs = make_jobs(engine, load_workload(name, num_prompts).prompts, 64)
        found = duel(engine, jobs, best[name], rounds)
        rows += [{"workload": name, **row} for row in found]
        print(*rows[-len(found) :], sep="\n", flush=True)
    if asked.out is None and (asked.quick or asked.workloads):
        return
    out = asked.out or report.RESULTS / "auto-duel"
    report.write(
        out.name,
        "K = auto against the two best fixed K",
        {"auto's speed over theirs": rows},
        f"The bundled models, one request at a time, {num_prompts} texts of 64 tokens, {rounds} "
        "rounds. `auto over it`: the median of the rounds' ratios of tokens per second, and the "
        "least and the most of them. The fixed K are the two best of `auto-by-workload`, by "
        "undisturbed speedup. Outputs were equal in every run.",
        out.parent,
    )


if __name__ == "__main__":
    main()
