"""One proposer for tenants whose heads have learnt different weights: one set for each salt."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from torch import Tensor

from outrider.contracts import Observation, Proposal, SequenceView
from outrider.proposers.eagle3 import Eagle3Proposer


class PerSalt:
    """Drafts as `base` does, and by a twin of it for each salt that has weights of its own."""

    def __init__(self, base: Eagle3Proposer) -> None:
        self.name, self.needs = base.name, base.needs
        self.draws, self.trees = base.draws, base.trees
        self._base = base
        self._twins: dict[str, Eagle3Proposer] = {}
        self._owner: dict[int, Eagle3Proposer] = {}  # of each sequence, from its first step on

    def take(self, salt: str, weights: Mapping[str, Tensor] | None) -> None:
        """Sequences with this salt draft by these weights; None: new ones by those of `base`.

        Call it between two steps.
        """
        if weights is None:
            self._twins.pop(salt, None)
            return
        if salt not in self._twins:
            self._twins[salt] = self._base.twin()
        self._twins[salt].replace_weights(weights)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        for owner, members in self._by_owner(views):
            found = owner.propose([views[i] for i in members], [budgets[i] for i in members])
            for i, proposal in zip(members, found, strict=True):
                proposals[i] = proposal
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for owner, members in self._by_owner(views):
            owner.observe([views[i] for i in members], [seen[i] for i in members])

    def release(self, sequence_id: int) -> None:
        owner = self._owner.pop(sequence_id, None)
        if owner is not None:
            owner.release(sequence_id)

    def _by_owner(self, views: Seq[SequenceView]) -> list[tuple[Eagle3Proposer, list[int]]]:
        """A sequence stays with its first owner: another one has no rows of its text."""
        found: dict[int, tuple[Eagle3Proposer, list[int]]] = {}
        for i, view in enumerate(views):
            if view.id not in self._owner:
                self._owner[view.id] = self._twins.get(view.salt, self._base)
            owner = self._owner[view.id]
            found.setdefault(id(owner), (owner, []))[1].append(i)
        return list(found.values())
