"""Lookahead decoding (Fu et al. 2024): the target drafts for itself, in the pass that verifies.

Every pass carries two kinds of branches. The *window* guesses the next W tokens (level 0) and what
follows each of them (levels 1 to N - 2). The target improves every guess:

    root ── a0 ── b0 ── c0 ── d0          level 0: a chain
            │     │     │     │
            a1    b1    c1    d1          level 1: what the target drew after level 0, a pass ago
            │     │     │     │
            a2    b2    c2    d2          level 2: what it drew after level 1

The target's draws after the last level complete W n-grams (a0 a1 a2 + draw, ...), which go to the
pool, and the levels move up by one. *Guesses* are n-grams of the pool that begin with the last
committed token: they can be accepted. For the engine, window nodes are drafts like any other.
Lookahead pays if many more tokens in a pass cost little.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
    Verdict,
)
from outrider.errors import ConfigError
from outrider.proposers.ngram_index import up_to_finish
from outrider.proposers.options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class LookaheadConfig:
    """n-grams of `ngram` tokens, of which at most `ngram - 1` are accepted at a time."""

    ngram: int = 5
    window: int | None = None  # columns; None: what fits in half of the first budget
    guesses: int = 8  # n-grams kept for each first token
    from_text: bool = True  # n-grams of prompt and output join the pool too

    def __post_init__(self) -> None:
        if self.ngram < 2 or self.guesses < 1 or (self.window is not None and self.window < 1):
            raise ConfigError(
                f"lookahead needs ngram >= 2, window >= 1 and guesses >= 1, "
                f"not {self.ngram}, {self.window} and {self.guesses}"
            )


class NgramPool:
    """The `size` latest n-grams for each first token."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._after: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, ngram: Seq[int]) -> None:
        known = self._after.setdefault(ngram[0], OrderedDict())
        rest = tuple(ngram[1:])
        known[rest] = None
        known.move_to_end(rest)
        if len(known) > self._size:
            known.popitem(last=False)

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed `token`, latest first."""
        return list(reversed(self._after.get(token, ())))


class Trie:
    """A tree of drafts in which equal beginnings are one node."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._node: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        node = self._node.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, path: Seq[int], limit: int) -> None:
        """Adds as much of `path` as keeps the tree within `limit` nodes."""
        node = -1
        for token in path:
            if len(self.tokens) >= limit and (node, token) not in self._node:
                return
            node = self.add(node, token)


@dataclass(slots=True)
class _State:
    pool: NgramPool
    window: list[list[int]]  # tokens by level and column; empty: the rule reports no draws
    num_read: int = 0  # tokens of the text whose n-grams are in the pool
    last_level: list[int] = field(default_factory=list)  # its nodes in the pending proposal


class LookaheadProposer:
    name = "lookahead"
    draws = frozenset({Draw.DETERMINISTIC})
    trees = True
    needs = Needs()

    def __init__(self, config: LookaheadConfig | None = None) -> None:
        self.config = config or LookaheadConfig()
        self.states: dict[int, _State] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> LookaheadProposer:
        return cls(read_options(LookaheadConfig, cls.name, context.options))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [self._draft(view, budget) for view, budget in zip(views, budgets, strict=True)]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            state = self.states.get(view.id)
            if state is None or not state.last_level:
                continue
            if observation.verdict is not None and observation.proposal.source == self.name:
                self._advance(state, observation.verdict)
            state.last_level = []

    def release(self, sequence_id: int) -> None:
        self.states.pop(sequence_id, None)

    def _draft(self, view: SequenceView, budget: int) -> Proposal:
        state = self.states.get(view.id)
        if state is None:
            state = self.states[view.id] = self._open(view, budget)
        if self.config.from_text:
            self._read(state, view.tokens)
        num_window = sum(map(len, state.window))
        if num_window > budget:  # a window is sent whole or not at all
            num_window = 0
        trie = Trie()
        # Guesses first: of equal siblings the first is followed, and only they go on as planned.
        for guess in state.pool.after(view.tokens[-1]):
            trie.add_path(up_to_finish(list(guess), view.finish_ids), budget - num_window)
        if num_window:
            state.last_level = self._add_window(trie, state.window)
        return Proposal(trie.tokens, trie.parents, source=self.name)

    def _open(self, view: SequenceView, budget: int) -> _State:
        width = self.config.window or max(1, budget // (2 * (self.config.ngram - 1)))
        anything = random.Random(view.seed).choices(view.tokens, k=width)
        return _State(NgramPool(self.config.guesses), [anything])

    def _read(self, state: _State, tokens: list[int]) -> None:
        size = self.config.ngram
        for end in range(max(size, state.num_read + 1), len(tokens) + 1):
            state.pool.add(tokens[end - size : end])
        state.num_read = len(tokens)

    @staticmethod
    def _add_window(trie: Trie, window: list[list[int]]) -> list[int]:
        """Returns the nodes of the last level."""
        nodes: list[int] = []
        for token in window[0]:
            nodes.append(trie.add(nodes[-1] if nodes else -1, token))
        for level in window[1:]:
            nodes = [trie.add(above, token) for above, token in zip(nodes, level, strict=True)]
        return nodes

    def _advance(self, state: _State, verdict: Verdict) -> None:
        """The window moves with the text: its draws complete n-grams and become its last level."""
        if verdict.draws is None:  # a ratio rule does not report its draws
            state.window = []
            return
        draws = [verdict.draws[1 + node] for node in state.last_level]
        window = [*state.window, draws]
        num_ahead = len(verdict.path) + 1
        if len(window) == self.config.ngram:
            for ngram in zip(*window, strict=True):
                state.pool.add(ngram)
            del window[0]
            num_ahead -= 1  # level 1 stands where level 0 stood, one token on
        # Columns that the text has passed move to the end of the window.
        shift = num_ahead % len(draws)
        state.window = [level[shift:] + level[:shift] for level in window]
