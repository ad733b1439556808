"""The tensor rules make the reference's decision, given the same laws, drafts and uniforms.

Distributions are sixteenths, which float32 holds exactly; quotients of them round. So a case in
which some threshold lies within 1e-6 of its uniform, where rounding may decide, is set aside.
Exact ties have their own test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outrider.contracts import Draw, Proposal
from outrider.prove import reference
from outrider.prove.reference import Distribution, Draft, normalised, one_hot
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import match
from outrider.verifiers.ratio import RatioVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.tree import TreeVerifier

GRAIN = 16
MARGIN = 1e-6
MANY = settings(
    max_examples=2000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass
class GivenUniforms:
    """A Chance that answers from a list, and remembers the closest call."""

    uniforms: list[float]
    margin: float = 1.0
    draws: list[int] = field(default_factory=list)

    def below(self, node: int, threshold: Fraction) -> bool:
        u = Fraction(self.uniforms[node])
        if 0 < threshold < 1:
            self.margin = min(self.margin, abs(float(u - threshold)))
        return u < threshold

    def target(self, depth: int, dist: Distribution) -> int:
        return dist.index(1)


@dataclass
class Case:
    p_rows: list[Distribution]
    draft: Draft
    proposal: Proposal
    uniforms: list[float]

    @property
    def p_MV(self) -> torch.Tensor:
        return tensor(self.p_rows)


def tensor(rows: list[Distribution]) -> torch.Tensor:
    return torch.tensor([[float(x) for x in row] for row in rows], dtype=torch.float32)


def all_laws(size: int) -> list[Distribution]:
    """Every law of sixteenths, the zeros included."""
    cuts = combinations_with_replacement(range(GRAIN + 1), size - 1)
    return [
        tuple(Fraction(b - a, GRAIN) for a, b in pairwise((0, *inner, GRAIN))) for inner in cuts
    ]


UNIFORMS = st.sampled_from([(i + 0.5) / 1024 for i in range(1024)])
LAWS = {size: st.sampled_from(all_laws(size)) for size in (2, 3, 4)}


@st.composite
def cases(draw: st.DrawFn, *, trees: bool) -> Case:
    size = draw(st.integers(2, 4))
    num_nodes = draw(st.integers(0, 5 if trees else 4))
    law_kind = draw(st.sampled_from([Draw.SAMPLED, Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT]))
    draft, raw_q = Draft(), []
    by_parent: dict[int, Distribution] = {}
    for node in range(num_nodes):
        parent = draw(st.integers(-1, node - 1)) if trees else node - 1
        siblings = [draft.tokens[c] for c in draft.children(parent)]
        dist = by_parent.setdefault(parent, draw(LAWS[size]))
        if law_kind is Draw.SAMPLED:
            said = dist
        else:  # siblings are distinct
            left = [Fraction(0) if v in siblings else x for v, x in enumerate(dist)]
            if not any(left):
                break
            said = normalised(left, dist)
        token = draw(st.sampled_from([v for v in range(size) if said[v]]))
        if law_kind is Draw.DETERMINISTIC:
            said = one_hot(token, size)
        raw_q.append(dist)
        draft = Draft((*draft.tokens, token), (*draft.parents, parent), (*draft.dists, said))
    proposal = Proposal(
        list(draft.tokens),
        list(draft.parents) if trees else None,
        law_kind,
        None if law_kind is Draw.DETERMINISTIC or not raw_q else tensor(raw_q),
    )
    p_rows = [draw(LAWS[size]) for _ in range(len(draft) + 1)]
    uniforms = [draw(UNIFORMS) for _ in draft.tokens]
    return Case(p_rows, draft, proposal, uniforms)


def assert_same_decision(verifier: RatioVerifier, case: Case) -> None:
    chance = GivenUniforms(case.uniforms)
    expected = reference.RULES[verifier.name](case.p_rows, case.draft, chance)
    assume(chance.margin > MARGIN)
    path, dist_V = verifier.decide(case.p_MV, case.proposal, case.uniforms)
    assert path == list(expected.path)
    torch.testing.assert_close(
        dist_V / dist_V.sum(), tensor([expected.dist])[0], rtol=1e-4, atol=1e-5
    )


@MANY
@given(cases(trees=False))
def test_token(case: Case) -> None:
    assert_same_decision(TokenVerifier(), case)


@MANY
@given(cases(trees=False))
def test_block(case: Case) -> None:
    """And a chain given to the tree rule is judged as the block rule judges it."""
    assert_same_decision(BlockVerifier(), case)
    block = BlockVerifier().decide(case.p_MV, case.proposal, case.uniforms)
    tree = TreeVerifier().decide(case.p_MV, case.proposal, case.uniforms)
    assert block.path == tree.path
    torch.testing.assert_close(block.dist_V / block.dist_V.sum(), tree.dist_V / tree.dist_V.sum())


@MANY
@given(cases(trees=True))
def test_tree(case: Case) -> None:
    assert_same_decision(TreeVerifier(), case)


@settings(MANY, max_examples=1000)
@given(cases(trees=True), st.data())
def test_coupled(case: Case, data: st.DataObject) -> None:
    size = len(case.p_rows[0])
    draws = [data.draw(st.integers(0, size - 1)) for _ in case.p_rows]
    rows = [one_hot(y, size) for y in draws]
    expected = reference.coupled(rows, case.draft, GivenUniforms([]))
    path = match(case.proposal.tokens, case.proposal.parents, draws)
    assert path == list(expected.path)
    assert draws[path[-1] + 1 if path else 0] == expected.dist.index(1)


def test_conditional_rows_of_siblings_without_replacement_are_accepted_too() -> None:
    """q may come raw or with the earlier siblings already removed: same decision."""
    p_MV = torch.tensor([[0.25, 0.25, 0.5]] * 3)
    raw = torch.tensor([[0.5, 0.25, 0.25]] * 2)
    removed = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]])
    for u in (0.1, 0.4, 0.6, 0.9):
        made = [
            TreeVerifier().decide(
                p_MV, Proposal([0, 2], [-1, -1], Draw.WITHOUT_REPLACEMENT, q), [0.99, u]
            )
            for q in (raw, removed)
        ]
        assert made[0].path == made[1].path
        torch.testing.assert_close(made[0].dist_V, made[1].dist_V)


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier(), TreeVerifier()])
def test_ties_are_refused(verifier: RatioVerifier) -> None:
    """u < r is strict, so that u = 0 never keeps an impossible token."""
    p_MV = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    half = Proposal([0], None, Draw.SAMPLED, torch.tensor([[0.5, 0.5]]))
    assert verifier.decide(p_MV, half, [0.5]).path == []
    assert verifier.decide(p_MV, half, [0.5 - 2**-30]).path == [0]
    never = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert verifier.decide(never, half, [0.0]).path == []
    assert verifier.decide(never, Proposal([0]), [0.0]).path == []


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier(), TreeVerifier()])
def test_an_empty_residual_falls_back_to_p(verifier: RatioVerifier) -> None:
    """p = q up to rounding: the refusal has probability zero, and still yields a token."""
    p_MV = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    q_NV = torch.tensor([[0.3000001, 0.6999999]])
    path, dist_V = verifier.decide(p_MV, Proposal([0], None, Draw.SAMPLED, q_NV), [1 - 2**-53])
    assert path == []
    torch.testing.assert_close(dist_V, p_MV[0])
