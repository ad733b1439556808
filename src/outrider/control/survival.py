"""How far drafts survive: decayed acceptance, per request, on a shared prior.

Agreement comes in runs. For a chain the estimate is therefore how often a draft holds by how many
before it did in a row, those of earlier drafts included. Counted by the place in its draft it would
depend on how long drafts are: a long one takes a whole run and the next begins behind a refusal,
a short one begins in the middle of a run as well, and each would be judged by the beginnings of the
other. What drafts of k are worth follows from these rates for every k (`accepted`). A rate that
was never seen leans on the one before, and a request that collapses at its first token needs no
news about the tenth. For a tree the estimate is each node's share of being on the accepted path,
largest first: the n best nodes are what a drafter with a budget of n would have kept.

A request starts from what its proposer achieved lately for everybody (the prior) and leaves it as
its own evidence grows. Estimates depend on finished steps only, never on the draft under way, so a
budget made of them is fit for the ratio rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from outrider.control import MAX_AUTO_DRAFT_TOKENS

START = 0.7  # acceptance of a proposer nobody has seen yet: worth trying
NEXT_NODE = 0.9  # a tree's unseen node in terms of the one before it
RARE = 0.02  # what is less likely is not followed further: beginnings, and the end of a run
NUM_AGES = 5  # of a run, that are told apart
HORIZON = 10.0  # steps that an estimate is about, as many as a decision stands for
PRIOR_WEIGHT = 5.0  # of the prior about the first node, in drafts; ...
DEEPER_WEIGHT = 16.0  # ... about the others, of which less is seen, and they differ less
OWN_DECAY = 0.97  # a request's memory: about 33 drafts
SHARED_DECAY = 0.99  # a proposer's: about 100
LEAST_EVIDENCE = 12.0  # what a request remembers of its own, however long ago

Draft = tuple[int, int, Sequence[int], bool]  # nodes allowed, drafted and accepted; is it a tree


def accepted(rates: Sequence[float], most: int, in_run: bool = False) -> list[float]:
    """[k]: tokens that drafts of k are expected to add to a step, k up to `most`.

    `rates[a]`: that a draft holds which `a` before it did, in a row; the last stands for all that
    are older. A draft begins at 0 behind a refusal; where all of k held, and behind them came the
    target's own token, the next begins k + 1 further on. `in_run`: it has begun far on by now.
    """
    oldest = len(rates) - 1
    reach, summed = [1.0], [0.0]  # that a run gets as far, and how much of it is expected by then
    for a in range(oldest + most):
        reach.append(reach[a] * max(rates[min(a, oldest)], 1e-9))
        summed.append(summed[a] + reach[-1])
    found = [0.0]
    all_hold, deep = 1.0, 0.0  # of drafts of k that begin far on
    for k in range(1, most + 1):
        all_hold *= rates[-1]
        deep += all_hold
        stay = 1.0 / max(1.0 - all_hold, RARE)  # steps that a run lasts from there
        age, visits, steps, tokens = 0, 1.0, 0.0, 0.0
        while age < oldest and visits > RARE:
            here, there = reach[age], age + k
            steps += visits
            tokens += visits * (summed[there] - summed[age]) / here
            visits *= reach[there] / here
            age = there + 1
        steps += visits * stay
        tokens += visits * stay * deep
        rate = tokens / steps
        if in_run:
            rate += min(1.0, stay / HORIZON) * (deep - rate)
        found.append(rate)
    return found


def _worth(
    rates: Sequence[float], most: int, in_run: bool = False
) -> tuple[list[float], list[float]]:
    """What drafts of 0..`most` add, and what each token of the longest does, falling."""
    totals = accepted(rates, most, in_run)
    return totals, list(accumulate([b - a for a, b in pairwise(totals)], min))


class _Evidence:
    """Decayed counts by node, or by age in a run: how often one was judged, and how often kept.

    `unit`: what a draft of now counts; it grows where all that is older would shrink.
    `fill` is the share of its budget that a proposer uses: n-gram look-up often finds nothing.
    """

    __slots__ = ("_decay", "_drawn", "_judged", "_kept", "fill", "is_tree", "unit", "version")

    def __init__(self, size: int, decay: float, fill: float, is_tree: bool) -> None:
        self._decay = decay
        self._judged = [0.0] * size
        self._kept = [0.0] * size
        self.unit = 1.0
        self.fill = fill
        self.is_tree = is_tree
        self.version = 1  # of the counts, ...
        self._drawn = (0, 0)  # ... and which one was last brought up to date, on which prior

    def count(self, drafts: Iterable[Draft], age: int) -> int:
        """Returns how many tokens held in a row behind the last of `drafts`, `age` before them."""
        judged, kept, unit, decay, fill = (
            self._judged, self._kept, self.unit, self._decay, self.fill
        )  # fmt: skip
        size, oldest = len(judged), NUM_AGES - 1
        self.version += 1
        for budget, num_drafted, path, is_tree in drafts:
            length = len(path)
            fill += (1.0 - decay) * (num_drafted / budget - fill)
            if is_tree or self.is_tree:
                self.is_tree = True
                on_path = set(path)
                for j in range(min(num_drafted, size)):
                    judged[j] += unit
                    kept[j] += unit if j in on_path else 0.0
            else:
                held, end = age + length, age + min(length + 1, num_drafted)  # ends at a refusal
                place = age
                while place < end and place < oldest:
                    judged[place] += unit
                    if place < held:
                        kept[place] += unit
                    place += 1
                if place < end:
                    judged[oldest] += unit * (end - place)
                    kept[oldest] += unit * (held - place)
            age = age + num_drafted + 1 if 0 < num_drafted == length else 0
            unit /= decay
        self.unit, self.fill = unit, fill
        if unit > 1e9:
            self._judged = [n / unit for n in judged]
            self._kept = [n / unit for n in kept]
            self.unit = 1.0
        return age


class Prior(_Evidence):
    """What a proposer achieved lately, over all requests. `rates` are per node, as counted."""

    __slots__ = ("_worth", "rates")

    def __init__(self, size: int = MAX_AUTO_DRAFT_TOKENS) -> None:
        super().__init__(size, SHARED_DECAY, fill=1.0, is_tree=False)
        self.rates = [START] * size
        self._worth: tuple[list[float], list[float]] | None = None

    def refresh(self) -> None:
        """Brings `rates` up to date.

        Each position leans on the one before, the first on START. A tree's nodes are not drafted
        in the order of their worth: what was left out so far is worth less than all that was not.
        """
        if self._drawn == (self.version, 0):
            return
        self._drawn = (self.version, 0)
        unit = self.unit
        lean, weight, rates, judged = START, PRIOR_WEIGHT * unit, self.rates, self._judged
        for j, kept in enumerate(self._kept):
            rate = rates[j] = (kept + weight * lean) / (judged[j] + weight)
            weight = DEEPER_WEIGHT * unit
            lean = NEXT_NODE * min(lean, rate) if self.is_tree else rate
        self._worth = None

    @property
    def worth(self) -> tuple[list[float], list[float]]:
        """What a chain of a request is that has shown nothing yet."""
        if self._worth is None:
            self._worth = _worth(self.rates[:NUM_AGES], len(self.rates))
        return self._worth


class Survival(_Evidence):
    """One request. `totals[k]`: what drafts of k are expected to add to a step; `curve[k]`: what
    node k + 1 of a draft does, falling. `age`: how many tokens before its next draft held in a row.
    """

    __slots__ = ("age", "curve", "prior", "totals")

    def __init__(self, prior: Prior) -> None:
        super().__init__(len(prior.rates), OWN_DECAY, prior.fill, prior.is_tree)
        self.prior = prior
        self.totals, self.curve = prior.worth
        self.age = 0

    def observe(self, drafts: Sequence[Draft]) -> None:
        """What became of drafts, in their order. Tells the prior too.

        Only counts: `refresh` before the curve is read.
        """
        self.prior.count(drafts, self.age)
        self.age = self.count(drafts, self.age)

    def fade(self, share: float) -> None:
        """Trusts old evidence less, so that a few new drafts can overrule it."""
        most = max(self._judged) / self.unit
        if most > LEAST_EVIDENCE:
            self.version += 1
            self.unit /= max(share, LEAST_EVIDENCE / most)

    def refresh(self) -> None:
        """Brings `curve` up to date with the counts and the prior's `rates`, refreshed before."""
        now = (self.version, self.prior.version)
        if self._drawn == now:
            return
        self._drawn = now
        if self.version == 1 and not self.is_tree:  # nothing of its own: as everybody
            self.totals, self.curve = self.prior.worth
            return
        rates, judged, kept = self.prior.rates, self._judged, self._kept
        weight, size = PRIOR_WEIGHT * self.unit, len(rates)
        if self.is_tree:
            own = [(kept[j] + weight * rates[j]) / (judged[j] + weight) for j in range(size)]
            self.curve = sorted(own, reverse=True)
            self.totals = [0.0, *accumulate(self.curve)]
            return
        own, otherness = [], 1.0  # who differs at one age does at the next
        for j in range(NUM_AGES):
            lean = min(1.0, otherness * rates[j])
            rate = (kept[j] + weight * lean) / (judged[j] + weight)
            own.append(rate)
            otherness = rate / rates[j]
            weight = DEEPER_WEIGHT * self.unit
        self.totals, self.curve = _worth(own, size, self.age > 0)
