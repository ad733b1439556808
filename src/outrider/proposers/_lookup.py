"""What look-ups share: drafts that are a function of the text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.contracts import (
    AheadBatch,
    AheadLookup,
    AheadStep,
    Draw,
    Needs,
    Observation,
    Proposal,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.native.lookup import NativeLookup


@dataclass(slots=True)
class Draft:
    """A tree of continuations (a chain: no parents).

    Depth first, the likeliest child of a node right behind it: where the target follows these,
    their K/V lie where they belong.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None


class Index(Protocol):
    """A text by its endings."""

    @property
    def num_tokens(self) -> int: ...

    def draft(self, tokens: Seq[int], budget: int) -> Draft:
        """Takes in `tokens`; how the text goes on."""
        ...


class _Reader(NamedTuple):
    """One sequence: its own text, and how much of it was there when we first saw it."""

    view: SequenceView
    own: Index
    num_returning: int  # the prompt; more after a preemption


class LookupProposer(ABC):
    """Subclasses say `name`, `trees`, `_draft`, `begin_ahead` and `release`."""

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
        """Nothing to do: committed tokens are taken in when the next draft is asked for."""

    @abstractmethod
    def _draft(self, view: SequenceView, budget: int) -> Draft: ...

    @abstractmethod
    def release(self, sequence_id: int) -> None: ...

    def goes_ahead(self, views: Seq[SequenceView]) -> bool:
        return True

    @abstractmethod
    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        """contracts.DraftsAhead."""

    def drafted_ahead(self, view: SequenceView, step: AheadStep, index: int) -> str:
        return self.name

    def end_ahead(self, view: SequenceView) -> None:  # noqa: B027
        """Nothing to do."""


class TextProposer(LookupProposer):
    """Looks the text's ending up in an index of its own."""

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}

    @property
    def num_sequences(self) -> int:
        """How many sequences have an index."""
        return len(self._readers)

    def index_of(self, view: SequenceView) -> Index:
        """It may not have read the newest tokens yet."""
        reader = self._readers.get(view.id)
        if reader is not None and reader.own.num_tokens <= len(view.tokens):
            return reader.own
        # What it read ahead never came, if there was one.
        num_returning = len(view.tokens) if reader is None else reader.num_returning
        index = self._index_for(view)
        self._readers[view.id] = _Reader(view, index, num_returning)
        return index

    def release(self, sequence_id: int) -> None:
        reader = self._readers.pop(sequence_id, None)
        if reader is not None:
            self._forgotten(reader.view, reader.num_returning)

    def ahead_of(self, view: SequenceView) -> NativeLookup | None:
        """The index of all its text, if it can be read while steps are computed ahead."""
        index = self.index_of(view)
        if not isinstance(index, NativeLookup):
            return None
        index.extend(view.tokens[index.num_tokens :])
        return index

    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        batch.lookups = []
        for i, (view, budget) in enumerate(zip(views, batch.num_drafts_S, strict=True)):
            index = self.ahead_of(view) if budget else None
            if budget and index is None:
                return False
            batch.num_drafts_S[i] = 0
            take = range(budget + 1)
            batch.lookups.append(AheadLookup(index, budget, take) if budget else None)
        return True

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        index = self.index_of(view)
        return index.draft(view.tokens[index.num_tokens :], budget)

    @abstractmethod
    def _index_for(self, view: SequenceView) -> Index: ...

    def _forgotten(self, view: SequenceView, num_returning: int) -> None:
        """A sequence is released."""


def check_lookup(proposer: str, min_n: int, max_n: int, factor: float) -> None:
    """Raises ConfigError for n-gram lengths or a factor that cannot work."""
    if not 1 <= min_n <= max_n:
        raise ConfigError(f"{proposer} needs 1 <= min_n <= max_n, not min_n={min_n}, max_n={max_n}")
    if not factor > 0:
        raise ConfigError(f"{proposer} needs factor > 0, not {factor}")
