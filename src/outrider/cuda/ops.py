"""The operations of the GPU decoder, in torch: for the CPU, and as the kernels' reference in tests.

`triton_ops.TritonOps` overrides all of them with kernels. Every operation writes into buffers that
it is given, so that a pass can be captured in a CUDA graph.

Shape legend: T tokens of the pass, S sequences of M tokens each, V vocabulary, H hidden, Q query
heads, K key/value heads, D head size, P slots of the KV store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from outrider.noise import draw_keys, gumbel_of

MAX_WIDTH = 16  # new tokens of a sequence in one pass


@dataclass(slots=True)
class Pass:
    """The layout of a pass, on the device. T = S * M; padding has slot -1 and mask 0.

    With `num_others` = A, the M = 1 + K (1 + A) tokens of a sequence are its newest token, a chain
    of K drafts, and A runners-up of each draft, which have no descendants. Runner-up i * A + j
    replaces draft i: it has the position, the mask and the place among the keys of that draft, so
    that its row equals the row of a drafted token bit for bit. Only its slot is its own.
    """

    num_sequences: int
    width: int  # M
    tokens_T: torch.Tensor  # int32, as all but masks and keys
    positions_T: torch.Tensor
    slots_T: torch.Tensor  # physical
    masks_T: torch.Tensor  # int64: bit j is set if the j-th new token of the sequence is seen
    contexts_S: torch.Tensor
    lengths_S: torch.Tensor  # context and new tokens
    tables_SW: torch.Tensor
    num_others: int = field(default=0, kw_only=True)

    @property
    def chain(self) -> int:
        """The newest token and the drafts: all tokens but the runners-up."""
        return 1 + (self.width - 1) // (1 + self.num_others)


class TorchOps:
    """The operations in torch, on any device. They write `out` and stores, and read the rest."""

    can_capture = False  # whether passes can be captured in CUDA graphs

    def reserve(
        self, num_tokens: int, num_queries: int, dim: int, outputs: int, vocabulary: int
    ) -> None:
        """Grows internal buffers for passes of so many tokens; not while a graph uses them.

        `outputs`: of the widest product, apart from the output head and gated products.
        """

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
        """out (+)= x W' + b; gated: silu(gate) * up of that.

        With `scale_N` (float32) the weights are int8 and row n is multiplied by scale_N[n].
        """
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
        """RMSNorm."""
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
        """Applies norm and rope to queries (in place) and keys; stores keys and values.

        `turns` are the cosines and sines of every position, [positions, D / 2].
        """
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
        """Attention of each token to its context and to its ancestors among the new tokens."""
        for s in range(where.num_sequences):
            first, context = s * where.width, int(where.contexts_S[s])
            slot = torch.arange(int(where.lengths_S[s]), device=qkv_THD.device)
            place = where.tables_SW[s][slot // page].long().clamp(min=0) * page + slot % page
            self._attend(qkv_THD, store_2PKD, where, first, where.chain, context, place, out_TQD)
            for i in range(where.width - where.chain):
                row, depth = first + where.chain + i, 1 + i // where.num_others
                own = place[: context + depth + 1].clone()
                own[-1] = where.slots_T[row].clamp(min=0)
                self._attend(qkv_THD, store_2PKD, where, row, 1, context, own, out_TQD)

    @staticmethod
    def _attend(
        qkv_THD: torch.Tensor,
        store_2PKD: torch.Tensor,
        where: Pass,
        first: int,
        count: int,
        context: int,
        place_L: torch.Tensor,
        out_TQD: torch.Tensor,
    ) -> None:
        """Attention of rows `first`, `first + 1`, ... over the keys at physical slots `place_L`."""
        num_q, dim = out_TQD.shape[1:]
        rows, num_kv = slice(first, first + count), store_2PKD.shape[2]
        slot = torch.arange(len(place_L), device=qkv_THD.device)
        k_LKD, v_LKD = store_2PKD[:, place_L]
        own = (where.masks_T[rows, None] >> (slot - context).clamp(min=0)) & 1
        seen_ML = (slot < context) | own.bool()
        q = qkv_THD[rows, :num_q].view(count, -1, num_kv, dim)
        score = torch.einsum("mgkd,lkd->mgkl", q, k_LKD).float() * dim**-0.5
        score = score.masked_fill(~seen_ML[:, None, None], -torch.inf)
        p = score.softmax(-1).nan_to_num(0.0)  # padding may see nothing
        out = torch.einsum("mgkl,lkd->mgkd", p.to(v_LKD.dtype), v_LKD)
        out_TQD[rows] = out.reshape(count, num_q, dim)

    def draw(
        self,
        logits_TV: torch.Tensor,
        num_tokens: int,
        temperature_R: torch.Tensor,
        keys_T: torch.Tensor,
        out: torch.Tensor,
        *,
        every: int = 1,
        others: torch.Tensor | None = None,
    ) -> None:
        """Draws at rows every - 1, 2 * every - 1, ... into the 1-d view `out`; -1 for a NaN.

        `temperature_R` has one entry per draw, `keys_T` (draw keys of `outrider.noise`, as int64)
        one per row. `others` [draws, A] gets the next best tokens; after a NaN it is undefined.
        """
        rows = slice(every - 1, None, every)
        temperature = temperature_R[: len(logits_TV) // every, None]
        score = logits_TV[rows, :num_tokens] / torch.where(temperature > 0, temperature, 1.0)
        noisy = score + gumbel_of(keys_T[: len(logits_TV)][rows], num_tokens)
        score = torch.where(temperature > 0, noisy, score)
        broken = score.isnan().any(dim=-1)
        targets = [out] if others is None else [out, *others.unbind(1)]
        for target in targets:
            best = score.max(dim=-1).indices
            target.copy_(best.masked_fill(broken, -1))
            score = score.scatter(1, best[:, None], -torch.inf)

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
        """Lays out a pass over `where.width` tokens of each line, starting at `offset`.

        A line holds the last two committed tokens of a sequence, its drafts, then their runners-up.
        `lengths_S` counts committed tokens; `secrets_S` are sequence keys of `outrider.noise`.
        """
        width = where.width
        start = lengths_S - 2 + offset
        step = torch.arange(width, dtype=torch.int32, device=line_SL.device)
        depth = step.clone()
        if where.num_others:
            depth[where.chain :] = (step[where.chain :] - where.chain) // where.num_others + 1
        position, slot = start[:, None] + depth, start[:, None] + step
        where.tokens_T.copy_(line_SL[:, offset : offset + width].reshape(-1).clamp(min=0))
        where.positions_T.copy_(position.reshape(-1))
        where.slots_T.copy_(_physical(where.tables_SW, slot, page).reshape(-1))
        where.masks_T.copy_(((2 << depth.long()) - 1).repeat(where.num_sequences))
        where.contexts_S.copy_(start)
        where.lengths_S.copy_(start + where.chain)
        keys_T[: position.numel()] = draw_keys(secrets_S[:, None], position + 1).reshape(-1)

    def settle(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        draws_SM: torch.Tensor,
        where: Pass,
        report: torch.Tensor,
        moves_S2: torch.Tensor,
    ) -> None:
        """The verdict: keeps the drafts that equal the target's draws, and one more draw.

        If that draw is a runner-up of the rejected draft, the draw after it is kept as well.
        Updates lines and lengths. `report[s]` is the number of emitted tokens, then K + 1 draws
        that begin with these, then the row of the accepted runner-up, or 0. `moves_S2[s]` are the
        slots from and to which the runner-up's keys and values are copied, or -1.
        """
        num_drafts, others = where.chain - 1, where.num_others
        chain = draws_SM[:, : where.chain]
        same = line_SL[:, 2 : 2 + num_drafts] == chain[:, :num_drafts]
        accepted = same.int().cumprod(1).sum(1, keepdim=True)
        before, last = line_SL.gather(1, accepted + 1), chain.gather(1, accepted)
        emitted, hit = chain.clone(), torch.zeros_like(accepted, dtype=torch.bool)
        if others:
            first = accepted.clamp(max=num_drafts - 1) * others
            index = first + torch.arange(others, device=line_SL.device)
            found = line_SL.gather(1, 2 + num_drafts + index) == last
            hit = found.any(1, keepdim=True) & (accepted < num_drafts)
            row = where.chain + first + found.int().argmax(1, keepdim=True)
            after = draws_SM.gather(1, row)
            place = (accepted + 1).clamp(max=num_drafts)
            emitted.scatter_(1, place, torch.where(hit, after, emitted.gather(1, place)))
            slots = where.slots_T.view(len(line_SL), -1)
            moves = torch.cat([slots.gather(1, row), slots.gather(1, place)], 1)
            moves_S2.copy_(torch.where(hit, moves, -1))
            before, last = torch.where(hit, last, before), torch.where(hit, after, last)
        count = accepted + 1 + hit.int()
        which = torch.where(hit, row, 0) if others else hit
        report.copy_(torch.cat([count, emitted, which], 1))
        line_SL[:, :2] = torch.cat([before, last], 1)
        lengths_S += count[:, 0].int()

    def follow(
        self,
        report: torch.Tensor,
        lengths_S: torch.Tensor,
        secrets_S: torch.Tensor,
        page: int,
        verified_width: int,
        where: Pass,
        keys_T: torch.Tensor,
        sources_T: torch.Tensor,
    ) -> None:
        """Lays out a head's pass over the emitted tokens, right-aligned in K + 1 rows a sequence.

        `sources_T[i]` is the row of the verified pass (`verified_width` rows a sequence) with the
        features before token i. `lengths_S` counts the rows in the head's KV and grows.
        """
        count, runner_up = report[:, :1], report[:, -1:]
        row = torch.arange(where.width, dtype=torch.int32, device=report.device)
        order = row - where.width + count  # among the emitted tokens; negative: padding
        real, order = order >= 0, order.clamp(min=0)
        where.tokens_T.copy_(report.gather(1, 1 + order.long()).clamp(min=0).reshape(-1))
        position = lengths_S[:, None] + order
        where.positions_T.copy_(position.reshape(-1))
        slots = torch.where(real, _physical(where.tables_SW, position, page), -1)
        where.slots_T.copy_(slots.reshape(-1))
        masks = torch.where(real, (2 << order.long()) - 1, 0)
        where.masks_T.copy_(masks.reshape(-1))
        where.contexts_S.copy_(lengths_S)
        keys_T[: position.numel()] = draw_keys(secrets_S[:, None], position + 1).reshape(-1)
        judged = torch.where((runner_up > 0) & (order == count - 1), runner_up, order)
        first = torch.arange(len(report), device=report.device)[:, None] * verified_width
        sources_T[: position.numel()] = (first + judged).reshape(-1).int()
        lengths_S += count[:, 0]
        where.lengths_S.copy_(lengths_S)

    def move(self, store_L2PKD: torch.Tensor, moves_S2: torch.Tensor) -> None:
        """Copies keys and values from slot to slot, in all layers; a slot of -1: nothing."""
        source, target = moves_S2[moves_S2[:, 0] >= 0].long().unbind(1)
        store_L2PKD[:, :, target] = store_L2PKD[:, :, source]


def _physical(tables_SW: torch.Tensor, slots_SM: torch.Tensor, page: int) -> torch.Tensor:
    """The physical slots of logical ones; -1 for slots without a page."""
    tables_SW = F.pad(tables_SW, (0, 1), value=-1)
    pages_SM = tables_SW.gather(1, (slots_SM // page).long().clamp(max=tables_SW.shape[1] - 1))
    return torch.where(pages_SM < 0, -1, pages_SM * page + slots_SM % page)
