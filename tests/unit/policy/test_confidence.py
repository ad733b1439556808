"""Drafters that say how sure they are: what is learnt of that, and what it is good for."""

from __future__ import annotations

from random import Random
from statistics import mean
from typing import Any

import pytest

from outrider.contracts import NUM_LEVELS
from outrider.policy.allocation import _rounds
from outrider.policy.confidence import Confidence, Levels, floors
from outrider.policy.controller import AdaptivePolicy

from .simulator import NATIVE, DrawLevels, Machine, fixed, measured, run

SURE, UNSURE = NUM_LEVELS - 1, 3
WIDE = Machine([1.0 + 0.15 * n for n in range(600)], draft=0.03)  # every row costs the same


def mostly_sure(step: int, random: Random) -> tuple[int, float]:
    """What models do: two drafts of three are nearly always right, the others are guesses."""
    return (SURE, 0.97) if random.random() < 0.67 else (UNSURE, 0.3)


def never_right(step: int, random: Random) -> tuple[int, float]:
    return SURE, 0.0


def auto(machine: Machine) -> AdaptivePolicy:
    return AdaptivePolicy(measured(machine))


def best_fixed_rate(machine: Machine, levels: DrawLevels, **options: int) -> float:
    return max(
        fixed(machine, lambda step, i: 0.0, k, levels=levels, num_steps=4000, **options).rate()
        for k in (0, 1, 2, 3, 4, 6, 8)
    )


@pytest.mark.parametrize("machine", [NATIVE, WIDE], ids=["native", "wide"])
def test_no_fixed_k_is_as_good_as_stopping_in_time(machine: Machine) -> None:
    best = best_fixed_rate(machine, mostly_sure)
    trace = run(machine, lambda step, i: 0.0, auto(machine), levels=mostly_sure, ahead=16)
    print(f"{trace.rate(200) / best:.3f} of the best K")
    assert trace.rate(200) > 1.03 * best


@pytest.mark.parametrize("batch", [1, 4])
def test_a_drafter_that_stops_by_itself_has_no_k(batch: int) -> None:
    """All that it may draw, or nothing: an estimate of the best number wanders."""
    policy, num = auto(NATIVE), {"batch": lambda step: batch, "num_steps": 600}
    trace = run(NATIVE, lambda step, i: 0.0, policy, levels=mostly_sure, ahead=16, **num)  # type: ignore[arg-type]
    some = [max(budgets) for budgets in trace.budgets[100:] if any(budgets)]
    print(f"{len(some)} steps with drafts, {mean(k == 16 for k in some):.3f} without a limit")
    assert mean(k == 16 for k in some) > 0.9


def test_a_batch_drafts_only_what_it_is_sure_of() -> None:
    four: dict[str, Any] = {"batch": lambda step: 4, "num_steps": 2000}

    def rate(k: int) -> float:
        return fixed(WIDE, lambda step, i: 0.0, k, levels=mostly_sure, **four).rate()

    trace = run(WIDE, lambda step, i: 0.0, auto(WIDE), levels=mostly_sure, ahead=16, **four)
    best = max(rate(k) for k in (1, 2, 3, 4))
    print(f"{trace.rate(300) / best:.3f} of the best K, {best / rate(0):.3f} of plain")
    assert trace.rate(300) > 1.03 * best


@pytest.mark.parametrize("batch", [1, 4, 8])
def test_who_is_sure_and_never_right_costs_little(batch: int) -> None:
    trace = run(
        NATIVE,
        lambda step, i: 0.0,
        auto(NATIVE),
        levels=never_right,
        batch=lambda step: batch,
        num_steps=3000,
        ahead=16,
    )
    plain = fixed(NATIVE, lambda step, i: 0.0, 0, batch=lambda step: batch, num_steps=2).rate()
    assert trace.rate() >= 0.97 * plain


