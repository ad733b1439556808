"""A proposer for tests of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import Draw, Needs, Observation, Proposal, SequenceView


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
