"""The layers of drafting heads: rotary positions, gated feed-forward, attention.

Shapes: B sequences, Q query positions, C key positions, N heads, K kv heads, D head size, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.rope import RopeConfig

KeyValue = tuple[Tensor, Tensor]  # keys after rotation and values, [B, K, C, D] each


def rotary(positions_BQ: Tensor, head_dim: int, rope: RopeConfig) -> KeyValue:
    """cos and sin, [B, 1, Q, D] float32."""
    frequencies = rope.frequencies(head_dim).to(positions_BQ.device)
    angles_BQD = positions_BQ[..., None].float() * frequencies
    angles_BQD = torch.cat([angles_BQD, angles_BQD], dim=-1)
    cos_BQD, sin_BQD = angles_BQD.cos(), angles_BQD.sin()
    if rope.attention_factor != 1.0:
        cos_BQD, sin_BQD = cos_BQD * rope.attention_factor, sin_BQD * rope.attention_factor
    return cos_BQD[:, None], sin_BQD[:, None]


def rotate(x_BNQD: Tensor, cos_sin: KeyValue) -> Tensor:
    """Applies rotary positions; the result has the type of `x_BNQD`."""
    cos, sin = (part.to(x_BNQD.dtype) for part in cos_sin)
    first, second = x_BNQD.chunk(2, dim=-1)
    return x_BNQD * cos + torch.cat([-second, first], dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BQH: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x_BQH)) * self.up_proj(x_BQH))
        return output


class Attention(nn.Module):
    """Grouped-query attention whose caller keeps the keys and values.

    `normed` adds Qwen3's per-head norm of queries and keys, `biased` Qwen2's biases of queries,
    keys and values, `output_biased` that of the last projection.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        normed: bool = False,
        biased: bool = False,
        output_biased: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=biased)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=biased)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=biased)
        self.o_proj = nn.Linear(num_heads * head_dim, output_size, bias=output_biased)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps) if normed else None
        self.k_norm = nn.RMSNorm(head_dim, eps=eps) if normed else None

    def queries(self, x_BQH: Tensor, cos_sin: KeyValue) -> Tensor:
        heads_BQND = self.q_proj(x_BQH).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None:
            heads_BQND = self.q_norm(heads_BQND)
        return rotate(heads_BQND.transpose(1, 2), cos_sin)

    def keys_values(self, x_BCH: Tensor, cos_sin: KeyValue) -> KeyValue:
        keys_BCKD = self.k_proj(x_BCH).unflatten(-1, (-1, self.head_dim))
        if self.k_norm is not None:
            keys_BCKD = self.k_norm(keys_BCKD)
        values_BCKD = self.v_proj(x_BCH).unflatten(-1, (-1, self.head_dim))
        return rotate(keys_BCKD.transpose(1, 2), cos_sin), values_BCKD.transpose(1, 2)

    def attend(self, queries_BNQD: Tensor, past: KeyValue, mask: Tensor | None) -> Tensor:
        """[B, Q, output]; True in `mask` means visible; None: everything is visible."""
        return self.output(self.mix(queries_BNQD, past, mask))

    @staticmethod
    def mix(queries_BNQD: Tensor, past: KeyValue, mask: Tensor | None) -> Tensor:
        """The attended values of each query, [B, N, Q, D]: `attend` without the last projection."""
        mixed_BNQD: Tensor = F.scaled_dot_product_attention(
            queries_BNQD,
            past[0].to(queries_BNQD.dtype),
            past[1].to(queries_BNQD.dtype),
            attn_mask=mask,
            enable_gqa=queries_BNQD.shape[1] != past[0].shape[1],
        )
        return mixed_BNQD

    def output(self, mixed_BNQD: Tensor) -> Tensor:
        output: Tensor = self.o_proj(mixed_BNQD.transpose(1, 2).flatten(2))
        return output


def join(parts: list[KeyValue]) -> KeyValue:
    """Concatenates the keys and values of several pieces."""
    return torch.cat([keys for keys, _ in parts], dim=2), torch.cat([v for _, v in parts], dim=2)
