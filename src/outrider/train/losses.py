"""Distillation losses between a drafter's distribution q and the target's distribution p.

The ratio rule accepts a drafted token with probability sum_v min(p, q) = 1 - TV(p, q), so the total
variation is the loss that matches the goal; forward KL has a better gradient far from the target.
All functions take logits, compute in fp32 and return one value per row, so that callers choose the
weights.

Shapes: N rows (positions), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from outrider.errors import UnknownName

Loss = Callable[[Tensor, Tensor], Tensor]


def forward_kl(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """KL(p || q): covers all tokens that are probable under the target."""
    log_p_NV = p_logits_NV.float().log_softmax(-1)
    log_q_NV = q_logits_NV.float().log_softmax(-1)
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)


def reverse_kl(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """KL(q || p): avoids tokens that are improbable under the target."""
    return forward_kl(p_logits_NV, q_logits_NV)


def jsd(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """Jensen-Shannon: KL to the even mixture, averaged over both sides; at most log 2."""
    p_NV = p_logits_NV.float().softmax(-1)
    q_NV = q_logits_NV.float().softmax(-1)
    mixture_NV = (0.5 * (p_NV + q_NV)).clamp_min(1e-20).log()
    from_p_N = (p_NV * (p_NV.clamp_min(1e-20).log() - mixture_NV)).sum(-1)
    from_q_N = (q_NV * (q_NV.clamp_min(1e-20).log() - mixture_NV)).sum(-1)
    return 0.5 * (from_p_N + from_q_N)


def tvd(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """Total variation: one minus the chance that the ratio rule accepts a draw from q."""
    p_NV = p_logits_NV.float().softmax(-1)
    q_NV = q_logits_NV.float().softmax(-1)
    return 0.5 * (p_NV - q_NV).abs().sum(-1)


LOSSES: dict[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
}


def get_loss(name: str) -> Loss:
    """The loss called `name`; raises UnknownName with the known names."""
    if name not in LOSSES:
        raise UnknownName("loss", name, LOSSES)
    return LOSSES[name]


def distil(
    q_NW: Tensor, p_NV: Tensor, tvd_share: Tensor, ids_W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(loss, alpha) per row: (1 - tvd_share) forward KL + tvd_share total variation.

    With `ids_W` the drafter has only these target ids: the KL is to the target's distribution
    renormalised on them, the total variation (and alpha) to the whole distribution.
    """
    p_full_NV = p_NV.float().softmax(-1)
    p_known_NW = p_full_NV if ids_W is None else p_full_NV[:, ids_W]
    log_q_NW = q_NW.float().log_softmax(-1)
    alpha_N = torch.minimum(p_known_NW, log_q_NW.exp()).sum(-1)
    goal_NW = p_known_NW / p_known_NW.sum(-1, keepdim=True).clamp_min(1e-9)
    kl_N = (goal_NW * (goal_NW.clamp_min(1e-20).log() - log_q_NW)).sum(-1)
    return (1 - tvd_share) * kl_N + tvd_share * (1 - alpha_N), alpha_N.detach()


@torch.no_grad()
def acceptance(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """alpha at temperature 1, per row: sum over the vocabulary of min(p, q)."""
    return 1.0 - tvd(q_logits_NV, p_logits_NV)


@torch.no_grad()
def greedy_agreement(q_logits_NV: Tensor, p_logits_NV: Tensor) -> Tensor:
    """1 where both sides have the same most likely token, per row."""
    return (q_logits_NV.argmax(-1) == p_logits_NV.argmax(-1)).float()
