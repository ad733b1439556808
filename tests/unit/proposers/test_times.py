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
    for _ in range(100):
        times.learn(2, 10.0)
        times.learn(6, 14.0)
    row = times.row(8)
    assert row[2:7] == pytest.approx([10, 11, 12, 13, 14], rel=0.01)
    assert row[1] == pytest.approx(row[2] * linear(1) / linear(2))
    assert row[8] == pytest.approx(row[6] * linear(8) / linear(6))


def test_one_time_far_off_says_little() -> None:
    times = Times(linear)
    times.learn(1, 1.0)
    times.learn(2, 50.0)
    assert times.row(2)[2] < 1.2


def test_a_clock_that_stood_still_says_nothing() -> None:
    times = Times(linear)
    times.learn(1, 0.0)
    assert not times
    times.learn(1, 1.0)
    for _ in range(100):
        times.learn(1, 0.0)
    assert times.row(1)[1] == 1.0


def test_what_looked_dear_once_comes_back() -> None:
    times = Times(linear)
    times.learn(1, 1.0)
    for _ in range(20):
        times.learn(6, 4.0)
    assert times.row(6)[6] > 1.5
    for _ in range(100):
        times.learn(1, 1.0)
        times.end_lesson()
    assert times.row(6)[6] < 1.3


def test_times_that_vary_are_learnt_in_the_mean() -> None:
    """Of widths that cost 1 to 2, with moments that are far off."""
    rng = random.Random(0)
    times = Times(linear)
    for step in range(4000):
        width = rng.choice([1, 1, 6, 9])
        noise = 3.0 if rng.random() < 0.02 else rng.gauss(1.0, 0.05)
        times.learn(width, noise * (1 + width / 9))
        if step % 8 == 0:
            times.end_lesson()
    row = times.row(9)
    assert row == sorted(row)
    assert row[9] / row[1] == pytest.approx(1.8, rel=0.05)
