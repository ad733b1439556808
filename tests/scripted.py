"""A proposer and a controller for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import (
    NUM_LEVELS,
    ControlledView,
    Draw,
    Needs,
    Observation,
    Proposal,
    SequenceView,
    StopRule,
)
from outrider.policy.base import Decision
from outrider.policy.fixed import FixedPolicy


class Drafter:
    """A proposer that says what a test tells it to."""

    name = "scripted"
    draws = frozenset({Draw.DETERMINISTIC})
    trees = True
    needs = Needs()

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.released: list[int] = []
        self.num_calls = 0

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        self.num_calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        assert callable(self.answer)
        return [self.answer(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None: ...

    def release(self, sequence_id: int) -> None:
        self.released.append(sequence_id)


class Cautious(FixedPolicy):
    """Lets drafters stop as they would on a machine where rows are dear."""

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        decision = super().decide(views, limits, num_tokens)
        decision.stop_rules = [self._rule(i) for i in range(len(views))]
        return decision

    def _rule(self, index: int) -> StopRule:
        sure = [min(1.0, 0.3 + 0.1 * level + 0.01 * index) for level in range(NUM_LEVELS)]
        return StopRule(sure, [0.2, 0.3, 0.35, 0.4], toll=0.1)
