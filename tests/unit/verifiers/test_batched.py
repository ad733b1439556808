"""Batches of drafts are judged as each of them alone is, given the same laws and uniforms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
import torch

from outrider.contracts import Draw, Proposal, SequenceView
from outrider.verifiers.batched import Batch, walk
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.ratio import RatioVerifier, accept_uniforms, draw_next
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.tree import TreeVerifier

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = (Draw.SAMPLED, Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT)


@dataclass
class View:
    tokens: list[int]
    seed: int
    sample_index: int


def laws(random: torch.Generator, rows: int, size: int) -> torch.Tensor:
    """Some of them sharp, and with impossible tokens."""
    logits = torch.randn(rows, size, generator=random) * 3
    logits[torch.rand(rows, size, generator=random) < 0.2] = -torch.inf
    logits[:, 0] = 0.0
    return logits.softmax(-1)


def proposal(random: torch.Generator, kind: Draw, trees: bool, size: int) -> Proposal:
    """Siblings share a law; without replacement they differ."""
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[torch.Tensor] = []
    for node in range(int(torch.randint(0, 7, (), generator=random))):
        parent = int(torch.randint(-1, node, (), generator=random)) if trees and node else node - 1
        siblings = [i for i in range(node) if parents[i] == parent]
        dist_V = rows[siblings[0]] if siblings else laws(random, 1, size)[0]
        left_V = dist_V.clone()
        if kind is not Draw.SAMPLED:
            left_V[[tokens[i] for i in siblings]] = 0.0
        if not left_V.sum() > 0:
            break
        tokens.append(int(torch.multinomial(left_V, 1, generator=random)))
        parents.append(parent)
        rows.append(dist_V)
    q = torch.stack(rows).to(DEVICE) if rows and kind is not Draw.DETERMINISTIC else None
    return Proposal(tokens, parents if trees else None, kind, q)


def near(p_MV: torch.Tensor, proposal: Proposal) -> torch.Tensor:
    """Moved towards the drafts' laws, so that some are kept."""
    parents = proposal.parents or range(-1, len(proposal) - 1)
    for node, (token, parent) in enumerate(zip(proposal.tokens, parents, strict=False)):
        p_MV[parent + 1] /= 4
        if proposal.q is None:
            p_MV[parent + 1, token] += 0.75
        else:
            p_MV[parent + 1] += 0.75 * proposal.q[node]
    return p_MV


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier(), TreeVerifier()])
@pytest.mark.parametrize("seed", range(12))
def test_same_verdicts(verifier: RatioVerifier, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    size = 12
    proposals = [
        proposal(random, KINDS[i % 3], verifier.trees and i % 4 > 0, size) for i in range(16)
    ]
    views = [cast(SequenceView, View([0] * (1 + i), seed, i)) for i in range(16)]
    p = [near(laws(random, 1 + len(x), size).to(DEVICE), x) for x in proposals]
    uniforms = [accept_uniforms(v, len(x)) for v, x in zip(views, proposals, strict=True)]
    alone = [
        verifier.decide(rows, x, some) for rows, x, some in zip(p, proposals, uniforms, strict=True)
    ]
    _, dists_SV = verifier.decide_all(Batch.of(p, proposals, uniforms))
    verdicts = verifier.verify_all(views, proposals, p)
    assert [verdict.path for verdict in verdicts] == [decision.path for decision in alone]
    assert len({len(verdict.path) for verdict in verdicts}) > 1
    for dist_V, decision in zip(dists_SV, alone, strict=True):
        torch.testing.assert_close(dist_V, decision.dist_V, rtol=1e-5, atol=1e-7)
    assert [verdict.next_token for verdict in verdicts] == draw_next(views, alone)


def test_a_walk_leaves_every_node_after_its_trials() -> None:
    assert walk([-1, 0, 0, -1]) == [
        (0, False), (1, False), (1, True), (2, False), (2, True), (0, True), (3, False), (3, True),
    ]  # fmt: skip
    assert walk([]) == []


@pytest.mark.parametrize("verifier", [TokenVerifier(), BlockVerifier(), TreeVerifier()])
@pytest.mark.parametrize("kind", KINDS)
def test_decisions_never_ask_the_device(verifier: RatioVerifier, kind: Draw) -> None:
    """Tensors without data have no numbers to ask for, and do not mix with the host's."""
    p = [torch.empty(num, 12, device="meta") for num in (4, 1, 3)]
    q = torch.empty(3, 12, device="meta")
    parents = [-1, -1, 0] if verifier.trees else None
    proposals = [
        Proposal([1, 2, 3], parents, kind, q),
        Proposal(),
        Proposal([4, 5], None, kind, q[:2]),
    ]
    batch = Batch.of(p, proposals, [[0.1, 0.2, 0.3], [], [0.5, 0.6]])
    kept_S, dists_SV = verifier.decide_all(batch)
    assert kept_S.shape == (3,)
    assert dists_SV.shape == (3, 12)
    assert dists_SV.dtype == torch.float32
