"""The base of look-ups: proposers whose drafts are a function of the text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    SequenceView,
)
from outrider.draft_plans import DraftPlan, Lookup, Propose
from outrider.errors import ConfigError
from outrider.native.lookup import NativeLookup


@dataclass(slots=True)
class Draft:
    """A tree of continuations (a chain: no parents).

    Depth first, the most probable child directly after its node: if the target accepts these, their
    K/V need not be moved.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None


class Index(Protocol):
    """An index of a text: looks up its ending."""

    @property
    def num_tokens(self) -> int: ...

    def draft(self, tokens: Seq[int], budget: int) -> Draft:
        """Adds `tokens` to the text; returns a draft of its continuation."""
        ...


class _Reader(NamedTuple):
    """One sequence: its own index, and the length of its text at its first draft."""

    view: SequenceView
    own: Index
    num_returning: int  # the prompt; more after a preemption


class LookupProposer(ABC):
    """Subclasses define `name`, `trees`, `_draft` and `release`."""

    name: str
    trees: bool
    draws = frozenset({Draw.DETERMINISTIC})
    needs = Needs(every_step=False)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = []
        for view, budget in zip(views, budgets, strict=True):
            draft = self._draft(view, budget)
            proposals.append(Proposal(draft.tokens, draft.parents, source=self.name))
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:  # noqa: B027
        """Nothing to do: the next draft reads the committed tokens."""

    @abstractmethod
    def _draft(self, view: SequenceView, budget: int) -> Draft: ...

    @abstractmethod
    def release(self, sequence_id: int) -> None: ...


class TextProposer(LookupProposer):
    """Looks up the text's ending in an index of each sequence."""

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}

    @property
    def num_sequences(self) -> int:
        """How many sequences have an index."""
        return len(self._readers)

    def index_of(self, view: SequenceView) -> Index:
        """The sequence's index; it may lack the newest tokens."""
        reader = self._readers.get(view.id)
        if reader is not None and reader.own.num_tokens <= len(view.tokens):
            return reader.own
        # An index longer than the text contains steps that were dropped.
        num_returning = len(view.tokens) if reader is None else reader.num_returning
        index = self._index_for(view)
        self._readers[view.id] = _Reader(view, index, num_returning)
        return index

    def release(self, sequence_id: int) -> None:
        reader = self._readers.pop(sequence_id, None)
        if reader is not None:
            self._forgotten(reader.view, reader.num_returning)

    def native_index(self, view: SequenceView) -> NativeLookup | None:
        """The native index of the sequence's text; None if there is none."""
        index = self.index_of(view)
        if not isinstance(index, NativeLookup):
            return None
        index.extend(view.tokens[index.num_tokens :])
        return index

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        indexes: list[object] = [self.native_index(view) for view in views]
        if None in indexes:
            return Propose()
        return Lookup(self.name, indexes, list(budgets), [range(k + 1) for k in budgets])

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        index = self.index_of(view)
        return index.draft(view.tokens[index.num_tokens :], budget)

    @abstractmethod
    def _index_for(self, view: SequenceView) -> Index: ...

    def _forgotten(self, view: SequenceView, num_returning: int) -> None:
        """Called when a sequence is released."""


def check_lookup(proposer: str, min_n: int, max_n: int, factor: float) -> None:
    """Raises ConfigError for impossible n-gram lengths or an impossible factor."""
    if not 1 <= min_n <= max_n:
        raise ConfigError(f"{proposer} needs 1 <= min_n <= max_n, not min_n={min_n}, max_n={max_n}")
    if not factor > 0:
        raise ConfigError(f"{proposer} needs factor > 0, not {factor}")
