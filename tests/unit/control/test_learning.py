"""What a decision's steps tell about prices."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.contracts import Proposal, Verdict
from outrider.control.allocation import Source, Track
from outrider.control.cost import Costs, CostTable, batch_bucket, bucket_context
from outrider.control.learning import Decision, Learner, News
from outrider.events import StepTiming

from .simulator import View

NUM, CALL = 16, 16  # sequences, and steps of a call
EACH_S = 0.2  # a sequence in the middle of the bucket


def true_s(context: int) -> float:
    """A pass over sequences with so much context each."""
    return 1.6 + NUM * EACH_S * context / bucket_context(0)


def scale_after_texts(context_s: float) -> float:
    """The machine's speed, as it looks after plain steps through texts from 30 to 222 tokens."""
    row = [1.0 + 0.05 * n for n in range(65)]
    table = CostTable([row], measured=True, each_s=EACH_S, context_s=context_s)
    learner, source, batch = Learner(Costs(table)), Source("drafter"), batch_bucket(NUM)
    source.purses[batch] = source.credits[batch] = 0.0
    asked = [(i, Track(source), 0) for i in range(NUM)]
    for _ in range(10):
        for context in range(30, 222, CALL):
            num_read = NUM * context
            base = table.base(0, NUM, batch) + table.off_middle_s(0, batch, num_read)
            views: Any = [View(i, num_tokens=context) for i in range(NUM)]
            decision = Decision(
                list(range(NUM)), NUM, asked, CALL, views, 0, base * table.scale, base, num_read
            )
            news: list[News] = [
                (
                    StepTiming(0.0, true_s(context + step), 0.0, NUM, NUM),
                    [Proposal() for _ in range(NUM)],
                    [Verdict([], 0) for _ in range(NUM)],
                )
                for step in range(CALL)
            ]
            learner.learn(decision, news)
            assert decision.num_read == num_read + NUM * CALL
    return table.scale


def test_contexts_that_grow_are_not_a_machine_that_slows_down() -> None:
    assert scale_after_texts(EACH_S / bucket_context(0)) == pytest.approx(1.0, rel=0.03)
    assert scale_after_texts(0.0) != pytest.approx(1.0, rel=0.1)  # for want of that price
