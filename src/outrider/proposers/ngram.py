"""Prompt lookup: find the text's ending earlier in the text and copy what came next.

It needs no second model and no training. It pays if the output repeats its context: editing,
summaries with quotes, code, structured data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider import native
from outrider.contracts import ProposerContext, SequenceView
from outrider.proposers._lookup import Index, TextProposer, check_lookup
from outrider.proposers.ngram_index import (
    MAX_MATCH,
    NativeNgramIndex,
    NgramRule,
    PythonNgramIndex,
    trusted_length,
)
from outrider.proposers.options import read_options

MakeIndex = Callable[[NgramRule, frozenset[int]], Index]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramConfig:
    """Endings of `max_n` tokens are tried first, shorter ones down to `min_n`.

    Longer endings than four tokens hardly improve the match. The length of the match decides how
    much is copied, times `factor`.
    """

    min_n: int = 1
    max_n: int = 4
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_lookup("ngram", self.min_n, self.max_n, self.factor)


class NgramProposer(TextProposer):
    """Copies the continuation of the longest suffix that occurred before; the latest one wins."""

    name = "ngram"
    trees = False

    def __init__(
        self,
        config: NgramConfig | None = None,
        make_index: MakeIndex | None = None,
    ) -> None:
        super().__init__()
        self.config = config = config or NgramConfig()
        trusted = [0, *(trusted_length(n + 1, config.factor) for n in range(MAX_MATCH))]
        self._rule = NgramRule(config.min_n, config.max_n, trusted)
        self._make = make_index or (NativeNgramIndex if native.available() else PythonNgramIndex)

    @classmethod
    def build(cls, context: ProposerContext) -> NgramProposer:
        return cls(read_options(NgramConfig, cls.name, context.options))

    def _index_for(self, view: SequenceView) -> Index:
        return self._make(self._rule, view.finish_ids)
