"""The registry, the pairing check, and what `verify` promises around the decision cores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from outrider.contracts import Distributions, Draw, Proposal, SequenceView, Stream
from outrider.errors import LossyPairing, UnknownName
from outrider.noise import draw_key, gumbel
from outrider.verifiers import VERIFIERS, exact_pairing, make_verifier
from outrider.verifiers.ratio import accept_uniforms

COUPLED, DETERMINISTIC = Draw.COUPLED, Draw.DETERMINISTIC
SAMPLED, DISTINCT = Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT


@dataclass
class View:
    tokens: list[int]
    seed: int = 11
    sample_index: int = 0


@dataclass
class Rows:
    rows_RV: torch.Tensor
    starts: list[int]
    drawn: list[int] = field(default_factory=list)

    def draw(self) -> list[int]:
        return self.drawn

    def probs(self, start: int, stop: int) -> torch.Tensor:
        return self.rows_RV[start:stop]


def views(*lengths: int) -> list[SequenceView]:
    return [cast(SequenceView, View([0] * n, sample_index=i)) for i, n in enumerate(lengths)]


def uniform_rows(num_rows: int, size: int = 5) -> torch.Tensor:
    return torch.full((num_rows, size), 1 / size)


@pytest.mark.parametrize("name", VERIFIERS)
def test_registry(name: str) -> None:
    verifier = make_verifier(name)
    assert verifier.name == name
    assert verifier.trees == (name in {"coupled", "tree"})
    assert verifier.draws == (frozenset(Draw) if name == "coupled" else frozenset(Draw) - {COUPLED})


def test_unknown_name() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'coupled'"):
        make_verifier("couple")


@pytest.mark.parametrize(
    ("draws", "name", "expected"),
    [
        ({COUPLED, SAMPLED}, "coupled", COUPLED),
        ({SAMPLED, DETERMINISTIC}, "coupled", DETERMINISTIC),
        ({SAMPLED}, "coupled", SAMPLED),
        ({COUPLED, SAMPLED}, "token", SAMPLED),
        ({COUPLED, SAMPLED}, "block", SAMPLED),
        ({DETERMINISTIC}, "block", DETERMINISTIC),
        ({DISTINCT, DETERMINISTIC}, "tree", DISTINCT),
        ({DETERMINISTIC, COUPLED}, "tree", DETERMINISTIC),
    ],
)
def test_exact_pairings(draws: set[Draw], name: str, expected: Draw) -> None:
    assert exact_pairing(frozenset(draws), False, make_verifier(name)) is expected


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_coupled_drafts_are_refused_by_ratio_rules(name: str) -> None:
    with pytest.raises(LossyPairing, match="use verifier 'coupled'") as caught:
        exact_pairing(frozenset({COUPLED}), False, make_verifier(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["token", "block"])
def test_trees_are_refused_by_chain_rules(name: str) -> None:
    with pytest.raises(LossyPairing, match="use verifier 'tree' or 'coupled'"):
        exact_pairing(frozenset({DETERMINISTIC}), True, make_verifier(name))


def test_coupled_walks_chains_and_trees() -> None:
    proposals = [
        Proposal([4, 2, 3], None, COUPLED),
        Proposal([1, 4, 2, 3, 0], [-1, -1, 0, 1, 3], DETERMINISTIC),
        Proposal(),
    ]
    chain = [4, 2, 0, 1]  # 4 and 2 agree, then 0
    tree = [4, 0, 3, 0, 2, 0]  # 4 is node 1, behind it 3 is node 3, then 2
    draws = [*chain, *tree, 3]
    laws = Rows(uniform_rows(11), [0, 4, 10], draws)
    verdicts = make_verifier("coupled").verify(views(3, 4, 5), proposals, laws)
    assert [v.path for v in verdicts] == [[0, 1], [1, 3], []]
    assert [v.next_token for v in verdicts] == [0, 2, 3]
    assert verdicts[1].draws == draws[4:10]


def test_coupled_takes_the_first_of_equal_siblings() -> None:
    laws = Rows(uniform_rows(4), [0], [2, 1, 1, 0])
    [verdict] = make_verifier("coupled").verify(views(1), [Proposal([2, 2, 1], [-1, -1, 0])], laws)
    assert (verdict.path, verdict.next_token) == ([0, 2], 0)


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_an_empty_draft_draws_from_p_with_residual_noise(name: str) -> None:
    rows = torch.rand(3, 7, generator=torch.Generator().manual_seed(0)).softmax(-1)
    batch = views(2, 3, 9)
    laws = cast(Distributions, Rows(rows, [0, 1, 2]))
    verdicts = make_verifier(name).verify(batch, [Proposal() for _ in batch], laws)
    keys = [draw_key(v.seed, v.sample_index, len(v.tokens), Stream.RESIDUAL) for v in batch]
    expected = (rows.log() + gumbel(keys, 7, rows.device)).argmax(-1).tolist()
    assert [v.next_token for v in verdicts] == expected
    assert all(v.path == [] for v in verdicts)


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_a_verdict_does_not_depend_on_the_batch(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = (torch.rand(9, 6, generator=generator) * 3).softmax(-1)
    q = (torch.rand(6, 6, generator=generator) * 3).softmax(-1)
    proposals = [Proposal([i, 1, 2], None, SAMPLED, q[2 * i : 2 * i + 3]) for i in range(2)]
    batch = views(4, 6)
    verifier = make_verifier(name)
    together = verifier.verify(batch, proposals, Rows(rows, [0, 4]))
    alone = [verifier.verify([batch[i]], [proposals[i]], Rows(rows, [4 * i]))[0] for i in range(2)]
    assert together == alone


def test_uniforms_are_fresh_in_every_step() -> None:
    """Two steps that test the same position must not meet the same uniform."""
    seen = [accept_uniforms(cast(SequenceView, View([0] * n)), 4) for n in range(5, 9)]
    assert len({u for step in seen for u in step}) == 16
    assert seen[0][:2] == accept_uniforms(cast(SequenceView, View([0] * 5)), 2)


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_impossible_tokens_are_never_emitted(name: str) -> None:
    """A one-hot target row is greedy: the draft is kept iff it is the argmax."""
    p = torch.zeros(3, 4)
    p[[0, 1, 2], [2, 1, 3]] = 1.0
    q = torch.full((2, 4), 0.25)
    verifier = make_verifier(name)
    for sample in range(50):
        view = [cast(SequenceView, View([0], sample_index=sample))]
        for draft, path, token in [([2, 1], [0, 1], 3), ([2, 0], [0], 1), ([0, 1], [], 2)]:
            for proposal in (Proposal(draft), Proposal(draft, None, SAMPLED, q)):
                [verdict] = verifier.verify(view, [proposal], Rows(p, [0]))
                assert (verdict.path, verdict.next_token) == (path, token)


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_lossy_proposals_are_refused_at_the_last_moment(name: str) -> None:
    verifier = make_verifier(name)
    laws = Rows(uniform_rows(3), [0])
    with pytest.raises(LossyPairing, match="coupled"):
        verifier.verify(views(1), [Proposal([1], None, COUPLED)], laws)
    with pytest.raises(LossyPairing, match="without their q"):
        verifier.verify(views(1), [Proposal([1], None, SAMPLED)], laws)
    if not verifier.trees:
        with pytest.raises(LossyPairing, match="tree"):
            verifier.verify(views(1), [Proposal([1, 2], [-1, -1])], laws)
