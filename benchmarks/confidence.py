"""How often drafts are accepted, by the confidence of the drafter.

    python benchmarks/confidence.py [--quick] [--out FOLDER]

Counts every draft of the bundled draft model on the bench's workloads by its confidence level: by
how much its score exceeds the runner-up's, noise included.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence as Seq

import report

from outrider.bench.contenders import make_jobs
from outrider.bench.workloads import load_workload
from outrider.contracts import (
    LEVEL_STEP,
    NUM_LEVELS,
    ControlledView,
    Proposal,
    StopRule,
    Verdict,
)
from outrider.engine.build import EngineConfig, build
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.events import StepTiming
from outrider.policy.base import Decision
from outrider.policy.fixed import FixedPolicy

WORKLOADS = ("code", "prose", "edit", "json", "summary", "hot", "long")
GROUP = 2  # levels of a row


class Listening(FixedPolicy):
    """Gives every sequence its whole limit, and counts drafts by confidence level."""

    def __init__(self) -> None:
        self.judged: Counter[tuple[bool, int]] = Counter()  # (sampled, level)
        self.held: Counter[tuple[bool, int]] = Counter()

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        decision = super().decide(views, limits, num_tokens)
        decision.stop_rules = [StopRule([1.0] * NUM_LEVELS)] * len(views)
        return decision

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        for view, proposal, verdict in zip(views, proposals, verdicts, strict=True):
            num_held = len(verdict.path)
            for place, level in enumerate((proposal.levels or [])[: num_held + 1]):
                key = (view.params.temperature > 0, level)
                self.judged[key] += 1
                self.held[key] += place < num_held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    report.add_out(parser)
    asked = parser.parse_args()
    engine = build(EngineConfig(proposer="draft-model", num_draft_tokens=8))
    engine.policy = heard = Listening()
    wish = Speculation(proposer="draft-model", num_draft_tokens="auto")
    for name in WORKLOADS[: 1 if asked.quick else None]:
        for job in make_jobs(engine, load_workload(name, 7).prompts, 64):
            request = engine.add(job.prompt, job.params, speculation=wish, salt=fresh_salt())
            for _ in engine.run([request]):
                pass
            engine.collect(request)
    rows = []
    for first in range(0, NUM_LEVELS, GROUP):
        row: dict[str, object] = {"margin from": f"{LEVEL_STEP * first:.2f}"}
        for sampled, label in ((False, "greedy"), (True, "sampled")):
            keys = [(sampled, level) for level in range(first, first + GROUP)]
            judged = sum(heard.judged[key] for key in keys)
            held = sum(heard.held[key] for key in keys)
            row[f"{label}: drafts"] = judged
            row[f"{label}: held"] = f"{held / judged:.2f}" if judged else ""
        rows.append(row)
    notes = (
        "The bundled draft model and target; drafts up to the first that was refused. The margin "
        "is that of the drawn token's score (logit over temperature, plus the noise of the draw) "
        "over the runner-up's; the last row has all that are larger."
    )
    report.write(
        "confidence", "How often drafts hold, by margin", {"By margin": rows}, notes, asked.out
    )


if __name__ == "__main__":
    main()
