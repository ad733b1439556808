"""Drafters that stop by themselves: how far to trust their confidence, and where to stop them.

Such a drafter gives every draft a *level* (see `contracts.StopRule`), which tells more about the
draft than its position: half of all drafts are accepted nearly always, the others every other time.
So K need not be guessed. A draft is worth verifying if its chance of acceptance exceeds the cost of
its row, in tokens that the same time gives otherwise (`floors`), and worth drawing if the next one
may be so again (the toll). Both follow from the cost tables.

Learnt are the acceptance of each level, for all requests at about one temperature (`Levels`); and
per request its ratio to that, and what its drafts add and cost (`Confidence`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from math import exp
from operator import add

from outrider.contracts import LEVEL_STEP, NUM_LEVELS
from outrider.policy import MAX_AUTO_DRAFT_TOKENS, MEMORY
from outrider.policy.acceptance import OWN_DECAY, PRIOR_WEIGHT, START

TOLL = 1.5  # drafting rounds that one more round has to bring: a third of the next are refused

Outcome = tuple[Seq[int], int, int]  # levels of the drawn tokens; how many were verified, accepted


class _Yields:
    """Decayed shares of steps, by position in a draft: drawn, verified and accepted there."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.num_steps = [0.0] * MAX_AUTO_DRAFT_TOKENS
        self.counts = [[0.0] * MAX_AUTO_DRAFT_TOKENS for _ in range(3)]

    def count(self, num_steps: int, reached: Seq[Seq[int]], most: int) -> None:
        """Of drafts of at most `most`: of later positions less and less is known."""
        self.fade(self._decay**num_steps)
        self.num_steps[:most] = [n + num_steps for n in self.num_steps[:most]]
        for counts, more in zip(self.counts, reached, strict=True):
            counts[:] = map(add, counts, more)

    def fade(self, share: float) -> None:
        for counts in [self.num_steps, *self.counts]:
            counts[:] = [share * n for n in counts]

    def means(self, prior: Seq[Seq[float]]) -> list[list[float]]:
        return [
            [
                (n + PRIOR_WEIGHT * mean) / (num_steps + PRIOR_WEIGHT)
                for n, mean, num_steps in zip(counts, means, self.num_steps, strict=True)
            ]
            for counts, means in zip(self.counts, prior, strict=True)
        ]


def _reached(outcomes: Seq[Outcome]) -> list[list[int]]:
    """By position: how many of the steps drew, verified and accepted a draft there."""
    lengths: list[list[int]] = [[0] * (MAX_AUTO_DRAFT_TOKENS + 1) for _ in range(3)]
    for levels, num_verified, num_accepted in outcomes:
        lengths[0][len(levels)] += 1
        lengths[1][num_verified] += 1
        lengths[2][num_accepted] += 1
    return [list(accumulate(ends[:0:-1]))[::-1] for ends in lengths]


class Levels:
    """What a proposer's confidence is worth at one temperature, over all requests."""

    def __init__(self) -> None:
        self.version = 1
        self.yields = _Yields(MEMORY)
        places = range(MAX_AUTO_DRAFT_TOKENS)
        self._start = [
            [START**place for place in places],
            [START ** (place + 1) for place in places],
            [(0.9 * START) ** (place + 1) for place in places],
        ]
        margins = [LEVEL_STEP * (level + 0.5) for level in range(NUM_LEVELS)]
        self._guess = [1.0 - exp(-margin) for margin in margins]
        self._judged = [0.0] * NUM_LEVELS
        self._accepted = [0.0] * NUM_LEVELS
        self._refreshed = 0
        self.chances: list[float] = self._guess
        self.refresh()
        self.newcomer = Confidence(self)  # the estimates of a request without evidence

    def judge(self, outcomes: Seq[Outcome]) -> tuple[float, int]:
        """Learns the levels' acceptance; returns the refusals expected and those that came."""
        chances, judged, accepted = self.chances, self._judged, self._accepted
        expected, refused, num_judged = 0.0, 0, 0
        for levels, num_verified, num_accepted in outcomes:
            for level in levels[:num_accepted]:
                judged[level] += 1.0
                accepted[level] += 1.0
                expected += 1.0 - chances[level]
            num_judged += num_accepted
            if num_accepted < num_verified:
                level = levels[num_accepted]
                judged[level] += 1.0
                expected += 1.0 - chances[level]
                refused += 1
        # Levels that are left out for long return to the guess.
        fade = MEMORY ** ((num_judged + refused) / MAX_AUTO_DRAFT_TOKENS)
        self._judged = [fade * n for n in judged]
        self._accepted = [fade * n for n in accepted]
        self.version += 1
        return expected, refused

    def refresh(self) -> None:
        if self._refreshed == self.version:
            return
        self._refreshed = self.version
        self.means = self.yields.means(self._start)
        self.totals = _totals(self.means)
        self.chances = [
            (accepted + PRIOR_WEIGHT * guess) / (judged + PRIOR_WEIGHT)
            for accepted, judged, guess in zip(
                self._accepted, self._judged, self._guess, strict=True
            )
        ]


