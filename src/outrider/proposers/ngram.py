"""Prompt lookup: find the text's ending earlier in the text and copy what came next.

No second model and nothing to train: it pays wherever the output repeats its context (editing,
summaries with quotes, code, structured data). A step costs a few dictionary look-ups, whatever
the length of the context.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.proposers._ngram_index import NgramIndex, copy_from, up_to_finish
from outrider.proposers._options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Endings of `max_n` tokens are tried first, shorter ones down to `min_n`.

    One-token endings find something almost always and are mostly wrong: they pay only where
    verification is nearly free. Beyond four tokens the match hardly gets any better.
    """

    min_n: int = 2
    max_n: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(
                f"ngram needs 1 <= min_n <= max_n, not min_n={self.min_n}, max_n={self.max_n}"
            )


class NgramProposer:
    """Copies the continuation of the longest suffix that occurred before; the latest one wins."""

    name = "ngram"
    draws = frozenset({Draw.DETERMINISTIC})
    trees = False
    needs = Needs()

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self._indexes: dict[int, NgramIndex] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> NgramProposer:
        return cls(read_options(NgramConfig, cls.name, context.options))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [
            Proposal(self._draft(view, budget), source=self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed tokens are taken in when the next draft is asked for."""

    def release(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _draft(self, view: SequenceView, budget: int) -> list[int]:
        index = self._indexes.get(view.id)
        if index is None:
            index = NgramIndex(self.config.min_n, self.config.max_n)
            self._indexes[view.id] = index
        index.extend(view.tokens)
        start = index.find(view.tokens)
        if start is None:
            return []
        return up_to_finish(copy_from(view.tokens, start, budget), view.finish_ids)
