"""Suffix decoding (Oliaro et al. 2024): drafts the continuation that this ending had before.

The text's ending is looked up in the text itself and in the outputs of the same tenant's earlier
requests. The counts of the continuations give their probabilities: a draft grows, best
branch first, while the product of count ratios along it stays above a floor, and the longer the
match the longer the draft may be. Of the drafts that different matches suggest, the one with the
largest sum of probabilities is kept: that sum is the number of tokens it expects to be accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from outrider.contracts import ProposerContext, SequenceView
from outrider.errors import ConfigError
from outrider.proposers._lookup import Index, TextProposer
from outrider.proposers.ngram_index import trusted_length
from outrider.proposers.options import read_options
from outrider.proposers.shared_outputs import SharedOutputs
from outrider.proposers.suffix_index import SuffixIndex, SuffixRule, suffix_index

MakeIndex = Callable[..., SuffixIndex]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """A match drafts at most `factor` times its `trusted_length`, and no path less probable than
    `floor`."""

    factor: float = 1.0
    floor: float = 0.1  # least product of count ratios along a path
    max_match: int = 64  # longer matches count as this long
    shared_tokens: int = 1 << 16  # of finished outputs kept for later requests; 0: share nothing
    tree: bool = True  # False: chains only, for verifiers without trees

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.floor <= 1):
            raise ConfigError(
                f"suffix needs factor > 0 and 0 < floor <= 1, not {self.factor} and {self.floor}"
            )
        if self.max_match < 1 or self.shared_tokens < 0:
            raise ConfigError(
                f"suffix needs max_match >= 1 and shared_tokens >= 0, "
                f"not {self.max_match} and {self.shared_tokens}"
            )


class SuffixProposer(TextProposer):
    name = "suffix"

    def __init__(
        self, config: SuffixConfig | None = None, make_index: MakeIndex = suffix_index
    ) -> None:
        super().__init__()
        self.config = config = config or SuffixConfig()
        self.trees = config.tree
        trusted = [0, *(trusted_length(n + 1, config.factor) for n in range(config.max_match))]
        self._make_index = partial(make_index, SuffixRule(trusted, config.floor, config.tree))
        self._shared = SharedOutputs(config.shared_tokens, self._make_index)

    @classmethod
    def build(cls, context: ProposerContext) -> SuffixProposer:
        return cls(read_options(SuffixConfig, cls.name, context.options))

    def index_of(self, view: SequenceView) -> Index:
        index = super().index_of(view)
        cast(SuffixIndex, index).read(self._shared.of(view.salt))
        return index

    def _index_for(self, view: SequenceView) -> Index:
        return self._make_index(view.finish_ids)

    def _forgotten(self, view: SequenceView, num_returning: int) -> None:
        """Shares the output; of a preempted sequence, the rest when it is released again."""
        self._shared.add(view.salt, view.tokens[num_returning:])
