"""Latent attention in torch: heads made of small vectors, as in DeepSeek V2 and V3.

The cache holds the heads' keys and values, values padded to the size of keys. The rotating
dimensions of a head come first, so that the rest of the decoder is the same for all families.

Shape legend: T tokens of the pass, N heads, D dimensions of a query or key, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.model.families.description import Latent
from outrider.model.tensors import Weights

_EPS = 1e-6  # of the norms of latent vectors, whatever the config says of the others


@dataclass(slots=True, kw_only=True)
class LatentLayer:
    """The weights of one layer's queries, keys and values."""

    config: Latent
    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor  # [N * D, q_rank or H], the rotating rows of each head first
    kv_a: torch.Tensor  # [kv_rank + rope, H]
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor  # [N * (nope + value), kv_rank]

    def heads(self, h_TH: torch.Tensor, dim: int) -> torch.Tensor:
        """[T, 3 * N, D]: queries, keys and values, not yet rotated."""
        size, num_tokens = self.config, len(h_TH)
        x = h_TH
        if self.q_a is not None and self.q_a_norm is not None:
            x = F.linear(h_TH, self.q_a)
            x = F.rms_norm(x, self.q_a_norm.shape, self.q_a_norm, _EPS)
        q_TND = F.linear(x, self.q_b).view(num_tokens, -1, dim)
        latent, rotating = F.linear(h_TH, self.kv_a).tensor_split([size.kv_rank], dim=-1)
        latent = F.rms_norm(latent, self.kv_a_norm.shape, self.kv_a_norm, _EPS)
        both = F.linear(latent, self.kv_b).view(num_tokens, -1, size.nope + size.value)
        num_heads = q_TND.shape[1]
        heads = h_TH.new_zeros(num_tokens, 3 * num_heads, dim)
        heads[:, :num_heads] = q_TND
        keys, values = heads[:, num_heads : 2 * num_heads], heads[:, 2 * num_heads :]
        keys[..., : size.rope] = rotating[:, None]
        keys[..., size.rope :] = both[..., : size.nope]
        values[..., : size.value] = both[..., size.nope :]
        return heads


def read_latent(
    weights: Weights, layer: int, place: Callable[[torch.Tensor], torch.Tensor]
) -> LatentLayer:
    """`place` puts a tensor on the decoder's device."""
    size = weights.config.latent
    assert size is not None
    pairs = weights.config.rope_pairs

    def read(name: str) -> torch.Tensor:
        return weights.layer(layer, f"self_attn.{name}.weight")

    q = read("q_b_proj" if size.q_rank else "q_proj")
    of_heads = q.view(-1, size.nope + size.rope, q.shape[-1])
    rotating = turned(of_heads[:, size.nope :], pairs)
    q = torch.cat([rotating, of_heads[:, : size.nope]], dim=1).flatten(0, 1)
    kv_a = read("kv_a_proj_with_mqa")
    shared = turned(kv_a[None, size.kv_rank :], pairs)[0]
    return LatentLayer(
        config=size,
        q_a=place(read("q_a_proj")) if size.q_rank else None,
        q_a_norm=place(read("q_a_layernorm")) if size.q_rank else None,
        q_b=place(q),
        kv_a=place(torch.cat([kv_a[: size.kv_rank], shared])),
        kv_a_norm=place(read("kv_a_layernorm")),
        kv_b=place(read("kv_b_proj")),
    )


def turned(rows: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Rotating rows [n, rope, ...] such that the two numbers of a pair are neighbours."""
    if pairs:
        return rows
    count, size, *rest = rows.shape
    return rows.reshape(count, 2, size // 2, *rest).transpose(1, 2).flatten(1, 2)
