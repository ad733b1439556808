"""Lookahead on toy targets whose next token is a function: what the window learns is checkable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from types import SimpleNamespace
from typing import cast

import pytest

from outrider.contracts import Observation, Proposal, SequenceView, Verdict
from outrider.errors import ConfigError
from outrider.proposers.lookahead import LookaheadConfig, LookaheadProposer, NgramPool, Trie
from outrider.sampling import path_to
from outrider.verifiers.coupled import match

Target = Callable[[list[int]], int]


def view_of(tokens: list[int], finish_ids: frozenset[int] = frozenset()) -> SequenceView:
    return cast(SequenceView, SimpleNamespace(id=0, tokens=tokens, seed=3, finish_ids=finish_ids))


def cycle(tokens: list[int]) -> int:
    """One way through 0..46 that no short piece of text gives away."""
    return (tokens[-1] * 5 + 3) % 47


def step(proposer: LookaheadProposer, view: SequenceView, target: Target, budget: int) -> int:
    """One step of an engine with this target; returns how many drafts were accepted."""
    (proposal,) = proposer.propose([view], [budget])
    assert len(proposal) <= budget
    parents = proposal.parents
    assert parents is not None
    assert len(set(zip(parents, proposal.tokens, strict=True))) == len(proposal)
    draws = []
    for node in range(-1, len(proposal)):
        path = [proposal.tokens[i] for i in path_to(proposal, node)]
        draws.append(target(view.tokens + path))
    path = match(proposal.tokens, parents, draws)
    verdict = Verdict(path, draws[path[-1] + 1 if path else 0], draws)
    view.tokens.extend([*(proposal.tokens[node] for node in path), verdict.next_token])
    proposer.observe([view], [Observation(proposal, verdict)])
    return len(path)


def accepted(
    proposer: LookaheadProposer, target: Target, budgets: Iterator[int], num_steps: int
) -> list[int]:
    view = view_of([1, 4, 9])
    lengths = [step(proposer, view, target, next(budgets)) for _ in range(num_steps)]
    for end in range(3, len(view.tokens)):
        assert view.tokens[end] == target(view.tokens[:end])
    return lengths


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_the_window_alone_learns_what_the_target_does(ngram: int) -> None:
    config = LookaheadConfig(ngram=ngram, window=4, guesses=4, from_text=False)
    lengths = accepted(LookaheadProposer(config), cycle, repeat(8 * (ngram - 1)), 40)
    # Four n-grams a step learn the cycle of 46 long before the text has come around once.
    assert lengths[-5:] == [ngram - 1] * 5
    assert sum(lengths[:15]) > 0


def test_every_ngram_of_the_window_is_the_targets_own() -> None:
    proposer = LookaheadProposer(LookaheadConfig(ngram=4, window=3, from_text=False))
    accepted(proposer, cycle, repeat(18), 12)
    pool = proposer.states[0].pool
    known = [(first, rest) for first in range(47) for rest in pool.after(first)]
    assert len(known) > 10
    for first, rest in known:
        tokens = [first]
        for token in rest:
            assert token == cycle(tokens)
            tokens.append(token)


def test_any_budget_does() -> None:
    budgets = iter([1, 30, 2, 7, 30, 3, 12, 30, 1, 5] * 6)
    lengths = accepted(LookaheadProposer(), lambda t: (t[-1] + t[-2]) % 11, budgets, 60)
    assert sum(lengths) > 20


def test_text_joins_the_pool() -> None:
    view = view_of([1, 2, 3, 4, 9, 1])
    (proposal,) = LookaheadProposer(LookaheadConfig(ngram=4, window=1)).propose([view], [4])
    assert proposal.tokens[:3] == [2, 3, 4]
    silent = LookaheadConfig(ngram=4, window=1, from_text=False)
    (proposal,) = LookaheadProposer(silent).propose([view], [4])
    assert len(proposal) == 1  # the window


def test_guesses_end_where_the_text_would() -> None:
    view = view_of([1, 2, 7, 4, 9, 1], frozenset({7}))
    (proposal,) = LookaheadProposer(LookaheadConfig(ngram=4, window=1)).propose([view], [4])
    assert proposal.tokens[:2] == [2, 7]
    assert proposal.parents == [-1, 0, -1][: len(proposal)]


def test_without_draws_there_is_no_window() -> None:
    """Ratio rules draw from residuals: the pool lives on text alone."""
    proposer = LookaheadProposer(LookaheadConfig(ngram=4))
    view = view_of([1, 2, 3, 4, 9, 1])
    (proposal,) = proposer.propose([view], [12])
    proposer.observe([view], [Observation(proposal, Verdict([], 5))])
    view.tokens.extend([5, 1])
    (proposal,) = proposer.propose([view], [12])
    assert (proposal.tokens, proposal.parents) == ([2, 3, 4], [-1, 0, 1])


def test_a_step_that_somebody_else_drafted_teaches_nothing() -> None:
    proposer = LookaheadProposer(LookaheadConfig(from_text=False))
    view = view_of([1, 2, 3])
    proposer.propose([view], [12])
    before = [list(level) for level in proposer.states[0].window]
    other = Observation(Proposal([5], source="other"), Verdict([], 8, [8, 8]))
    proposer.observe([view], [other])
    assert proposer.states[0].window == before
    proposer.observe([view], [Observation(Proposal(), None)])
    proposer.release(0)
    proposer.release(0)
    assert not proposer.states


def test_the_pool_keeps_the_latest() -> None:
    pool = NgramPool(2)
    for rest in (2, 3, 4, 3):
        pool.add([1, rest])
    assert pool.after(1) == [(3,), (4,)]
    assert pool.after(2) == []


def test_equal_beginnings_are_one_node() -> None:
    trie = Trie()
    for path in ([1, 2, 3], [1, 2, 4], [5], [1, 9, 9]):
        trie.add_path(path, limit=6)
    assert trie.tokens == [1, 2, 3, 4, 5, 9]
    assert trie.parents == [-1, 0, 1, 1, -1, 0]


def test_bad_options_are_refused() -> None:
    for options in ({"ngram": 1}, {"window": 0}, {"guesses": 0}):
        with pytest.raises(ConfigError, match="lookahead needs"):
            LookaheadConfig(**options)  # type: ignore[arg-type]
