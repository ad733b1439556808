"""How many drafted tokens the target accepts: decayed counts per request, on a shared prior.

Agreement comes in runs. So a chain's estimate is by *age*: how often a draft is accepted after `a`
accepted ones in a row, those of earlier steps included. Counted by position in the draft it would
depend on how long drafts are: a long draft takes a whole run and the next starts after a refusal, a
short one also starts in the middle of a run. What K drafts are worth follows from these rates for
every K (`expected_accepted`). A tree's estimate is each node's share of being on the accepted path,
largest first: the n best nodes are what a drafter with a budget of n would have kept.

A request starts from what its proposer achieved lately at about its temperature (the prior) and
leaves it as its own evidence grows. Estimates depend on finished steps only, so budgets made of
them keep the ratio rules exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import sqrt

from outrider.policy import MAX_AUTO_DRAFT_TOKENS, MEMORY, VALID_STEPS

START = 0.7  # acceptance of an unknown proposer: high enough to be tried
PRIOR_WEIGHT = 5.0  # of the prior, in drafts: a request differs from it after some steps
OWN_DECAY = 0.97  # per draft of a request: it remembers about 33, as texts change
NUM_AGES = 5  # distinct ages of a run; older drafts are accepted alike

RARE = 0.02  # probability below which a run is not followed further: it would change nothing

Draft = tuple[int, int, Sequence[int], bool]  # budget, nodes drafted, accepted path, is it a tree


def temperature_bucket(temperature: float) -> int:
    """Requests whose acceptance is comparable: greedy ones, then half a unit each, up to 1.5."""
    return 0 if temperature == 0.0 else 1 + min(3, int(2.0 * temperature))


def expected_accepted(rates: Sequence[float], most: int, in_run: bool = False) -> list[float]:
    """[k]: accepted tokens that k drafts add to a step, k up to `most`.

    `rates[a]`: acceptance after `a` accepted ones in a row; the last one holds for all older ages.
    A draft starts at age 0 after a refusal. After k accepted drafts and the bonus token, the next
    one starts k + 1 further on. `in_run`: the present run has begun.
    """
    oldest = len(rates) - 1
    reach, summed = [1.0], [0.0]  # probability that a run gets as far; accepted tokens by then
    for a in range(oldest + most):
        reach.append(reach[a] * max(rates[min(a, oldest)], 1e-9))
        summed.append(summed[a] + reach[-1])
    found = [0.0]
    all_accepted, deep = 1.0, 0.0  # of k drafts that start at the oldest age
    for k in range(1, most + 1):
        all_accepted *= rates[-1]
        deep += all_accepted
        stay = 1.0 / max(1.0 - all_accepted, RARE)  # steps that a run lasts from there
        age, visits, steps, tokens = 0, 1.0, 0.0, 0.0
        while age < oldest and visits > RARE:
            here, there = reach[age], age + k
            steps += visits
            tokens += visits * (summed[there] - summed[age]) / here
            visits *= reach[there] / here
            age = there + 1
        steps += visits * stay
        tokens += visits * stay * deep
        mean = tokens / steps
        if in_run:
            mean += min(1.0, stay / VALID_STEPS) * (deep - mean)
        found.append(mean)
    return found


def _chain(
    rates: Sequence[float], most: int, in_run: bool = False
) -> tuple[list[float], list[float]]:
    """Expected tokens of 0..`most` drafts, and what each further draft adds, falling."""
    totals = expected_accepted(rates, most, in_run)
    return totals, list(accumulate([b - a for a, b in pairwise(totals)], min))


class _Evidence:
    """Decayed counts by tree node, or by age in a run: how many drafts were judged and accepted.

    `unit`: the count of a new draft. It grows, so that older counts need not be multiplied.
    `fill`: the share of its budget that a proposer uses; look-ups often find nothing.
    """

    def __init__(self, size: int, decay: float, fill: float, is_tree: bool) -> None:
        self._decay = decay
        self._judged = [0.0] * size
        self._accepted = [0.0] * size
        self.unit = 1.0
        self.fill = fill
        self.is_tree = is_tree
        self.version = 1  # of the counts
        self._refreshed = (0, 0)  # versions of own counts and prior at the last refresh

    def count(self, drafts: Iterable[Draft], age: int) -> int:
        """`age`: accepted tokens in a row before the first draft; returns those after the last."""
        judged, accepted = self._judged, self._accepted
        size, oldest = len(judged), NUM_AGES - 1
        self.version += 1
        for budget, num_drafted, path, is_tree in drafts:
            unit, length = self.unit, len(path)
            self.fill += (1.0 - self._decay) * (num_drafted / budget - self.fill)
            if is_tree or self.is_tree:
                self.is_tree = True
                on_path = set(path)
                for j in range(min(num_drafted, size)):
                    judged[j] += unit
                    accepted[j] += unit if j in on_path else 0.0
            else:
                stop, end = age + length, age + min(length + 1, num_drafted)  # ends at a refusal
                for place in range(age, min(end, oldest)):
                    judged[place] += unit
                    accepted[place] += unit if place < stop else 0.0
                first_old = max(age, oldest)
                if first_old < end:
                    judged[oldest] += unit * (end - first_old)
                    accepted[oldest] += unit * max(0, stop - first_old)
            age = age + num_drafted + 1 if 0 < num_drafted == length else 0
            if num_drafted:  # a look-up that finds nothing is no evidence
                self.unit /= self._decay
        if self.unit > 1e9:
            self._judged = [n / self.unit for n in judged]
            self._accepted = [n / self.unit for n in accepted]
            self.unit = 1.0
        return age


def _weight(place: int) -> float:
    """Of what an estimate leans on: fewer drafts reach later places, and these differ less."""
    return PRIOR_WEIGHT * sqrt(1 + place)


class Prior(_Evidence):
    """What a proposer achieved lately at one temperature, over all requests.

    `rates`: per node or age. `chain`: the estimate for a request without evidence of its own.
    """

    def __init__(self, size: int = MAX_AUTO_DRAFT_TOKENS) -> None:
        super().__init__(size, MEMORY, fill=1.0, is_tree=False)
        self.rates = [START] * size
        self._chain: tuple[list[float], list[float]] | None = None

    def refresh(self) -> None:
        """Each place leans on the one before, the first on START.

        A tree's nodes are not drafted best first, so one that was not drafted so far is worth less
        than all that were.
        """
        if self._refreshed == (self.version, 0):
            return
        self._refreshed = (self.version, 0)
        lean = START
        for j, accepted in enumerate(self._accepted):
            weight = _weight(j) * self.unit
            rate = self.rates[j] = (accepted + weight * lean) / (self._judged[j] + weight)
            lean = 0.9 * min(lean, rate) if self.is_tree else rate
        self._chain = None

    @property
    def chain(self) -> tuple[list[float], list[float]]:
        if self._chain is None:
            self._chain = _chain(self.rates[:NUM_AGES], len(self.rates))
        return self._chain


class Acceptance(_Evidence):
    """One request. `totals[k]`: expected accepted tokens of k drafts; `curve[k]`: what draft k + 1
    adds, falling. `age`: accepted tokens in a row before its next draft.
    """

    def __init__(self, prior: Prior) -> None:
        super().__init__(len(prior.rates), OWN_DECAY, prior.fill, prior.is_tree)
        self.prior = prior
        self.totals, self.curve = prior.chain
        self.age = 0

    def observe(self, drafts: Sequence[Draft]) -> None:
        """What became of drafts, in their order; the prior learns, too. Call `refresh` later."""
        self.prior.count(drafts, self.age)
        self.age = self.count(drafts, self.age)

    def fade(self, share: float) -> None:
        """Trusts old evidence less, but not less than the prior."""
        most = max(self._judged) / self.unit
        if most > PRIOR_WEIGHT:
            self.version += 1
            self.unit /= max(share, PRIOR_WEIGHT / most)

    def refresh(self) -> None:
        """Brings `totals` and `curve` up to date."""
        self.prior.refresh()
        now = (self.version, self.prior.version)
        if self._refreshed == now:
            return
        self._refreshed = now
        if self.version == 1 and not self.is_tree:
            self.totals, self.curve = self.prior.chain
            return
        rates, judged, accepted = self.prior.rates, self._judged, self._accepted
        size = len(rates)
        if self.is_tree:
            weight = PRIOR_WEIGHT * self.unit
            own = [(accepted[j] + weight * rates[j]) / (judged[j] + weight) for j in range(size)]
            self.curve = sorted(own, reverse=True)
            self.totals = [0.0, *accumulate(self.curve)]
            return
        own, ratio = [], 1.0  # a request that differs at one age differs at the next
        for j in range(NUM_AGES):
            lean, weight = min(1.0, ratio * rates[j]), _weight(j) * self.unit
            rate = (accepted[j] + weight * lean) / (judged[j] + weight)
            own.append(rate)
            ratio = rate / rates[j]
        self.totals, self.curve = _chain(own, size, self.age > 0)
