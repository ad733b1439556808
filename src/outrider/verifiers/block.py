"""The block rule (Sun et al. 2024, "Block verification accelerates speculative decoding").

Judges a draft as a whole, from its end: an improbable token may be accepted because of
probable ones around it. In expectation the rule never accepts less than the token rule. For chains.

    w_0 = 1;  w_i = min(1, w_{i-1} p_i(x_i)/q_i(x_i))
    Z_i = sum_v max(0, w_i p_{i+1}(v) - q_{i+1}(v));   h_i = Z_i / (Z_i + 1 - w_i),  h_K = w_K
    accept the largest i with u_i < h_i; then y ~ norm(max(0, w_i p_{i+1} - q_{i+1})), or p_{K+1}

The cap in w_i is essential: with the plain product of ratios the output is biased.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.contracts import Proposal
from outrider.verifiers.batched import EPS, decide_trials
from outrider.verifiers.ratio import (
    Decision,
    RatioVerifier,
    at_tokens,
    draft_distribution,
    ratio,
    residual,
)


class BlockVerifier(RatioVerifier):
    name = "block"

    decide_all = staticmethod(decide_trials)

    def decide(self, p_MV: torch.Tensor, proposal: Proposal, uniforms: Seq[float]) -> Decision:
        q_NV = draft_distribution(proposal, p_MV.device)
        return decide_block(p_MV, q_NV, proposal.tokens, uniforms)


def decide_block(
    p_MV: torch.Tensor, q_NV: torch.Tensor | None, tokens: list[int], uniforms: Seq[float]
) -> Decision:
    """`q_NV is None`: one-hot at the drafted tokens."""
    num_drafts = len(tokens)
    if not tokens:
        return Decision([], p_MV[0])
    p_x, q_x = at_tokens(p_MV[:-1], q_NV, tokens)
    weights = [1.0]  # weights[i]: after i tokens
    for p, q in zip(p_x, q_x, strict=True):
        weights.append(min(1.0, weights[-1] * ratio(p, q)))
    if uniforms[-1] < weights[-1]:
        return Decision(list(range(num_drafts)), p_MV[-1])

    masses = residual_masses(p_MV[:-1], q_NV, p_x, weights[:-1])
    kept = num_drafts - 1
    while kept > 0 and not uniforms[kept - 1] < keep_probability(masses[kept], weights[kept]):
        kept -= 1
    dist_V = p_MV[kept]
    if masses[kept] > EPS:
        dist_V = residual(dist_V, None if q_NV is None else q_NV[kept], tokens[kept], weights[kept])
    return Decision(list(range(kept)), dist_V)


def residual_masses(
    p_NV: torch.Tensor, q_NV: torch.Tensor | None, p_x: list[float], weights: list[float]
) -> list[float]:
    """sum_v max(0, w p - q) of every row."""
    if q_NV is None:  # one-hot: everything but the drafted token survives
        return [w * max(0.0, 1.0 - p) for w, p in zip(weights, p_x, strict=True)]
    weights_N1 = torch.tensor(weights, dtype=p_NV.dtype, device=p_NV.device)[:, None]
    masses: list[float] = (p_NV * weights_N1).sub_(q_NV).clamp_(min=0.0).sum(dim=-1).tolist()
    return masses


def keep_probability(mass: float, weight: float) -> float:
    """Z / (Z + 1 - w), with 0/0 = 1."""
    owed = 1.0 - weight
    return mass / (mass + owed) if mass + owed > 0 else 1.0
