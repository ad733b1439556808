"""What something takes, by a count, in units of the machine's speed at that moment.

Machines that others use too slow down and recover as a whole: a lesson first finds out how fast
this one is, from all its steps, and what they took counts in terms of that. A count that was hardly
seen leans on its neighbours, and one that looks dear is tried less and would never be corrected, so
what was not seen for a while comes back to a guess.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from outrider.policy.costs import rising

_RATE = 0.06  # of the difference to what is known that one time corrects, in the long run ...
_FIRST = 2.0  # ... and at first as if the guess had been seen so often
_MOST_ERROR = 0.25  # of a time, relative: what is further off is a moment's, not the count's
_FADE = 0.04  # of the difference to the guess, for each lesson without news of a count


class Times:
    def __init__(self, shape: Callable[[int], float]) -> None:
        """`shape`: times by count as they are guessed, up to a factor."""
        self._shape = shape
        self._seen: dict[int, tuple[float, float]] = {}  # what it takes, and how often it was seen
        self._news: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._seen)

    def learn(self, count: int, time: float) -> None:
        if time <= 0.0:
            return
        known, number = self._seen.get(count) or (self.row(count)[count], _FIRST)
        if not self._seen:
            known = time
        error = max(-_MOST_ERROR, min(time / known - 1.0, _MOST_ERROR)) if known else 0.0
        rate = max(_RATE, 1.0 / (number + 1.0))
        self._seen[count] = known * (1.0 + rate * error), number + 1.0
        self._news.add(count)

    def end_lesson(self) -> None:
        known = sorted(self._seen)
        for left, count in pairwise(known):
            if count not in self._news:
                time, number = self._seen[count]
                guess = self._seen[left][0] * self._shape(count) / self._shape(left)
                self._seen[count] = time + _FADE * min(0.0, guess - time), number
        self._news.clear()

    def row(self, most: int) -> list[float]:
        """Times for counts 0..most, never falling: straight lines between what is known, guesses
        around it; zeros while nothing is."""
        if not self._seen:
            return [0.0] * (most + 1)
        known = [(count, time) for count, (time, _) in sorted(self._seen.items())]
        (first, first_s), (last, last_s) = known[0], known[-1]
        row = [first_s * self._shape(n) / self._shape(first) for n in range(first)]
        for (left, left_s), (right, right_s) in pairwise(known):
            slope = (right_s - left_s) / (right - left)
            row += [left_s + slope * (n - left) for n in range(left, right)]
        row += [last_s * self._shape(n) / self._shape(last) for n in range(last, most + 1)]
        return rising(row)