class Confidence:
    """One request. Of drafts of at most k: `accepted[k]`, tokens that they add to a step;
    `verified[k]`, tokens that they add to the pass; `drawn[k]`, drafting rounds it takes part in.
    `chances[level]`: acceptance of its drafts.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._yields = _Yields(OWN_DECAY)
        self._expected = self._refused = PRIOR_WEIGHT
        self._version, self._refreshed = 1, (0, 0)
        self.refresh()

    def observe(self, outcomes: Seq[Outcome], most: int) -> None:
        """What became of drafts of at most `most`; 0: without floors, which says nothing about
        yields."""
        expected, refused = self.levels.judge(outcomes)
        self._remember(OWN_DECAY ** len(outcomes))
        self._expected += expected
        self._refused += refused
        if most:
            reached = _reached(outcomes)
            for yields in (self.levels.yields, self._yields):
                yields.count(len(outcomes), reached, most)

    def fade(self, share: float) -> None:
        """Trusts old evidence less."""
        self._yields.fade(share)
        self._remember(share)

    def _remember(self, share: float) -> None:
        self._expected = PRIOR_WEIGHT + share * (self._expected - PRIOR_WEIGHT)
        self._refused = PRIOR_WEIGHT + share * (self._refused - PRIOR_WEIGHT)
        self._version += 1

    def refresh(self) -> None:
        self.levels.refresh()
        now = (self._version, self.levels.version)
        if self._refreshed == now:
            return
        self._refreshed = now
        if self._version == 1:
            self.drawn, self.verified, self.accepted = self.levels.totals
            self.curve, self.chances = self.levels.means[2], self.levels.chances
            return
        means = self._yields.means(self.levels.means)
        self.drawn, self.verified, self.accepted = _totals(means)
        self.curve = means[2]
        ratio = self._refused / self._expected
        self.chances = [max(0.0, 1.0 - ratio * (1.0 - c)) for c in self.levels.chances]


def _totals(means: list[list[float]]) -> list[list[float]]:
    """[k]: of the first k positions."""
    return [[0.0, *accumulate(some)] for some in means]


def floors(row: Seq[float], start: int, rate: float) -> list[float]:
    """[n]: the least chance with which draft n + 1 of a pass pays, where a second gives `rate`.

    `row[w]`: seconds of a pass over w tokens, of which `start` are no drafts. A jump of the cost is
    shared by all drafts since the last cheaper count (the lower convex hull): floors never fall.
    Drafts after the first `2 * MAX_AUTO_DRAFT_TOKENS` share the last floor.
    """
    hull = [start]
    for w in range(start + 1, min(len(row), start + 2 * MAX_AUTO_DRAFT_TOKENS + 1)):
        while len(hull) > 1 and _slope(row, hull[-2], hull[-1]) >= _slope(row, hull[-1], w):
            hull.pop()
        hull.append(w)
    found = []
    for left, right in pairwise(hull):
        found += [rate * _slope(row, left, right)] * (right - left)
    return found


def _slope(row: Seq[float], left: int, right: int) -> float:
    return (row[right] - row[left]) / (right - left)
