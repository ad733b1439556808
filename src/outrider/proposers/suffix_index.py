"""Indexes texts by all of their endings and finds likely continuations, natively or in Python.

Both give the same drafts; the native one takes microseconds.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from outrider import native
from outrider.native.lookup import NativeLookup, packed
from outrider.proposers._lookup import Draft
from outrider.proposers.suffix_automaton import Context, SuffixAutomaton


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """How drafts grow."""

    trusted: Seq[int]  # [n]: most nodes after a match of n tokens; longer ones count as the last
    floor: float  # least product of count ratios along a path
    tree: bool  # False: chains only

    @property
    def depth(self) -> int:
        return len(self.trusted) - 1


class SuffixIndex(Protocol):
    """One or more texts."""

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        ...

    def begin(self) -> None:
        """The next token starts a new text."""
        ...

    def read(self, others: Seq[Self]) -> None:
        """Draft from these texts as well, from now on."""
        ...

    def extend(self, tokens: Seq[int]) -> None: ...

    def draft(self, tokens: Seq[int], budget: int) -> Draft:
        """Adds `tokens` to the text; returns a draft from this text and the others."""
        ...


class NativeSuffixIndex(NativeLookup):
    def __init__(self, rule: SuffixRule, finish_ids: Collection[int] = ()) -> None:
        super().__init__(
            native.library().outrider_suffix_new(
                packed(rule.trusted),
                rule.depth,
                rule.floor,
                rule.tree,
                packed(finish_ids),
                len(finish_ids),
            )
        )
        self._others: Seq[NativeSuffixIndex] = ()

    def begin(self) -> None:
        native.check(self._lib.outrider_suffix_begin(self._argument))

    def read(self, others: Seq[NativeSuffixIndex]) -> None:
        if others or self._others:
            handles = (ctypes.c_void_p * len(others))(*[other.handle for other in others])
            native.check(self._lib.outrider_suffix_others(self._argument, handles, len(others)))
            self._others = list(others)  # keeps them alive while they may be read

    def draft(self, tokens: Seq[int], budget: int) -> Draft:
        return Draft(*self.drafted(tokens, budget))


class _Grown(NamedTuple):
    """Nodes in the order in which they were found, likeliest first."""

    tokens: Seq[int] = ()
    parents: Seq[int] = ()


def _depth_first(grown: _Grown) -> Draft:
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(grown.parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), node))
    paths.sort()
    places = {path: place for place, path in enumerate(paths)}
    parents = [places.get(path[:-1], -1) for path in paths]
    is_chain = parents == list(range(-1, len(paths) - 1))
    return Draft([grown.tokens[path[-1]] for path in paths], None if is_chain else parents)


class PythonSuffixIndex:
    def __init__(self, rule: SuffixRule, finish_ids: Collection[int] = ()) -> None:
        self._rule = rule
        self._finish_ids = finish_ids
        self._text: list[int] = []
        self.automaton = SuffixAutomaton(rule.depth)
        # Of others: their size when last read, the length of our text then, and its state in them.
        self._found: dict[PythonSuffixIndex, tuple[int, int, Context]] = {}
        self._others: Seq[PythonSuffixIndex] = ()

    @property
    def num_tokens(self) -> int:
        return self.automaton.num_tokens

    def begin(self) -> None:
        self.automaton.begin()

    def read(self, others: Seq[PythonSuffixIndex]) -> None:
        self._others = others

    def extend(self, tokens: Seq[int]) -> None:
        self._text += tokens
        for token in tokens:
            self.automaton.append(token)

    def draft(self, tokens: Seq[int], budget: int) -> Draft:
        self.extend(tokens)
        others = self._others
        places = [(self.automaton, self.automaton.repeated_tail())]
        places += zip([other.automaton for other in others], self._find(others), strict=True)
        best, best_score = _Grown(), 0.0
        for automaton, context in places:
            while context[1]:
                num_tokens = min(budget, self._rule.trusted[context[1]])
                if num_tokens <= best_score:  # tokens of probability 1 would score no better
                    break
                draft, score = self._grow(automaton, context, num_tokens)
                if score > best_score:
                    best, best_score = draft, score
                context = automaton.shorter(context)
        return _depth_first(best)

    def _find(self, others: Seq[PythonSuffixIndex]) -> list[Context]:
        """The longest ending of the text in each of `others`; constant time per new token."""
        text = self._text
        found = {}
        for other in others:
            size, end, context = self._found.get(other, (-1, 0, (0, 0)))
            if size != other.num_tokens:  # it has grown: a longer ending may occur now
                context = other.automaton.find(text)
            else:
                for i in range(end, len(text)):
                    context = other.automaton.advance(context, text[i])
            found[other] = (other.num_tokens, len(text), context)
        self._found = found
        return [context for _, _, context in found.values()]

    def _grow(
        self, automaton: SuffixAutomaton, start: Context, num_tokens: int
    ) -> tuple[_Grown, float]:
        """The `num_tokens` likeliest continuations, and how many are expected to be accepted.

        A chain takes the likeliest at each step.
        """
        tokens: list[int] = []
        parents: list[int] = []
        score = 0.0
        heap: list[tuple[float, int, int, int, Context]] = []
        num_pushed = 0

        def branch(node: int, probability: float, context: Context) -> None:
            nonlocal num_pushed
            followers = automaton.followers(context)
            while not followers:  # a text's end: continue from its longest ending, if long enough
                context = automaton.shorter(context)
                if context[1] < start[1]:
                    return
                followers = automaton.followers(context)
            total = sum(count for _, count in followers)
            if not self._rule.tree:
                followers = [max(reversed(followers), key=lambda follower: follower[1])]
            for token, count in reversed(followers):  # of equals, the latest comes first
                chance = probability * count / total
                if chance >= self._rule.floor:
                    num_pushed += 1
                    heapq.heappush(heap, (-chance, num_pushed, node, token, context))

        branch(-1, 1.0, start)
        while heap and len(tokens) < num_tokens:
            minus_chance, _, parent, token, context = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            score -= minus_chance
            if token not in self._finish_ids:
                branch(len(tokens) - 1, -minus_chance, automaton.advance(context, token))
        return _Grown(tokens, parents), score


def suffix_index(rule: SuffixRule, finish_ids: Collection[int] = ()) -> SuffixIndex:
    """The native index if the library is there."""
    return (NativeSuffixIndex if native.available() else PythonSuffixIndex)(rule, finish_ids)
