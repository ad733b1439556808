"""The token rule (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

Accept draft x with probability min(1, p(x)/q(x)). At the first rejection emit one token from
norm(max(0, p - q)); if all are accepted, one bonus token from p. Chains only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.contracts import Proposal
from outrider.verifiers.batched import EPS, decide_tokens
from outrider.verifiers.ratio import (
    Decision,
    RatioVerifier,
    at_tokens,
    draft_distribution,
    ratio,
    residual,
)


class TokenVerifier(RatioVerifier):
    name = "token"

    decide_all = staticmethod(decide_tokens)

    def decide(self, p_MV: torch.Tensor, proposal: Proposal, uniforms: Seq[float]) -> Decision:
        q_NV = draft_distribution(proposal, p_MV.device)
        return decide_token(p_MV, q_NV, proposal.tokens, uniforms)


def decide_token(
    p_MV: torch.Tensor, q_NV: torch.Tensor | None, tokens: list[int], uniforms: Seq[float]
) -> Decision:
    """`q_NV is None`: one-hot at the drafted tokens."""
    if not tokens:
        return Decision([], p_MV[0])
    p_x, q_x = at_tokens(p_MV[:-1], q_NV, tokens)
    for i, token in enumerate(tokens):
        if uniforms[i] < ratio(p_x[i], q_x[i]):
            continue
        dist_V = residual(p_MV[i], None if q_NV is None else q_NV[i], token)
        if float(dist_V.sum()) <= EPS:
            dist_V = p_MV[i]
        return Decision(list(range(i)), dist_V)
    return Decision(list(range(len(tokens))), p_MV[-1])
