"""Suffix decoding against scans of all its texts: the automaton, the drafts, what is shared."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from native_models import needs_native
from outrider.contracts import Draw, Proposal, SequenceView
from outrider.errors import ConfigError
from outrider.proposers.shared_outputs import SharedOutputs
from outrider.proposers.suffix import MakeIndex, SuffixConfig, SuffixProposer
from outrider.proposers.suffix_automaton import ROOT, Context, SuffixAutomaton
from outrider.proposers.suffix_index import NativeSuffixIndex, PythonSuffixIndex, SuffixRule

TEXT = st.lists(st.integers(0, 2), max_size=20)
TEXTS = st.lists(TEXT, min_size=1, max_size=4)
DEPTHS = st.sampled_from([1, 2, 3, 50])
INDEXES = [
    PythonSuffixIndex,
    pytest.param(NativeSuffixIndex, marks=needs_native),
]
both_indexes = pytest.mark.parametrize("make_index", INDEXES)


def automaton_of(texts: list[list[int]], depth: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth)
    for text in texts:
        automaton.begin()
        for token in text:
            automaton.append(token)
    return automaton


def followers(texts: list[list[int]], context: list[int]) -> Counter[int]:
    n = len(context)
    return Counter(
        text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == context
    )


def occurrences(texts: list[list[int]], context: list[int]) -> int:
    n = len(context)
    return sum(text[i : i + n] == context for text in texts for i in range(len(text) - n + 1))


def longest(texts: list[list[int]], query: list[int], depth: int, at_least: int = 1) -> list[int]:
    """The longest ending of `query`, up to `depth`, that occurs `at_least` times."""
    for n in range(min(depth, len(query)), 0, -1):
        if occurrences(texts, query[-n:]) >= at_least:
            return query[-n:]
    return []


@given(texts=TEXTS, query=TEXT, depth=DEPTHS)
def test_matches_and_counts_are_the_scans(
    texts: list[list[int]], query: list[int], depth: int
) -> None:
    automaton = automaton_of(texts, depth)
    context: Context = (ROOT, 0)
    for end in range(1, len(query) + 1):
        context = automaton.advance(context, query[end - 1])
        expected = longest(texts, query[:end], depth)
        assert context[1] == len(expected)
        assert Counter(dict(automaton.followers(context))) == followers(texts, expected)
        assert automaton.find(query[:end]) == context


@given(texts=TEXTS, depth=DEPTHS)
def test_endings_that_occur_elsewhere(texts: list[list[int]], depth: int) -> None:
    automaton = automaton_of(texts, depth)
    text = texts[-1]
    context = automaton.repeated_tail()
    expected = longest(texts, text, depth, at_least=2)
    assert context[1] == len(expected)
    while expected:  # each link: the longest ending that occurs more often
        assert Counter(dict(automaton.followers(context))) == followers(texts, expected)
        context = automaton.shorter(context)
        expected = longest(texts, expected, depth, at_least=occurrences(texts, expected) + 1)
        assert context[1] == len(expected)


def test_memory_is_linear_and_time_is_too() -> None:
    """A run of one token has a chain of links as long as itself; nothing may walk all of it."""
    automaton = automaton_of([[1] * 20_000, list(range(5_000)) * 4], depth=16)
    assert automaton.num_tokens == 40_000
    assert automaton.num_states <= 2 * automaton.num_tokens
    assert dict(automaton.followers(automaton.find([1] * 30))) == {1: 20_000 - 16}


def view_of(
    tokens: list[int],
    *,
    sequence_id: int = 0,
    salt: str = "",
    finish_ids: frozenset[int] = frozenset(),
) -> SequenceView:
    view = SimpleNamespace(id=sequence_id, tokens=tokens, salt=salt, finish_ids=finish_ids)
    return cast(SequenceView, view)


class Scan:
    """The best draft as the definition has it: every ending, every place, every time."""

    def __init__(self, config: SuffixConfig, finish_ids: frozenset[int]) -> None:
        self.config = config
        self.finish_ids = finish_ids
        self.best: tuple[list[int], list[int], float] = ([], [], 0.0)

    def look(self, texts: list[list[int]], query: list[int], at_least: int, budget: int) -> None:
        ending = longest(texts, query, self.config.max_match, at_least)
        while ending:
            m = len(ending)
            trusted = max(1, int(self.config.factor * min(2 + 2 * m, 6 + m / 4)))
            num_tokens = min(budget, trusted)
            if num_tokens > self.best[2]:
                draft = self.grow(texts, ending, num_tokens)
                if draft[2] > self.best[2]:
                    self.best = draft
            more = occurrences(texts, ending) + 1
            ending = longest(texts, ending, self.config.max_match, more)

    def grow(
        self, texts: list[list[int]], start: list[int], num_tokens: int
    ) -> tuple[list[int], list[int], float]:
        tokens: list[int] = []
        parents: list[int] = []
        score = 0.0
        open_: list[tuple[float, int, int, int, list[int]]] = []
        num_pushed = 0
        grown: list[tuple[int, float, list[int]]] = [(-1, 1.0, start)]
        while True:
            for node, chance, context in grown:
                found = followers(texts, context)
                while not found and len(context) > len(start):
                    context = context[1:]
                    found = followers(texts, context)
                options = list(found.items())  # in the order of their first occurrence
                if not self.config.tree and options:
                    options = [max(reversed(options), key=lambda o: o[1])]
                for token, count in reversed(options):
                    p = chance * count / found.total()
                    if p >= self.config.floor:
                        num_pushed -= 1
                        open_.append((p, num_pushed, node, token, context))
            if not open_ or len(tokens) == num_tokens:
                return tokens, parents, score
            best = max(open_)
            open_.remove(best)
            p, _, parent, token, context = best
            tokens.append(token)
            parents.append(parent)
            score += p
            longer = [*context, token][-self.config.max_match :]
            grown = [] if token in self.finish_ids else [(len(tokens) - 1, p, longer)]


def depth_first(tokens: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    order: list[int] = []

    def visit(node: int) -> None:
        order.extend([node] if node >= 0 else [])
        for child, parent in enumerate(parents):
            if parent == node:
                visit(child)

    visit(-1)
    above = [order.index(parents[n]) if parents[n] >= 0 else -1 for n in order]
    return [tokens[n] for n in order], above


@both_indexes
@given(
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=3),
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5),
    budget=st.integers(1, 9),
    config=st.builds(
        SuffixConfig,
        factor=st.sampled_from([0.1, 0.5, 1.0]),
        floor=st.sampled_from([0.1, 0.4]),
        max_match=st.sampled_from([2, 64]),
        tree=st.booleans(),
    ),
    finish_ids=st.sampled_from([frozenset[int](), frozenset({1})]),
    preempted=st.integers(0, 5),
)
def test_drafts_are_the_scans(
    make_index: MakeIndex,
    outputs: list[list[int]],
    pieces: list[list[int]],
    budget: int,
    config: SuffixConfig,
    finish_ids: frozenset[int],
    preempted: int,
) -> None:
    proposer = SuffixProposer(config, make_index)
    for i, output in enumerate(outputs):
        prompt = [0] * i
        view = view_of(prompt, sequence_id=i + 1)
        proposer.propose([view], [1])
        view.tokens += output
        proposer.release(i + 1)
    shared = list(outputs)
    tokens: list[int] = []
    num_returning = len(pieces[0])
    view = view_of(tokens, finish_ids=finish_ids)
    for i, piece in enumerate(pieces):
        if i and i == preempted:  # what it has produced so far is common knowledge from now on
            proposer.release(0)
            if len(tokens) > num_returning:
                shared.append(tokens[num_returning:])
            num_returning = len(tokens) + len(piece)
        tokens += piece
        (proposal,) = proposer.propose([view], [budget])
        scan = Scan(config, finish_ids)
        scan.look([tokens], tokens, 2, budget)
        scan.look(shared, tokens, 1, budget)
        drafted, parents = depth_first(*scan.best[:2])
        assert proposal.tokens == drafted
        assert (proposal.parents or list(range(-1, len(drafted) - 1))) == parents
        assert proposal.draw is Draw.DETERMINISTIC
        assert config.tree or proposal.parents is None


def automata(shared: SharedOutputs, salt: str) -> list[SuffixAutomaton]:
    return [cast(PythonSuffixIndex, index).automaton for index in shared.of(salt)]


@given(
    outputs=st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=12),
    capacity=st.integers(0, 40),
)
def test_the_newest_outputs_are_kept_within_bounds_and_tenants(
    outputs: list[tuple[str, list[int]]], capacity: int
) -> None:
    rule = SuffixRule(trusted=[1] * 9, floor=0.1, tree=True)
    shared = SharedOutputs(capacity, lambda: PythonSuffixIndex(rule))
    for salt, output in outputs:
        # Tokens name their tenant, so that a leak would show.
        mark = 10 if salt == "a" else 20
        shared.add(salt, [mark + token for token in output])
        assert shared.num_tokens <= capacity
        for other, start in (("a", 10), ("b", 20)):
            for automaton in automata(shared, other):
                seen = dict(automaton.followers((ROOT, 0)))
                assert set(seen) <= {start, start + 1, start + 2}
        latest = [mark + token for token in output][-(capacity // 2) :] if capacity > 1 else []
        if latest:
            assert automata(shared, salt)[0].find(latest)[1] == min(8, len(latest))


def draft(proposer: SuffixProposer, view: SequenceView, budget: int = 8) -> Proposal:
    return proposer.propose([view], [budget])[0]


def test_outputs_are_shared_within_a_tenant_only() -> None:
    proposer = SuffixProposer()
    first = view_of([1, 2], salt="a")
    draft(proposer, first)
    first.tokens.extend([3, 4, 5, 6])
    proposer.release(first.id)
    assert draft(proposer, view_of([9, 3, 4], sequence_id=1, salt="a")).tokens == [5, 6]
    assert draft(proposer, view_of([9, 1, 2], sequence_id=2, salt="a")).tokens == []  # a prompt
    assert draft(proposer, view_of([9, 3, 4], sequence_id=3, salt="b")).tokens == []
    for sequence_id in range(5):
        proposer.release(sequence_id)
    assert proposer.num_sequences == 0


def test_a_branch_in_the_past_becomes_a_tree() -> None:
    view = view_of([1, 2, 3, 9, 1, 2, 4, 8, 1, 2])
    proposal = draft(SuffixProposer(), view, budget=4)
    assert proposal.tokens == [4, 8, 3, 9]  # equally often: the latest first
    assert proposal.parents == [-1, 0, -1, 2]
    chain = draft(SuffixProposer(SuffixConfig(tree=False)), view, budget=4)
    assert (chain.tokens, chain.parents) == ([4, 8, 1, 2], None)


def test_a_repetition_is_continued() -> None:
    assert draft(SuffixProposer(), view_of([9, 1, 2, 1, 2, 1, 2]), 7).tokens == [1, 2] * 3 + [1]


@pytest.mark.parametrize(
    "option", [{"factor": 0.0}, {"floor": 0.0}, {"floor": 1.5}, {"max_match": 0}]
)
def test_bad_options_are_refused(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="suffix needs"):
        SuffixConfig(**option)  # type: ignore[arg-type]


@needs_native
def test_native_drafts_are_pythons_where_states_have_many_ways_out() -> None:
    """Long enough for hash tables, splits of states that have one, and several texts."""
    rng = random.Random(0)
    rule = SuffixRule([min(16, 2 * n) for n in range(9)], floor=0.05, tree=True)
    shared = [make(rule) for make in (NativeSuffixIndex, PythonSuffixIndex)]
    for _ in range(3):
        output = [min(rng.randrange(60), rng.randrange(60)) for _ in range(400)]
        for index in shared:
            index.begin()
            index.extend(output)
    own = [make(rule, {3}) for make in (NativeSuffixIndex, PythonSuffixIndex)]
    for index, other in zip(own, shared, strict=True):
        index.read([other])  # type: ignore[list-item]
    for _ in range(300):
        piece = [min(rng.randrange(60), rng.randrange(60)) for _ in range(rng.randrange(5))]
        drafts = [index.draft(piece, 9) for index in own]
        assert drafts[0] == drafts[1]
    assert own[0].num_tokens == own[1].num_tokens
