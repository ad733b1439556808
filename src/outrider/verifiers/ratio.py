"""Shared by the ratio rules: the residual distribution, the noise, and verdicts from rows.

A rule is a pure *decision core*: it maps rows of p, the proposal and one uniform per node to the
accepted path and the distribution of the next token. `RatioVerifier` adds the noise and draws.

Noise must be fresh in every step. The block and tree rules use uniforms of nodes *after* the last
accepted one, and the next step drafts the same positions again. A uniform keyed by position alone
would return with a known bias. So step and node are the key.

Shape legend: N draft nodes of one sequence, M = N + 1 rows (row 0 is the root), V vocabulary,
S sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from outrider.contracts import Distributions, Draw, Proposal, SequenceView, Stream, Verdict
from outrider.errors import LossyPairing
from outrider.noise import (
    as_signed,
    draw_key,
    draw_keys,
    gumbel,
    gumbel_of,
    sequence_key,
    uniform,
)
from outrider.verifiers.batched import Batch

RATIO_DRAWS = frozenset({Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT, Draw.DETERMINISTIC})


class Decision(NamedTuple):
    """The accepted nodes, and the unnormalised float32 distribution of the next token."""

    path: list[int]
    dist_V: torch.Tensor


class RatioVerifier(ABC):
    """Base of the ratio rules: subclasses define `name`, `trees` and `decide`."""

    name: str
    draws = RATIO_DRAWS
    trees = False
    needs_draws_alone = False

    @staticmethod
    @abstractmethod
    def decide_all(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`decide` for many sequences: the last accepted row of each, and [S, V] distributions."""

    @abstractmethod
    def decide(self, p_MV: torch.Tensor, proposal: Proposal, uniforms: Seq[float]) -> Decision:
        """The pure decision; `uniforms[j]` in [0, 1) belongs to node j. Mutates nothing."""

    def verify(
        self, views: Seq[SequenceView], proposals: Seq[Proposal], distributions: Distributions
    ) -> list[Verdict]:
        """Raises LossyPairing for a proposal this rule is not exact for."""
        p: list[torch.Tensor] = []
        for proposal, start in zip(proposals, distributions.starts, strict=True):
            self._check(proposal)
            p.append(distributions.probs(start, start + 1 + len(proposal)))
        if p and p[0].device.type != "cpu" and any(map(len, proposals)):
            return self.verify_all(views, proposals, p)
        decisions = []
        for view, proposal, p_MV in zip(views, proposals, p, strict=True):
            decisions.append(self.decide(p_MV, proposal, accept_uniforms(view, len(proposal))))
        next_tokens = draw_next(views, decisions)
        return [Verdict(d.path, y) for d, y in zip(decisions, next_tokens, strict=True)]

    def verify_all(
        self, views: Seq[SequenceView], proposals: Seq[Proposal], p: Seq[torch.Tensor]
    ) -> list[Verdict]:
        """All verdicts with a single transfer of two numbers per sequence to the host."""
        uniforms = [accept_uniforms(v, len(x)) for v, x in zip(views, proposals, strict=True)]
        kept_S, dists_SV = self.decide_all(Batch.of(p, proposals, uniforms))
        device, most = dists_SV.device, 1 + max(map(len, proposals))
        paths = [_paths(proposal) for proposal in proposals]
        depths = [[len(path) for path in some] + [0] * (most - len(some)) for some in paths]
        depth_S = torch.tensor(depths, device=device).gather(1, kept_S[:, None])[:, 0]
        secrets = [sequence_key(v.seed, v.sample_index, Stream.RESIDUAL) for v in views]
        lengths_S = torch.tensor([len(v.tokens) for v in views], device=device)
        keys_S = draw_keys(as_signed(secrets, device), lengths_S + depth_S)
        noise_SV = gumbel_of(keys_S, dists_SV.shape[1])
        tokens_S = noise_SV.add_(dists_SV.log()).argmax(dim=-1)
        found = torch.stack([kept_S, tokens_S], 1).tolist()
        return [Verdict(some[row], y) for some, (row, y) in zip(paths, found, strict=True)]

    def _check(self, proposal: Proposal) -> None:
        if not proposal.tokens:
            return
        source = proposal.source or "a proposer"
        if proposal.draw not in self.draws:
            raise LossyPairing(
                f"{source} drafted {proposal.draw.value} tokens, which the {self.name} rule cannot "
                "judge; use the coupled verifier"
            )
        if proposal.draw is not Draw.DETERMINISTIC and proposal.q is None:
            raise LossyPairing(f"{source} drafted {proposal.draw.value} tokens without their q")
        if not self.trees and not is_chain(proposal.parents):
            raise LossyPairing(
                f"{source} drafted a tree, which the {self.name} rule cannot judge; "
                "use the tree or the coupled verifier"
            )


def accept_uniforms(view: SequenceView, num_nodes: int) -> list[float]:
    """One uniform per node of this step, keyed by committed length (the step) and node."""
    key = draw_key(view.seed, view.sample_index, len(view.tokens), Stream.ACCEPT)
    return [uniform(key, lane) for lane in range(num_nodes)]


def draw_next(views: Seq[SequenceView], decisions: Seq[Decision]) -> list[int]:
    """The correction or bonus of every sequence: argmax(log p + Gumbel), not normalised."""
    if not decisions:
        return []
    keys = [
        draw_key(v.seed, v.sample_index, len(v.tokens) + len(d.path), Stream.RESIDUAL)
        for v, d in zip(views, decisions, strict=True)
    ]
    dists_SV = torch.stack([d.dist_V for d in decisions])
    noise_SV = gumbel(keys, dists_SV.shape[1], dists_SV.device)
    tokens: list[int] = noise_SV.add_(dists_SV.log()).argmax(dim=-1).tolist()
    return tokens


def _paths(proposal: Proposal) -> list[list[int]]:
    """For every row, root first: the nodes on its path."""
    paths: list[list[int]] = [[]]
    for node in range(len(proposal)):
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        paths.append([*paths[parent + 1], node])
    return paths


def is_chain(parents: list[int] | None) -> bool:
    return parents is None or all(parent == i - 1 for i, parent in enumerate(parents))


def draft_distribution(proposal: Proposal, device: torch.device) -> torch.Tensor | None:
    """q on the device of p; None stands for one-hot rows, which are never built."""
    if proposal.draw is Draw.DETERMINISTIC or proposal.q is None:
        return None
    return proposal.q.to(device)


def at_tokens(
    p_NV: torch.Tensor, q_NV: torch.Tensor | None, tokens: list[int]
) -> tuple[list[float], list[float]]:
    """p and q of every drafted token; `q_NV is None` is one-hot."""
    index_N1 = torch.tensor(tokens, device=p_NV.device).unsqueeze(1)
    p_x: list[float] = p_NV.gather(1, index_N1).view(-1).tolist()
    if q_NV is None:
        return p_x, [1.0] * len(tokens)
    q_x: list[float] = q_NV.gather(1, index_N1).view(-1).tolist()
    return p_x, q_x


def ratio(p: float, q: float) -> float:
    """p/q; 0 if q is 0, since such a token was not drawn from q."""
    return p / q if q > 0 else 0.0


def residual(
    p_V: torch.Tensor, q_V: torch.Tensor | None, token: int, weight: float = 1.0
) -> torch.Tensor:
    """max(0, weight * p - q) as a new tensor; `q_V is None` is one-hot at `token`."""
    dist_V = p_V * weight
    if q_V is None:
        dist_V[token] = 0.0  # weight * p(token) <= 1
        return dist_V
    return dist_V.sub_(q_V).clamp_(min=0.0)
