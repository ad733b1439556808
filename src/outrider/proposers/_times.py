"""What something takes, by a count, learnt on a machine that others use too.

A busy moment makes a step dear, and nothing makes one cheap: what is faster than expected counts at
once, what is slower only if it goes on. A count that looks dear is tried less and would never be
corrected, so what was not seen for a while comes back to a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from outrider.control.cost import rising

_DOWN = 0.3  # of the difference to a faster time, and ...
_UP = 0.04  # ... to a slower one
_FIRST = 1.5  # times the guess: what the first time of a count is believed at most
_FADE = 0.04  # of the difference to the guess, for each lesson without news of a count


class Times:
    def __init__(self, shape: Callable[[int], float]) -> None:
        """`shape`: times by count as they are guessed, up to a factor."""
        self._shape = shape
        self._seen: dict[int, float] = {}
        self._news: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._seen)

    def learn(self, count: int, seconds: float) -> None:
        known = self._seen.get(count)
        if known is None:
            guess = self.row(count)[count]
            self._seen[count] = min(seconds, _FIRST * guess) if self._seen else seconds
        else:
            self._seen[count] = known + (_DOWN if seconds < known else _UP) * (seconds - known)
        self._news.add(count)

    def end_lesson(self) -> None:
        known = sorted(self._seen)
        for left, count in pairwise(known):
            if count not in self._news:
                guess = self._seen[left] * self._shape(count) / self._shape(left)
                self._seen[count] += _FADE * min(0.0, guess - self._seen[count])
        self._news.clear()

    def row(self, most: int) -> list[float]:
        """Seconds for counts 0..most, never falling: straight lines between what is known, guesses
        around it; zeros while nothing is."""
        if not self._seen:
            return [0.0] * (most + 1)
        known = sorted(self._seen.items())
        (first, first_s), (last, last_s) = known[0], known[-1]
        row = [first_s * self._shape(n) / self._shape(first) for n in range(first)]
        for (left, left_s), (right, right_s) in pairwise(known):
            slope = (right_s - left_s) / (right - left)
            row += [left_s + slope * (n - left) for n in range(left, right)]
        row += [last_s * self._shape(n) / self._shape(last) for n in range(last, most + 1)]
        return rising(row)
