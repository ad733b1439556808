"""Drafters that know how sure they are: how far to trust them, and where they had better stop.

A cautious drafter says of every draft at which *level* it was drawn (see `contracts.StopRule`), and
that tells more about the draft than its place, or what became of those before: half of all drafts
hold nearly always, the others every other time. So K need not be guessed. A draft is worth
verifying if its chance of being kept is more than its row costs, in tokens that the same time
brings otherwise (`floors`); it is worth drawing another one if that may well be so again (the
toll). Both follow from the cost tables, and hold for every text at once.

What is learnt: how often drafts of a level hold, for all requests about as hot (`Shared`); by how
much a request differs from that, and what its drafts bring and cost (`Sureness`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from math import exp

from outrider.contracts import LEVEL_STEP, NUM_LEVELS
from outrider.control import MAX_AUTO_DRAFT_TOKENS

MISSES, STEEPNESS = 0.8, 0.7  # a first guess: 1 - MISSES * exp(-STEEPNESS * margin) of drafts hold
GUESS_WEIGHT = 8.0  # of that guess, in drafts
CHANCE_DECAY = 0.9995  # per draft judged: levels that are left out for long return to the guess
FIRST_TAKEN, FIRST_KEPT = 0.75, 0.65  # of the first place; the next ones fall as fast
OWN_DECAY, SHARED_DECAY = 0.97, 0.99  # per step
UNSEEN = 0.1  # steps that one counts as for places behind the last that drafts may reach
PRIOR_WEIGHT = 5.0  # in steps
MISS_WEIGHT = 3.0  # expected refusals that a request's own have to make up for
MOST_FLOORS = 32
TOLL = 3.0  # rounds of drafting that a further one has to bring: most are in vain by then

Outcome = tuple[Seq[int], int, int]  # levels of the drawn tokens, how many were taken, and kept


class _Yields:
    """Decayed counts by place in a draft: how often a token was drawn there, taken, and kept, of
    how many steps that went so far."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.num_steps = [0.0] * MAX_AUTO_DRAFT_TOKENS
        self.counts = [[0.0] * MAX_AUTO_DRAFT_TOKENS for _ in range(3)]

    def count(self, outcomes: Seq[Outcome], most: int) -> None:
        """Of drafts of at most so many: what is known of the places behind gets old, slowly."""
        share = self._decay ** len(outcomes)
        self.fade(share, 0, most)
        self.fade(share**UNSEEN, most)
        self.num_steps[:most] = [n + len(outcomes) for n in self.num_steps[:most]]
        ends = [[0] * (MAX_AUTO_DRAFT_TOKENS + 1) for _ in range(3)]  # how many were so long
        drawn, taken, kept = ends
        for levels, num_taken, num_kept in outcomes:
            drawn[len(levels)] += 1
            taken[num_taken] += 1
            kept[num_kept] += 1
        for counts, lengths in zip(self.counts, ends, strict=True):
            longer = 0
            for place in reversed(range(MAX_AUTO_DRAFT_TOKENS)):
                longer += lengths[place + 1]
                counts[place] += longer

    def fade(self, share: float, start: int = 0, stop: int = MAX_AUTO_DRAFT_TOKENS) -> None:
        for counts in [self.num_steps, *self.counts]:
            counts[start:stop] = [share * n for n in counts[start:stop]]

    def means(self, lean: Seq[Seq[float]]) -> list[list[float]]:
        """Leaning on others with the weight of some steps."""
        return [
            [
                (n + PRIOR_WEIGHT * m) / (num_steps + PRIOR_WEIGHT)
                for n, m, num_steps in zip(counts, means, self.num_steps, strict=True)
            ]
            for counts, means in zip(self.counts, lean, strict=True)
        ]


