"""Prices by count from clocks that busy moments disturb."""

from __future__ import annotations

import random

import pytest

from outrider.proposers._times import Times


def linear(count: int) -> float:
    return 1.0 + 0.03 * count


def test_lines_between_what_is_known_and_guesses_around_it() -> None:
    times = Times(linear)
    assert not times
    assert times.row(2) == [0.0, 0.0, 0.0]
    times.learn(2, 10.0)
    times.learn(6, 14.0)
    row = times.row(8)
    assert row[2:7] == pytest.approx([10, 11, 12, 13, 14])
    assert row[1] == pytest.approx(10 * linear(1) / linear(2))
    assert row[8] == pytest.approx(14 * linear(8) / linear(6))


def test_a_first_time_is_believed_within_reason_only() -> None:
    times = Times(linear)
    times.learn(1, 1.0)
    times.learn(2, 50.0)
    assert times.row(2)[2] < 2.0


def test_busy_phases_do_not_make_anything_dear_for_good() -> None:
    """Of widths that cost 1 to 2, in phases that take up to four times as long."""
    rng = random.Random(0)
    times = Times(linear)
    factor = 1.0
    for step in range(4000):
        if step % 10 == 0:
            factor = rng.choice([1, 1, 1, 2, 3, 4])
        width = rng.choice([1, 1, 6, 9]) if step < 3000 else 1
        times.learn(width, factor * (1 + width / 9))
        if step % 8 == 0:
            times.end_lesson()
    row = times.row(9)
    assert row == sorted(row)
    assert row[9] < 3 * row[1]
