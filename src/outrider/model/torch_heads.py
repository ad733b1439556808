"""What the compact decoder does to queries and keys before attention, and to logits.

Shape legend: T tokens of the pass, N heads of queries, keys and values, D head size,
R rows with logits, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.model.families.description import DecoderConfig, Growth
from outrider.model.torch_weights import Layer


def norm_heads(config: DecoderConfig, layer: Layer, qkv_TND: torch.Tensor) -> None:
    """Normalises the queries and keys among `qkv_TND` in place."""
    num_q = config.num_heads
    for first, last, weight in (
        (0, num_q, layer.q_norm_D),
        (num_q, num_q + layer.num_kv, layer.k_norm_D),
    ):
        if weight is None:
            continue
        heads = qkv_TND[:, first:last]
        if config.qk_span == "row":
            heads.copy_(_normalised(config, heads.flatten(1), weight).view_as(heads))
        elif config.qk_span == "heads":
            one = torch.ones_like(weight[: heads.shape[-1]])
            heads.copy_(_normalised(config, heads, one) * weight.view(heads.shape[1:]))
        else:
            qkv_TND[:, first:last] = _normalised(config, heads, weight)


def _normalised(config: DecoderConfig, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = F.layer_norm if config.qk_layer_norm else F.rms_norm
    return norm(x, weight.shape, weight, eps=config.norm_eps)


def grown(growth: Growth, positions_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, 1, 1]: the factors of queries."""
    steps = torch.floor((positions_T.float() + growth.first) / growth.every)
    return (1 + growth.factor * torch.log1p(steps)).to(dtype)[:, None, None]


def rotate(x_THD: torch.Tensor, turns: torch.Tensor) -> None:
    """Rope in place: pairs of `x_THD` times the unit complex numbers `turns`, [T, 1, D / 2]."""
    pairs = x_THD.view(*x_THD.shape[:-1], -1, 2)
    if x_THD.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns)))


def finish_logits(
    config: DecoderConfig, logits_RV: torch.Tensor, bias_V: torch.Tensor | None
) -> torch.Tensor:
    """Bias, scale and cap of logits, in place as far as possible."""
    if bias_V is not None:
        logits_RV += bias_V
    if config.logit_scale != 1.0:
        logits_RV *= config.logit_scale
    if config.logit_cap is not None:
        logits_RV = torch.tanh(logits_RV / config.logit_cap) * config.logit_cap
    return logits_RV
