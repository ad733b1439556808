"""What the doctor concludes from long drafts about short ones."""

from __future__ import annotations

import random

import pytest

from outrider.doctor.curves import DEEPEST, Curves, Drafted, Sizes, Worth, shorter

NUM_TOKENS = 4000


def agreement(seed: int) -> list[bool]:
    """Where a drafter is right about a text: it is in runs."""
    rng = random.Random(seed)
    right, found = False, []
    for _ in range(NUM_TOKENS):
        right = rng.random() < (0.85 if right else 0.35)
        found.append(right)
    return found


def decode(right: list[bool], budget: int) -> list[Drafted]:
    steps, place = [], 0
    while place < len(right):
        size = min(budget, len(right) - 1 - place)
        held = next((i for i in range(size) if not right[place + i]), size)
        steps.append((size, held))
        place += held + 1
    return steps


@pytest.mark.parametrize("budget", [1, 2, 4, 8, DEEPEST])
def test_long_drafts_tell_what_short_ones_achieve(budget: int) -> None:
    right = agreement(budget)
    steps = decode(right, budget)
    accepted, sizes = shorter([decode(right, DEEPEST)], budget)
    assert accepted == pytest.approx(sum(held for _, held in steps) / len(steps), rel=0.02)
    assert sizes[budget] > 0.98


def test_counted_by_places_of_long_drafts_short_ones_would_look_worse() -> None:
    text = decode(agreement(1), DEEPEST)
    first = sum(held > 0 for _, held in text) / len(text)
    assert shorter([text], 1)[0] > 1.1 * first


def test_of_a_lookup_that_finds_little_no_more_is_drafted() -> None:
    text = [(0, 0), (3, 3), (0, 0), (5, 1), (0, 0)]
    assert shorter([text], DEEPEST) == (4 / 5, {0: 3 / 5, 3: 1 / 5, 5: 1 / 5})
    # Two of the three hold, the third comes by itself, and behind it nothing is found: a step more.
    assert shorter([text], 2) == (3 / 6, {0: 4 / 6, 2: 2 / 6})
    assert shorter([], 2) == (0.0, {0: 1.0})


def test_a_pass_of_varying_width_costs_more_than_one_of_the_usual_width() -> None:
    passes = {1: {1: 1.0, 6: 1.0, 16: 3.0}, 2: {2: 1.0, 12: 2.0, 32: 6.0}}
    curves = Curves(passes, {1: 0.1, 2: 0.1}, {"found": {1: {1: 0.0}, 2: {1: 0.0}}})
    found: list[Sizes] = [{0: 1.0} for _ in range(DEEPEST)]
    curves.worth["found"] = Worth([], [0.0] * (DEEPEST + 1), [*found, {0: 0.5, 10: 0.5}])
    usual_s = curves.pass_s(1, 6)
    assert curves.step_s("found", 1, DEEPEST) == pytest.approx(0.1 + (1.0 + 2.0) / 2)
    assert curves.step_s("found", 1, DEEPEST) > 1.3 * usual_s
    spread = sorted(size for size, _ in curves.worth["found"].spread(DEEPEST, 4))
    assert spread == [2.5, 7.5]  # not all at once in a batch
