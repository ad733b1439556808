"""Prompt lookup: find the text's ending earlier in the text and copy what came next.

No second model and nothing to train: it pays wherever the output repeats its context (editing,
summaries with quotes, code, structured data). A step costs a few dictionary look-ups, whatever
the length of the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.contracts import ProposerContext, SequenceView
from outrider.proposers._lookup import LookupProposer, check_lookup
from outrider.proposers._ngram_index import (
    NgramIndex,
    copy_from,
    match_length,
    trusted_length,
    up_to_finish,
)
from outrider.proposers._options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Endings of `max_n` tokens are tried first, shorter ones down to `min_n`.

    Beyond four tokens the place hardly gets any better; how far the text agrees with it decides
    how much is copied, times `factor`.
    """

    min_n: int = 1
    max_n: int = 4
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_lookup("ngram", self.min_n, self.max_n, self.factor)


class NgramProposer(LookupProposer):
    """Copies the continuation of the longest suffix that occurred before; the latest one wins."""

    name = "ngram"

    def __init__(self, config: NgramConfig | None = None) -> None:
        self.config = config or NgramConfig()
        self._indexes: dict[int, NgramIndex] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> NgramProposer:
        return cls(read_options(NgramConfig, cls.name, context.options))

    def release(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _draft(self, view: SequenceView, budget: int, *, trust: bool = False) -> list[int]:
        index = self._indexes.get(view.id)
        if index is None:
            index = NgramIndex(self.config.min_n, self.config.max_n)
            self._indexes[view.id] = index
        index.extend(view.tokens)
        start = index.find(view.tokens)
        if start is None:
            return []
        if not trust:
            trusted = trusted_length(match_length(view.tokens, start), self.config.factor)
            budget = min(budget, trusted)
        return up_to_finish(copy_from(view.tokens, start, budget), view.finish_ids)
