"""Suffix decoding (Oliaro et al. 2024): go on as this text, or one like it, went on before.

The text's ending is looked up in the text itself and in what the same tenant's earlier requests
produced. How often each continuation occurred says how far to trust it: a draft grows, best
branch first, while the product of count ratios along it stays above a floor, and the longer the
match the longer the draft may be. Of the drafts that different matches suggest, the one with the
largest sum of probabilities is kept: that sum is the number of tokens it expects to be accepted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.proposers._lookup import CopiesAhead
from outrider.proposers._ngram_index import copy_from, trusted_length, up_to_finish
from outrider.proposers._options import read_options
from outrider.proposers._shared_outputs import SharedOutputs
from outrider.proposers._suffix_index import SuffixIndex, SuffixRule, suffix_index

MakeIndex = Callable[..., SuffixIndex]

_ENDING = 4  # tokens before a draft that must agree where its sequel is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """A match drafts at most `factor` times what `trusted_length` says of it, and nothing less
    probable than `floor`."""

    factor: float = 1.0
    floor: float = 0.1  # least product of count ratios along a path
    max_match: int = 64  # longer matches are treated as this long
    shared_tokens: int = 1 << 16  # of finished outputs kept for later requests; 0: share nothing
    tree: bool = True  # False: chains only, for verifiers that judge nothing else

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


class _Reader(NamedTuple):
    """One sequence: its own text, and how much of it was there when we first saw it."""

    view: SequenceView
    own: SuffixIndex
    num_returning: int  # the prompt; more after a preemption


class SuffixProposer(CopiesAhead):
    name = "suffix"
    draws = frozenset({Draw.DETERMINISTIC})
    needs = Needs()

    def __init__(
        self, config: SuffixConfig | None = None, make_index: MakeIndex = suffix_index
    ) -> None:
        self.config = config = config or SuffixConfig()
        self.trees = config.tree
        trusted = [0, *(trusted_length(n + 1, config.factor) for n in range(config.max_match))]
        self._make_index = partial(make_index, SuffixRule(trusted, config.floor, config.tree))
        self._readers: dict[int, _Reader] = {}
        self._shared = SharedOutputs(config.shared_tokens, self._make_index)

    @classmethod
    def build(cls, context: ProposerContext) -> SuffixProposer:
        return cls(read_options(SuffixConfig, cls.name, context.options))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = []
        for view, budget in zip(views, budgets, strict=True):
            reader = self._readers.get(view.id)
            if reader is None:
                own = self._make_index(view.finish_ids)
                reader = self._readers[view.id] = _Reader(view, own, len(view.tokens))
            own = reader.own
            draft = own.draft(view.tokens[own.num_tokens :], self._shared.of(view.salt), budget)
            proposals.append(Proposal(draft.tokens, draft.parents, source=self.name))
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed tokens are read when the next draft is asked for."""

    def _expected(self, view: SequenceView, budget: int, most_steps: int) -> tuple[int, list[int]]:
        """Chains that continue the text's own; a tree is drafted step by step."""
        (proposal,) = self.propose([view], [budget])
        chain = proposal.tokens
        if not chain or proposal.parents is not None:
            return 0, []
        text = chain + _sequel(view.tokens, chain, most_steps * (len(chain) + 1))
        return len(chain), up_to_finish(text, view.finish_ids)

    def release(self, sequence_id: int) -> None:
        """The output becomes common knowledge; a preempted one's rest when it is released again."""
        reader = self._readers.pop(sequence_id, None)
        if reader is not None:
            self._shared.add(reader.view.salt, reader.view.tokens[reader.num_returning :])


def _sequel(tokens: list[int], chain: list[int], count: int) -> list[int]:
    """What followed where the text's ending and `chain` stood last; nothing if they did not."""
    ending = tokens[-_ENDING:]
    wanted, text = array("i", ending + chain).tobytes(), array("i", tokens).tobytes()
    at = text.rfind(wanted)
    if at < 0 or at % array("i").itemsize:  # the latter by chance
        return []
    end = at // array("i").itemsize + len(ending) + len(chain)
    return copy_from(tokens, end, count) if end < len(tokens) else []
