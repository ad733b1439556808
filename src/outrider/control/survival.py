"""How far drafts survive: decayed acceptance per position, per request, on a shared prior.

For a chain the estimate is the *conditional* acceptance of each position, given that all before it
were accepted; the survival S_k is their product. What a short draft never showed is then filled in
by the position before it, and a request that collapses at its first token needs no news about the
tenth. For a tree it is each node's share of being on the accepted path, largest first: the n best
nodes are what a drafter with a budget of n would have kept.

A request starts from what its proposer achieved lately for everybody (the prior) and leaves it as
its own evidence grows. Estimates depend on finished steps only, never on the draft under way, so a
budget made of them is fit for the ratio rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.control import MAX_AUTO_DRAFT_TOKENS

START = 0.7  # acceptance of a proposer nobody has seen yet: worth trying
NEXT_NODE = 0.9  # a tree's unseen node in terms of the one before it
PRIOR_WEIGHT = 5.0  # of the prior about the first node, in drafts; ...
DEEPER_WEIGHT = 16.0  # ... about the others, of which less is seen, and they differ less
OWN_DECAY = 0.97  # a request's memory: about 33 drafts
SHARED_DECAY = 0.99  # a proposer's: about 100
LEAST_EVIDENCE = 12.0  # what a request remembers of its own, however long ago


class _Evidence:
    """Decayed counts per node: how often it was judged, and how often kept.

    `fill` is the share of its budget that a proposer uses: n-gram look-up often finds nothing.
    """

    __slots__ = ("_decay", "_drawn", "_judged", "_kept", "fill", "is_tree", "version")

    def __init__(self, size: int, decay: float, fill: float, is_tree: bool) -> None:
        self._decay = decay
        self._judged = [0.0] * size
        self._kept = [0.0] * size
        self.fill = fill
        self.is_tree = is_tree
        self.version = 1  # of the counts, ...
        self._drawn = (0, 0)  # ... and which one was last brought up to date, on which prior

    def count(self, budget: int, num_drafted: int, path: Sequence[int], is_tree: bool) -> None:
        decay, judged, kept = self._decay, self._judged, self._kept
        self.version += 1
        self.fill += (1.0 - decay) * (num_drafted / budget - self.fill)
        self.is_tree = self.is_tree or is_tree
        num_drafted = min(num_drafted, len(judged))
        if self.is_tree:
            on_path = set(path)
            for j in range(num_drafted):
                judged[j] = judged[j] * decay + 1.0
                kept[j] = kept[j] * decay + (1.0 if j in on_path else 0.0)
            return
        length = len(path)
        for j in range(min(length + 1, num_drafted)):  # the first refusal ends the trial
            judged[j] = judged[j] * decay + 1.0
            kept[j] = kept[j] * decay + (1.0 if j < length else 0.0)


class Prior(_Evidence):
    """What a proposer achieved lately, over all requests. `rates` are per node, as counted."""

    __slots__ = ("rates",)

    def __init__(self, size: int = MAX_AUTO_DRAFT_TOKENS) -> None:
        super().__init__(size, SHARED_DECAY, fill=1.0, is_tree=False)
        self.rates = [START] * size

    def refresh(self) -> None:
        """Brings `rates` up to date.

        Each position leans on the one before, the first on START. A tree's nodes are not drafted
        in the order of their worth: what was left out so far is worth less than all that was not.
        """
        if self._drawn == (self.version, 0):
            return
        self._drawn = (self.version, 0)
        lean, weight, rates, judged = START, PRIOR_WEIGHT, self.rates, self._judged
        for j, kept in enumerate(self._kept):
            rate = rates[j] = (kept + weight * lean) / (judged[j] + weight)
            weight = DEEPER_WEIGHT
            lean = NEXT_NODE * min(lean, rate) if self.is_tree else rate


class Survival(_Evidence):
    """One request. `curve[k]`: what node k + 1 of its next draft is expected to add; falling."""

    __slots__ = ("curve", "prior")

    def __init__(self, prior: Prior) -> None:
        super().__init__(len(prior.rates), OWN_DECAY, prior.fill, prior.is_tree)
        self.prior = prior
        self.curve = [0.0] * len(prior.rates)

    def observe(self, budget: int, num_drafted: int, path: Sequence[int], is_tree: bool) -> None:
        """What became of a draft of `num_drafted` nodes, `budget` allowed; `path` was accepted.

        Tells the prior too. Only counts: `refresh` before the curve is read.
        """
        self.prior.count(budget, num_drafted, path, is_tree)
        self.count(budget, num_drafted, path, is_tree)

    def fade(self, share: float) -> None:
        """Trusts old evidence less, so that a few new drafts can overrule it."""
        most = self._judged[0]
        if most > LEAST_EVIDENCE:
            self.version += 1
            share = max(share, LEAST_EVIDENCE / most)
            self._judged = [share * n for n in self._judged]
            self._kept = [share * n for n in self._kept]

    def refresh(self) -> None:
        """Brings `curve` up to date with the counts and the prior's `rates`, refreshed before."""
        now = (self.version, self.prior.version)
        if self._drawn == now:
            return
        self._drawn = now
        rates, judged, curve, weight = self.prior.rates, self._judged, self.curve, PRIOR_WEIGHT
        if self.is_tree:
            for j, kept in enumerate(self._kept):
                curve[j] = (kept + weight * rates[j]) / (judged[j] + weight)
            curve.sort(reverse=True)
            return
        survival = 1.0
        for j, kept in enumerate(self._kept):
            survival *= (kept + weight * rates[j]) / (judged[j] + weight)
            curve[j] = survival
            weight = DEEPER_WEIGHT
