"""What the GPU decoder computes, operation by operation, and all of it in torch: for a machine
without a CUDA device, and as the reference of the kernels (`triton_ops`) in the tests.

Every operation writes into buffers it is given and allocates nothing, so that a pass can be
captured in a CUDA graph. Shape legend: T tokens of the pass, S sequences of M tokens each, V
vocabulary, H hidden, Q query heads, K key/value heads, D head size, P slots of the KV store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from outrider.noise import draw_keys, gumbel_of

MAX_WIDTH = 16  # new tokens of a sequence in one pass


@dataclass(slots=True)
class Pass:
    """Where the tokens of a pass lie, on the device. T = S * M; padding has slot -1, mask 0."""

    num_sequences: int
    width: int  # M
    tokens_T: torch.Tensor  # int32, as all but masks and keys
    positions_T: torch.Tensor
    slots_T: torch.Tensor  # physical
    masks_T: torch.Tensor  # int64: bit j is set if the j-th new token of the sequence is seen
    contexts_S: torch.Tensor
    lengths_S: torch.Tensor  # context and new tokens
    tables_SW: torch.Tensor


class Ops(Protocol):
    """The operations; `out` and stores are written, everything else is read."""

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        out_TN: torch.Tensor,
        *,
        scale_N: torch.Tensor | None = None,
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        """out (+)= x W' + b, or silu(gate) * up of it.

        `scale_N` (float32): the weights are int8, and row n stands for scale_N[n] times itself.
        """
        ...

    def norm(
        self, x_TH: torch.Tensor, norm_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        """RMSNorm."""
        ...

    def rope(
        self,
        qkv_THD: torch.Tensor,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        turns: tuple[torch.Tensor, torch.Tensor],
        where: Pass,
        store_2PKD: torch.Tensor,
    ) -> None:
        """Norms and turns queries and keys, queries in place; keys and values go to the store.

        `turns` are cosines and sines by position, [positions, D / 2].
        """
        ...

    def attend(
        self,
        qkv_THD: torch.Tensor,
        store_2PKD: torch.Tensor,
        where: Pass,
        page: int,
        out_TQD: torch.Tensor,
    ) -> None:
        """Attention of every token to its context and to its ancestors among the new tokens."""
        ...

    def draw(
        self,
        logits_TV: torch.Tensor,
        num_tokens: int,
        temperature_R: torch.Tensor,
        keys_T: torch.Tensor,
        out: torch.Tensor,
        *,
        every: int = 1,
    ) -> None:
        """Draws at rows every - 1, 2 * every - 1, ... into the 1-d view `out`, -1 for a NaN.

        `temperature_R` has an entry per draw, `keys_T` (draw keys of `outrider.noise`, as int64)
        one per row.
        """
        ...

    def place(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        secrets_S: torch.Tensor,
        offset: int,
        page: int,
        where: Pass,
        keys_T: torch.Tensor,
    ) -> None:
        """Lays out a pass over `where.width` tokens of each line, from `offset` on.

        A line holds a sequence's last two committed tokens, then its drafts; `lengths_S` counts
        the committed ones; `secrets_S` are sequence keys of `outrider.noise`.
        """
        ...

    def settle(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        draws_SM: torch.Tensor,
        report: torch.Tensor,
    ) -> None:
        """The verdict on chains: keeps the drafts that equal the target's draws, and one draw.

        Updates line and length; `report[s]` is the number of emitted tokens, then the draws.
        """
        ...


class TorchOps:
    """The reference: what the kernels must compute, in plain torch, on any device."""

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        out_TN: torch.Tensor,
        *,
        scale_N: torch.Tensor | None = None,
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        if scale_N is not None:
            weight_NK = weight_NK.to(x_TK.dtype) * scale_N[:, None].to(x_TK.dtype)
        y = F.linear(x_TK, weight_NK, bias_N)
        if gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        out_TN.copy_(out_TN + y if add else y)

    def norm(
        self, x_TH: torch.Tensor, norm_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        out_TH.copy_(F.rms_norm(x_TH, norm_H.shape, norm_H, eps))

    def rope(
        self,
        qkv_THD: torch.Tensor,
        q_norm_D: torch.Tensor | None,
        k_norm_D: torch.Tensor | None,
        eps: float,
        turns: tuple[torch.Tensor, torch.Tensor],
        where: Pass,
        store_2PKD: torch.Tensor,
    ) -> None:
        num_kv = store_2PKD.shape[2]
        num_q = qkv_THD.shape[1] - 2 * num_kv
        turned = qkv_THD[:, : num_q + num_kv]
        if q_norm_D is not None and k_norm_D is not None:
            parts = (turned[:, :num_q], q_norm_D), (turned[:, num_q:], k_norm_D)
            turned = torch.cat([F.rms_norm(x, norm.shape, norm, eps) for x, norm in parts], 1)
        even, odd = turned[..., 0::2].float(), turned[..., 1::2].float()
        cosine, sine = (table[where.positions_T][:, None] for table in turns)
        pairs = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
        qkv_THD[:, : num_q + num_kv] = pairs.flatten(-2).to(qkv_THD.dtype)
        real = where.slots_T >= 0
        slots = where.slots_T[real].long()
        store_2PKD[0, slots] = qkv_THD[real, num_q : num_q + num_kv]
        store_2PKD[1, slots] = qkv_THD[real, num_q + num_kv :]

    def attend(
        self,
        qkv_THD: torch.Tensor,
        store_2PKD: torch.Tensor,
        where: Pass,
        page: int,
        out_TQD: torch.Tensor,
    ) -> None:
        num_kv, dim = store_2PKD.shape[2:]
        num_q = out_TQD.shape[1]
        for s in range(where.num_sequences):
            rows = slice(s * where.width, (s + 1) * where.width)
            context, length = int(where.contexts_S[s]), int(where.lengths_S[s])
            slot = torch.arange(length, device=qkv_THD.device)
            place = where.tables_SW[s][slot // page].long().clamp(min=0) * page + slot % page
            k_LKD, v_LKD = store_2PKD[:, place]
            new = (slot - context).clamp(min=0)
            own = (where.masks_T[rows, None] >> new) & 1
            seen_ML = (slot < context) | own.bool()
            q = qkv_THD[rows, :num_q].view(where.width, -1, num_kv, dim)
            score = torch.einsum("mgkd,lkd->mgkl", q, k_LKD).float() * dim**-0.5
            score = score.masked_fill(~seen_ML[:, None, None], -torch.inf)
            p = score.softmax(-1).nan_to_num(0.0)  # padding may see nothing
            out = torch.einsum("mgkl,lkd->mgkd", p.to(v_LKD.dtype), v_LKD)
            out_TQD[rows] = out.reshape(where.width, num_q, dim)

    def draw(
        self,
        logits_TV: torch.Tensor,
        num_tokens: int,
        temperature_R: torch.Tensor,
        keys_T: torch.Tensor,
        out: torch.Tensor,
        *,
        every: int = 1,
    ) -> None:
        rows = slice(every - 1, None, every)
        temperature = temperature_R[: len(logits_TV) // every, None]
        score = logits_TV[rows, :num_tokens] / torch.where(temperature > 0, temperature, 1.0)
        noisy = score + gumbel_of(keys_T[: len(logits_TV)][rows], num_tokens)
        best = torch.where(temperature > 0, noisy, score).max(dim=-1)
        out.copy_(best.indices.masked_fill(best.values.isnan(), -1))

    def place(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        secrets_S: torch.Tensor,
        offset: int,
        page: int,
        where: Pass,
        keys_T: torch.Tensor,
    ) -> None:
        width = where.width
        start = lengths_S - 2 + offset
        step = torch.arange(width, dtype=torch.int32, device=line_SL.device)
        position = start[:, None] + step
        where.tokens_T.copy_(line_SL[:, offset : offset + width].reshape(-1).clamp(min=0))
        where.positions_T.copy_(position.reshape(-1))
        table = F.pad(where.tables_SW, (0, 1), value=-1)  # what lies beyond it has no page
        pages = table.gather(1, (position // page).long().clamp(max=table.shape[1] - 1))
        slots = torch.where(pages < 0, -1, pages * page + position % page)
        where.slots_T.copy_(slots.reshape(-1))
        where.masks_T.copy_(((2 << step.long()) - 1).repeat(where.num_sequences))
        where.contexts_S.copy_(start)
        where.lengths_S.copy_(start + width)
        keys_T[: position.numel()] = draw_keys(secrets_S[:, None], position + 1).reshape(-1)

    def settle(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        draws_SM: torch.Tensor,
        report: torch.Tensor,
    ) -> None:
        num_drafts = draws_SM.shape[1] - 1
        same = line_SL[:, 2 : 2 + num_drafts] == draws_SM[:, :num_drafts]
        accepted = same.int().cumprod(1).sum(1, keepdim=True)
        report[:, :1] = accepted + 1
        report[:, 1:] = draws_SM
        before, last = line_SL.gather(1, accepted + 1), draws_SM.gather(1, accepted)
        line_SL[:, :2] = torch.cat([before, last], 1)
        lengths_S += accepted[:, 0].int() + 1
