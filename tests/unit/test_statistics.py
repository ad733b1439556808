"""Figures of speculation from a handful of steps that can be counted by hand."""

from __future__ import annotations

import json

import pytest

from outrider.events import StepEvent, StepReport, StepTiming
from outrider.statistics import SpeculationStats

TIMING = StepTiming(draft_s=1.0, verify_s=2.0, other_s=0.5, num_sequences=1, num_tokens=5)


def event(
    num_drafted: int,
    path: list[int],
    *,
    parents: list[int] | None = None,
    num_tokens: int | None = None,
) -> StepEvent:
    return StepEvent(
        request_id="r",
        sample_index=0,
        step=1,
        tokens=[7] * (len(path) + 1 if num_tokens is None else num_tokens),
        text="",
        finish_reason=None,
        draft_tokens=[7] * num_drafted,
        draft_parents=parents,
        path=path,
        source="test",
    )


def test_chains_counted_by_hand() -> None:
    stats = SpeculationStats()
    for num_accepted in (0, 2, 3, 3):
        stats.add(event(3, list(range(num_accepted))))
    stats.add(event(1, []))  # a shorter proposal, refused
    stats.add(event(0, []))  # no proposal at all
    assert stats.num_steps == 6
    assert stats.num_tokens == 1 + 3 + 4 + 4 + 1 + 1
    assert stats.acceptance_length == pytest.approx(13 / 5)
    assert stats.tokens_per_pass == pytest.approx(14 / 6)
    assert stats.acceptance_rate == pytest.approx(8 / 13)
    assert stats.accepted_lengths == [2, 0, 1, 2]
    assert stats.conditional_acceptance == pytest.approx([3 / 5, 3 / 3, 2 / 3])
    assert stats.unconditional_acceptance == pytest.approx([3 / 5, 3 / 5, 2 / 5])


def test_a_proposal_cut_short_by_the_end_refuses_nothing() -> None:
    stats = SpeculationStats()
    stats.add(event(3, [0, 1], num_tokens=2))  # the second draft was a stop token
    assert stats.conditional_acceptance == [1.0, 1.0, 0.0]
    assert stats.refused_after == [0, 0, 0, 0]
    assert stats.acceptance_length == 2.0


def test_positions_of_a_tree_are_depths() -> None:
    parents = [-1, -1, 0, 1, 3]
    stats = SpeculationStats()
    stats.add(event(5, [1, 3, 4], parents=parents))  # a leaf: bonus
    stats.add(event(5, [0, 2], parents=parents))  # a leaf at depth 2: nothing was refused
    stats.add(event(5, [1], parents=parents))  # node 3 was refused
    assert stats.accepted_lengths == [0, 1, 1, 1]
    assert stats.conditional_acceptance == pytest.approx([1.0, 2 / 3, 1.0])


def test_nothing_counted_gives_zeros() -> None:
    figures = SpeculationStats().to_dict()
    assert not any(figures.values())
    assert json.loads(json.dumps(figures)) == figures


def test_a_steps_time_counts_once() -> None:
    stats = SpeculationStats()
    stats.add(event(2, [0]), TIMING)
    stats.add(event(2, []), TIMING)  # another sample of the same step
    assert (stats.draft_s, stats.verify_s, stats.other_s) == (1.0, 2.0, 0.5)
    assert stats.tokens_per_s == pytest.approx(3 / 3.5)
    whole = SpeculationStats()
    whole.add_report(StepReport([event(2, [0]), event(2, [])], TIMING))
    assert whole == stats


def test_merging_is_counting_together() -> None:
    events = [event(n, list(range(k))) for n in range(6) for k in range(n + 1)]
    parts, whole = (SpeculationStats(), SpeculationStats()), SpeculationStats()
    for i, one in enumerate(events):
        timing = StepTiming(i, 2.0 * i, 1.0, 1, 1)
        whole.add(one, timing)
        parts[i % 2 if i < 9 else 0].add(one, timing)
    merged = SpeculationStats()
    for part in parts:
        merged.merge(part)
    assert merged == whole
    assert merged.to_dict() == whole.to_dict()