class Shared:
    """What is known of a proposer's drafts for all requests about as hot."""

    def __init__(self) -> None:
        self.version = 1
        self.yields = _Yields(SHARED_DECAY)
        places = range(MAX_AUTO_DRAFT_TOKENS)
        self._first = [
            [FIRST_TAKEN**place for place in places],
            [FIRST_TAKEN ** (place + 1) for place in places],
            [FIRST_KEPT ** (place + 1) for place in places],
        ]
        margins = [LEVEL_STEP * (level + 0.5) for level in range(NUM_LEVELS)]
        self._guess = [1.0 - MISSES * exp(-STEEPNESS * margin) for margin in margins]
        self._judged = [0.0] * NUM_LEVELS
        self._held = [0.0] * NUM_LEVELS
        self._drawn = 0  # the version of what follows
        self.chances: list[float] = self._guess
        self.refresh()
        self.newcomer = Sureness(self)  # a request that has shown nothing yet

    def judge(self, outcomes: Seq[Outcome]) -> tuple[float, int]:
        """Learns how often levels hold; returns the refusals expected here, and those that came."""
        chances, judged, held = self.chances, self._judged, self._held
        expected, refused, num_judged = 0.0, 0, 0
        for levels, num_taken, num_kept in outcomes:
            for level in levels[:num_kept]:
                judged[level] += 1.0
                held[level] += 1.0
                expected += 1.0 - chances[level]
            num_judged += num_kept
            if num_kept < num_taken:
                level = levels[num_kept]
                judged[level] += 1.0
                expected += 1.0 - chances[level]
                refused += 1
        fade = CHANCE_DECAY ** (num_judged + refused)
        self._judged = [fade * n for n in judged]
        self._held = [fade * n for n in held]
        self.version += 1
        return expected, refused

    def refresh(self) -> None:
        if self._drawn == self.version:
            return
        self._drawn = self.version
        self.means = self.yields.means(self._first)
        self.totals = _totals(self.means)
        self.chances = [
            (held + GUESS_WEIGHT * guess) / (judged + GUESS_WEIGHT)
            for held, judged, guess in zip(self._held, self._judged, self._guess, strict=True)
        ]


class Sureness:
    """One request. Of drafts of at most k: `kept[k]`, what they are expected to add to a step;
    `taken[k]`, how many of them are verified; `drawn[k]`, in how many rounds it takes part.
    `chances[level]`: how often its drafts hold.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._yields = _Yields(OWN_DECAY)
        self._expected = self._refused = MISS_WEIGHT
        self._version, self._drawn = 1, (0, 0)
        self.refresh()

    def observe(self, outcomes: Seq[Outcome], most: int) -> None:
        """What became of drafts of at most so many; 0: of a drafter that never stopped by itself,
        which says nothing of yields."""
        expected, refused = self.shared.judge(outcomes)
        share = OWN_DECAY ** len(outcomes)
        self._expected = MISS_WEIGHT + share * (self._expected - MISS_WEIGHT) + expected
        self._refused = MISS_WEIGHT + share * (self._refused - MISS_WEIGHT) + refused
        if most:
            self.shared.yields.count(outcomes, most)
            self._yields.count(outcomes, most)
        self._version += 1

    def fade(self, share: float) -> None:
        """Trusts old evidence less."""
        self._yields.fade(share)
        self._expected = MISS_WEIGHT + share * (self._expected - MISS_WEIGHT)
        self._refused = MISS_WEIGHT + share * (self._refused - MISS_WEIGHT)
        self._version += 1

    def refresh(self) -> None:
        self.shared.refresh()
        now = (self._version, self.shared.version)
        if self._drawn == now:
            return
        self._drawn = now
        if self._version == 1:  # nothing of its own: as everybody
            self.drawn, self.taken, self.kept = self.shared.totals
            self.survival, self.chances = self.shared.means[2], self.shared.chances
            return
        means = self._yields.means(self.shared.means)
        self.drawn, self.taken, self.kept = _totals(means)
        self.survival = means[2]
        unlike = self._refused / self._expected
        self.chances = [max(0.0, 1.0 - unlike * (1.0 - c)) for c in self.shared.chances]


def _totals(means: list[list[float]]) -> list[list[float]]:
    """[k]: of the first k places."""
    return [[0.0, *accumulate(some)] for some in means]


def floors(row: Seq[float], start: int, rate: float) -> list[float]:
    """[n]: the least chance with which draft n + 1 of a pass pays, where time brings `rate`.

    `row[w]`: what a pass over w tokens takes; `start` of them are no drafts. A cliff counts for all
    that comes before it to the last place where the pass was as cheap: prices never fall.
    """
    hull = [start]  # the corners from below
    for w in range(start + 1, min(len(row), start + MOST_FLOORS + 1)):
        while len(hull) > 1 and _slope(row, hull[-2], hull[-1]) >= _slope(row, hull[-1], w):
            hull.pop()
        hull.append(w)
    found = []
    for left, right in pairwise(hull):
        found += [rate * _slope(row, left, right)] * (right - left)
    return found


def _slope(row: Seq[float], left: int, right: int) -> float:
    return (row[right] - row[left]) / (right - left)
