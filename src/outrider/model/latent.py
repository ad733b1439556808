"""Latent attention: heads made of small vectors, as in DeepSeek V2 and V3.

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


@dataclass(slots=True, kw_only=True)
class LatentRows:
    """The same tensors as they are stored, but the rotating rows of each head come first, those
    of the first halves of pairs before those of the second."""

    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_NDR: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor

    def keys_and_values(self, size: Latent) -> tuple[torch.Tensor, torch.Tensor]:
        """[N * D, kv_rank] each: `kv_b` by heads of full size, zero where it says nothing."""
        num_heads, dim, _ = self.q_NDR.shape
        both = self.kv_b.view(num_heads, size.nope + size.value, size.kv_rank)
        keys = both.new_zeros(num_heads, dim, size.kv_rank)
        values = torch.zeros_like(keys)
        keys[:, size.rope :] = both[:, : size.nope]
        values[:, : size.value] = both[:, size.nope :]
        return keys.flatten(0, 1), values.flatten(0, 1)


def latent_rows(weights: Weights, layer: int) -> LatentRows:
    size = weights.config.latent
    assert size is not None
    pairs = weights.config.rope_pairs

    def read(name: str) -> torch.Tensor:
        return weights.layer(layer, f"self_attn.{name}.weight")

    def in_halves(rows: torch.Tensor) -> torch.Tensor:
        if not pairs:
            return rows
        of_pairs = rows.reshape(len(rows), size.rope // 2, 2, -1)
        return of_pairs.transpose(1, 2).flatten(1, 2)

    q = read("q_b_proj" if size.q_rank else "q_proj")
    q_NDR = q.view(-1, size.nope + size.rope, q.shape[-1])
    kv_a = read("kv_a_proj_with_mqa")
    return LatentRows(
        q_a=read("q_a_proj") if size.q_rank else None,
        q_a_norm=read("q_a_layernorm") if size.q_rank else None,
        q_NDR=torch.cat([in_halves(q_NDR[:, size.nope :]), q_NDR[:, : size.nope]], dim=1),
        kv_a=torch.cat([kv_a[: size.kv_rank], in_halves(kv_a[None, size.kv_rank :])[0]]),
        kv_a_norm=read("kv_a_layernorm"),
        kv_b=read("kv_b_proj"),
    )


def read_latent(
    weights: Weights, layer: int, place: Callable[[torch.Tensor], torch.Tensor]
) -> LatentLayer:
    """For the torch decoder, which rotates neighbours. `place` puts a tensor on its device."""
    size, rows = weights.config.latent, latent_rows(weights, layer)
    assert size is not None

    def neighbours(rotating: torch.Tensor) -> torch.Tensor:
        halves = rotating.reshape(len(rotating), 2, size.rope // 2, -1)
        return halves.transpose(1, 2).flatten(1, 2)

    q = torch.cat([neighbours(rows.q_NDR[:, : size.rope]), rows.q_NDR[:, size.rope :]], dim=1)
    shared = neighbours(rows.kv_a[None, size.kv_rank :])[0]
    return LatentLayer(
        config=size,
        q_a=None if rows.q_a is None else place(rows.q_a),
        q_a_norm=None if rows.q_a_norm is None else place(rows.q_a_norm),
        q_b=place(q.flatten(0, 1)),
        kv_a=place(torch.cat([rows.kv_a[: size.kv_rank], shared])),
        kv_a_norm=place(rows.kv_a_norm),
        kv_b=place(rows.kv_b),
    )
