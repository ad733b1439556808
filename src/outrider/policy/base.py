"""What the engine asks before a step, and what it reports after one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.contracts import ControlledView, Proposal, StopRule, Verdict
from outrider.events import StepTiming


@dataclass(slots=True)
class Decision:
    """How much each sequence drafts, in the order of the views that were asked about."""

    budgets: list[int]
    stop_rules: Seq[StopRule | None]  # for drafters that can stop early
    valid_steps: int  # steps that may use this decision, the first included


@dataclass(frozen=True, slots=True)
class Choice:
    """The draft length of a sequence and its reasons; estimates as if the sequence ran alone."""

    decided: int  # the current decision
    asked: int  # in the last step: mostly the same, sometimes a probe
    survival: list[float]  # [k]: the probability that draft k + 1 is accepted
    rates: list[float]  # [k]: tokens per second with k drafts a step; [0] is plain decoding
    stops_itself: bool  # the drafter may stop earlier, at low confidence


class Policy(Protocol):
    """Chooses K, per sequence and step; 0 is plain decoding.

    A budget depends on finished steps, load and costs, never on the draft that it is for: whether a
    token is submitted must be settled before it is drawn, or ratio rules are biased.
    """

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        """Budgets are at most `limits`; `num_tokens` is the size of the pass without drafts."""
        ...

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        """One finished step of the last decision: what its drafts brought and what it cost."""
        ...

    def release(self, sequence_id: int) -> None:
        """Forget a sequence: finished, cancelled or preempted. Unknown ids are fine."""
        ...


@runtime_checkable
class Explains(Protocol):
    """A policy that can say why it chose K. Both methods run in the engine's thread."""

    def explain(self, view: ControlledView) -> Choice | None:
        """The reasons of the last decision; None if there was none for this sequence."""
        ...

    def plain_step_s(self, view: ControlledView) -> float | None:
        """The estimated time of a step without drafts for this sequence alone; None: unknown."""
        ...
