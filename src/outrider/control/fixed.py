"""The simplest controller: every request's own K, as far as the limits allow."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import Proposal, SequenceView, Verdict


class FixedController:
    def budget(self, views: Seq[SequenceView], limits: Seq[int]) -> list[int]:
        return list(limits)

    def update(
        self,
        views: Seq[SequenceView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        draft_s: float,
        verify_s: float,
    ) -> None:
        pass
