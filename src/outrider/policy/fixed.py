"""The simplest policy: each request's own K, as far as the limits allow."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.events import StepTiming
from outrider.policy.base import Decision


class FixedPolicy:
    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        return Decision(list(limits), [None] * len(limits), sys.maxsize)

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        pass

    def release(self, sequence_id: int) -> None:
        pass
