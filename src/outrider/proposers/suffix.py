"""Suffix decoding (Oliaro et al. 2024): go on as this text, or one like it, went on before.

The text's ending is looked up in the text itself and in what the same tenant's earlier requests
produced. How often each continuation occurred says how far to trust it: a draft grows, best
branch first, while the product of count ratios along it stays above a floor, and the longer the
match the longer the draft may be. Of the drafts that different matches suggest, the one with the
largest sum of probabilities is kept: that sum is the number of tokens it expects to be accepted.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.proposers._ngram_index import trusted_length
from outrider.proposers._options import read_options
from outrider.proposers._shared_outputs import SharedOutputs
from outrider.proposers._suffix_automaton import Context, SuffixAutomaton


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


@dataclass(slots=True)
class Draft:
    """A tree of continuations; `score` is how many of its tokens it expects to be accepted."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    score: float = 0.0


class _Reader:
    """One sequence: its own text as an automaton, and where that text stands in others."""

    def __init__(self, view: SequenceView, depth: int) -> None:
        self.view = view
        self.own = SuffixAutomaton(depth)
        self.num_returning = len(view.tokens)  # the prompt; more after a preemption
        # Foreign automata: their size when they were read, how much of our text was, and where.
        self._found: dict[SuffixAutomaton, tuple[int, int, Context]] = {}

    def read(self) -> None:
        tokens = self.view.tokens
        for i in range(self.own.num_tokens, len(tokens)):
            self.own.append(tokens[i])

    def find(self, others: Seq[SuffixAutomaton]) -> list[Context]:
        """The longest ending of the text in each of `others`; constant time per new token."""
        tokens = self.view.tokens
        found = {}
        for other in others:
            size, end, context = self._found.get(other, (-1, 0, (0, 0)))
            if size != other.num_tokens:  # it has grown: a longer ending may occur by now
                context = other.find(tokens)
            else:
                for i in range(end, len(tokens)):
                    context = other.advance(context, tokens[i])
            found[other] = (other.num_tokens, len(tokens), context)
        self._found = found
        return [context for _, _, context in found.values()]


class SuffixProposer:
    name = "suffix"
    draws = frozenset({Draw.DETERMINISTIC})
    needs = Needs()

    def __init__(self, config: SuffixConfig | None = None) -> None:
        self.config = config or SuffixConfig()
        self.trees = self.config.tree
        self._readers: dict[int, _Reader] = {}
        self._shared = SharedOutputs(self.config.shared_tokens, self.config.max_match)

    @classmethod
    def build(cls, context: ProposerContext) -> SuffixProposer:
        return cls(read_options(SuffixConfig, cls.name, context.options))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = []
        for view, budget in zip(views, budgets, strict=True):
            draft = self._draft(view, budget)
            is_chain = draft.parents == list(range(-1, len(draft.tokens) - 1))
            parents = None if is_chain else draft.parents
            proposals.append(Proposal(draft.tokens, parents, source=self.name))
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed tokens are read when the next draft is asked for."""

    def release(self, sequence_id: int) -> None:
        """The output becomes common knowledge; a preempted one's rest when it is released again."""
        reader = self._readers.pop(sequence_id, None)
        if reader is not None:
            self._shared.add(reader.view.salt, reader.view.tokens[reader.num_returning :])

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        reader = self._readers.get(view.id)
        if reader is None:
            reader = self._readers[view.id] = _Reader(view, self.config.max_match)
        reader.read()
        shared = self._shared.automata(view.salt)
        places = [(reader.own, reader.own.repeated_tail())]
        places += zip(shared, reader.find(shared), strict=True)
        best = Draft()
        for automaton, context in places:
            while context[1]:
                num_tokens = min(budget, trusted_length(context[1], self.config.factor))
                if num_tokens <= best.score:  # certain tokens alone could not do better
                    break
                draft = self._grow(automaton, context, num_tokens, view.finish_ids)
                if draft.score > best.score:
                    best = draft
                context = automaton.shorter(context)
        return best

    def _grow(
        self,
        automaton: SuffixAutomaton,
        start: Context,
        num_tokens: int,
        finish_ids: Collection[int],
    ) -> Draft:
        """The `num_tokens` likeliest continuations; a chain takes the likeliest at each step."""
        draft = Draft()
        heap: list[tuple[float, int, int, int, Context]] = []
        num_pushed = 0

        def branch(node: int, probability: float, context: Context) -> None:
            nonlocal num_pushed
            followers = automaton.followers(context)
            while not followers:  # a text's end: go on from its longest ending, if long enough
                context = automaton.shorter(context)
                if context[1] < start[1]:
                    return
                followers = automaton.followers(context)
            total = sum(count for _, count in followers)
            if not self.config.tree:
                followers = [max(reversed(followers), key=lambda follower: follower[1])]
            for token, count in reversed(followers):  # of equals, the latest comes first
                chance = probability * count / total
                if chance >= self.config.floor:
                    num_pushed += 1
                    heapq.heappush(heap, (-chance, num_pushed, node, token, context))

        branch(-1, 1.0, start)
        while heap and len(draft.tokens) < num_tokens:
            minus_chance, _, parent, token, context = heapq.heappop(heap)
            draft.tokens.append(token)
            draft.parents.append(parent)
            draft.score -= minus_chance
            if token not in finish_ids:
                node = len(draft.tokens) - 1
                branch(node, -minus_chance, automaton.advance(context, token))
        return draft