def test_a_batch_for_which_plain_steps_were_priced_too_high_is_found_out() -> None:
    """As a measurement in a slow moment of the memory leaves it: wide passes look free. While all
    steps draft, the table's scale follows them, and only a plain step can tell."""
    truth = Machine([0.2 * n for n in range(600)], draft=0.05)
    slow = Machine([max(c, 5.0) for c in truth.verify], draft=0.05)
    sixteen: dict[str, Any] = {"batch": lambda step: 16, "num_steps": 1500}
    plain = fixed(truth, lambda step, i: 0.0, 0, levels=mostly_sure, **sixteen).rate()
    trace = run(
        truth,
        lambda step, i: 0.0,
        AdaptivePolicy(measured(slow)),
        levels=mostly_sure,
        ahead=8,
        **sixteen,
    )
    print(f"{trace.rate() / plain:.3f} of plain")
    assert trace.rate() > 0.97 * plain


def test_who_becomes_right_again_is_believed_again() -> None:
    def returning(step: int, random: Random) -> tuple[int, float]:
        return never_right(step, random) if step < 1500 else mostly_sure(step, random)

    best = best_fixed_rate(NATIVE, mostly_sure)
    trace = run(
        NATIVE, lambda step, i: 0.0, auto(NATIVE), levels=returning, num_steps=6000, ahead=16
    )
    assert trace.rate(4500) > 0.95 * best


def test_a_request_that_differs_is_told_apart() -> None:
    shared = Levels()
    usual, odd = Confidence(shared), Confidence(shared)
    for _ in range(40):
        usual.observe([([SURE] * 4, 4, 4)] * 8, most=16)
        odd.observe([([SURE] * 4, 4, 1)] * 2, most=16)
    usual.refresh()
    odd.refresh()
    assert usual.chances[SURE] > 0.85
    assert odd.chances[SURE] < 0.7
    assert usual.accepted[4] > 3.5
    assert odd.accepted[4] < 1.5
    assert Confidence(shared).chances == shared.chances  # who is new is like everybody


def test_places_that_no_draft_may_reach_are_not_forgotten_at_once() -> None:
    """A limit says nothing about what lies behind it."""
    shared = Levels()
    request = Confidence(shared)
    for _ in range(20):
        request.observe([([SURE] * 6, 6, 6)] * 4, most=16)
    request.refresh()
    behind = request.accepted[6] - request.accepted[2]
    for _ in range(10):
        request.observe([([SURE] * 2, 2, 2)] * 4, most=2)
    request.refresh()
    assert request.accepted[6] - request.accepted[2] > 0.8 * behind


def test_a_round_for_few_is_charged_to_all() -> None:
    """Four that each draw a second token now and then keep a second round going mostly."""
    drawn = [[0.0, 1.0, 1.5]] * 4
    assert _rounds(drawn, fixed_share=0.0) == [0.0, 1.0, 1.5]
    assert _rounds(drawn, fixed_share=1.0) == pytest.approx([0.0, 1.0, 1.9375])


def test_levels_that_are_left_out_are_tried_again_some_day() -> None:
    shared = Levels()
    guess = shared.chances[UNSURE]
    for _ in range(10):
        shared.judge([([UNSURE], 1, 0)] * 10)
    shared.refresh()
    assert shared.chances[UNSURE] < 0.2 * guess
    for _ in range(200):
        shared.judge([([SURE] * 8, 8, 8)] * 10)
    shared.refresh()
    assert shared.chances[UNSURE] > 0.9 * guess


def test_floors_are_what_rows_cost() -> None:
    row = [0.0, 1.0, 1.1, 1.2, 1.2, 2.2, 3.2, 4.2]
    assert floors(row, 1, 0.5) == pytest.approx([0.0333] * 3 + [0.5] * 3, abs=1e-3)
    assert floors(row, 4, 0.5) == pytest.approx([0.5] * 3)
    # A pass that costs less than a narrower one was measured badly: no price is negative.
    assert min(floors([0.0, 1.0, 1.5, 1.4, 2.0], 1, 1.0)) >= 0.0
