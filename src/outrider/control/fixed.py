"""The simplest controller: every request's own K, as far as the limits allow."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq

from outrider.contracts import Caution, ControlledView, Proposal, Verdict
from outrider.events import StepTiming


class FixedController:
    def budget(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> list[int]:
        return list(limits)

    def caution(self, index: int) -> Caution | None:
        return None

    def standing(self) -> int:
        return sys.maxsize

    def repeat(self) -> None:
        pass

    def update(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        pass

    def release(self, sequence_id: int) -> None:
        pass
