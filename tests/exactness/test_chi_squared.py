"""The tensor rules with the real noise: chi-squared over 20 000 sequences of several steps each.

The enumeration proves the rules; this checks what it cannot see: float32, Gumbel draws and the
keys of `outrider.noise`. Fixed seed, so the test either always passes or never does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import pytest
import torch
from scipy.stats import chisquare

from outrider.contracts import Draw, Proposal, SequenceView, Stream, Verifier
from outrider.noise import draw_key, uniform
from outrider.prove.toys import argmax, hashed
from outrider.verifiers import make_verifier

V = 3
NUM_SEQUENCES = 20_000
NUM_TOKENS = 3
PROMPT = [0, 0]
CHAIN = [-1, 0]
TREE = [-1, -1, 0]

Key = tuple[int, int]


def table(seed: int, zeros: float) -> dict[Key, list[float]]:
    """A law for every two last tokens."""
    model = hashed(seed, V, zeros=zeros)
    return {(a, b): [float(x) for x in model((a, b))] for a in range(V) for b in range(V)}


TARGET, DRAFT = table(7, 0.15), table(8, 0.0)


@dataclass(slots=True)
class View:
    sample_index: int
    seed: int = 2024
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))


@dataclass
class Rows:
    """contracts.Distributions over rows that are known; the ratio rules never call draw()."""

    rows_RV: torch.Tensor
    starts: list[int]

    def probs(self, start: int, stop: int) -> torch.Tensor:
        return self.rows_RV[start:stop]

    def draw(self) -> list[int]:
        raise NotImplementedError


def draw_from(law: list[float], u: float) -> int:
    for token, mass in enumerate(law):
        u -= mass
        if u < 0:
            return token
    return argmax(tuple(law))  # type: ignore[arg-type]


def propose(view: View, parents: list[int], draw: Draw) -> Proposal:
    """Draws a proposal with DRAFT noise that is fresh in every step."""
    key = draw_key(view.seed, view.sample_index, len(view.tokens), Stream.DRAFT)
    tokens: list[int] = []
    laws: list[list[float]] = []
    taken: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        law = DRAFT[context(view, tokens, parents, parent)]
        siblings = taken.setdefault(parent, [])
        left = law
        if draw is not Draw.SAMPLED:
            mass = 1 - sum(law[v] for v in siblings)
            left = [0.0 if v in siblings else x / mass for v, x in enumerate(law)]
        if draw is Draw.DETERMINISTIC:
            tokens.append(left.index(max(left)))
        else:
            tokens.append(draw_from(left, uniform(key, node)))
        siblings.append(tokens[-1])
        laws.append(law)
    q = None if draw is Draw.DETERMINISTIC else torch.tensor(laws)
    return Proposal(tokens, None if parents == CHAIN else parents, draw, q)


def greedy_as_soft(view: View, parents: list[int], draw: Draw) -> Proposal:
    """Biased: the argmax, sold as a sample."""
    honest = propose(view, parents, Draw.DETERMINISTIC)
    laws = [
        DRAFT[context(view, honest.tokens, parents, parents[node])] for node in range(len(honest))
    ]
    return Proposal(honest.tokens, honest.parents, Draw.SAMPLED, torch.tensor(laws))


def context(view: View, tokens: list[int], parents: list[int], node: int) -> Key:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    a, b = (*view.tokens[-2:], *path[::-1])[-2:]
    return a, b


def generate(
    verifier: Verifier,
    parents: list[int],
    draw: Draw,
    make: Callable[[View, list[int], Draw], Proposal] = propose,
) -> Counter[tuple[int, ...]]:
    """The first NUM_TOKENS tokens of every sequence."""
    views = [View(i) for i in range(NUM_SEQUENCES)]
    live = views
    while live:
        proposals = [make(view, parents, draw) for view in live]
        width = len(parents) + 1
        rows = [
            TARGET[context(view, proposal.tokens, parents, node)]
            for view, proposal in zip(live, proposals, strict=True)
            for node in range(-1, len(parents))
        ]
        laws = Rows(torch.tensor(rows), list(range(0, len(rows), width)))
        verdicts = verifier.verify(cast(list[SequenceView], live), proposals, cast(Any, laws))
        for view, proposal, verdict in zip(live, proposals, verdicts, strict=True):
            view.tokens += [proposal.tokens[node] for node in verdict.path] + [verdict.next_token]
        live = [view for view in live if len(view.tokens) < len(PROMPT) + NUM_TOKENS]
    return Counter(tuple(view.tokens[2 : 2 + NUM_TOKENS]) for view in views)


def p_value(counts: Counter[tuple[int, ...]]) -> float:
    observed, expected = [], []
    for string in product(range(V), repeat=NUM_TOKENS):
        history, mass = list(PROMPT), 1.0
        for token in string:
            mass *= TARGET[history[-2], history[-1]][token]
            history.append(token)
        if mass == 0:
            assert counts[string] == 0, f"{string} is impossible under the target"
            continue
        observed.append(counts[string])
        expected.append(mass * NUM_SEQUENCES)
    scale = sum(observed) / sum(expected)  # one, up to float rounding
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


PAIRINGS = [  # a chain has no siblings: without replacement it is SAMPLED
    ("token", Draw.SAMPLED),
    ("token", Draw.DETERMINISTIC),
    ("block", Draw.SAMPLED),
    ("block", Draw.DETERMINISTIC),
    ("tree", Draw.SAMPLED),
    ("tree", Draw.DETERMINISTIC),
    ("tree", Draw.WITHOUT_REPLACEMENT),
]


@pytest.mark.parametrize(("rule", "draw"), PAIRINGS)
def test_the_output_follows_the_target(rule: str, draw: Draw) -> None:
    p = p_value(generate(make_verifier(rule), TREE if rule == "tree" else CHAIN, draw))
    print(f"{rule} {draw.value}: p = {p:.3f}")
    assert p > 1e-4


def test_a_biased_draft_is_noticed() -> None:
    p = p_value(generate(make_verifier("block"), CHAIN, Draw.SAMPLED, greedy_as_soft))
    assert p < 1e-6


def test_siblings_sold_as_independent_are_noticed() -> None:
    def sold(view: View, parents: list[int], draw: Draw) -> Proposal:
        honest = propose(view, parents, Draw.WITHOUT_REPLACEMENT)
        return Proposal(honest.tokens, honest.parents, Draw.SAMPLED, honest.q)

    p = p_value(generate(make_verifier("tree"), TREE, Draw.SAMPLED, sold))
    assert p < 1e-6
