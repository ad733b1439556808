"""What the GPU decoder computes, operation by operation: each by its kernel or, where there is no
CUDA device, by torch. The torch versions are the kernels' references in the tests.

Every operation writes into buffers it is given and allocates nothing, so that a pass can be
captured in a CUDA graph. Shape legend: T tokens of the pass, S sequences of M tokens each, V
vocabulary, H hidden, Q query heads, K key/value heads, D head size, P slots of the KV store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from outrider.noise import draw_keys, gumbel_of

MAX_WIDTH = 16  # new tokens of a sequence in one pass
PARTS_OF_DRAW = 4096  # logits one program of the draw looks at


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut up: rows of weights and inputs per step, programs that share a tile."""

    rows: int
    inputs: int
    split: int = 1
    warps: int = 4
    stages: int = 4


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
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        """out (+)= x W' + b, or silu(gate) * up of it."""
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


def make_ops(device: torch.device) -> Ops:
    return TritonOps(device) if device.type == "cuda" else TorchOps()


class TorchOps:
    """The reference: what the kernels must compute, in plain torch, on any device."""

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        out_TN: torch.Tensor,
        *,
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
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
        where.tokens_T.copy_(line_SL[:, offset : offset + width].reshape(-1))
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


class TritonOps:
    """The kernels, on a CUDA device or (TRITON_INTERPRET=1) interpreted on the CPU."""

    def __init__(
        self,
        device: torch.device,
        *,
        tiles: dict[tuple[int, int, bool], Tiles] | None = None,
        pdl: bool | None = None,
    ) -> None:
        """`tiles`: by (outputs, inputs, gated), where the usual choice is to be overruled."""
        from outrider.cuda import kernels

        self.kernels: Any = kernels
        self.pdl = _can_overlap(device) if pdl is None else pdl
        self._memory = _shared_memory(device)
        self.tiles = dict(tiles or {})
        self.key_block = 32
        self.programs = 256  # of attention, at least
        self.device = device
        self._sums = torch.empty(0, device=device)
        self._tops = torch.empty(0, device=device)
        self._parts = torch.empty(0, device=device)
        self._best = torch.empty(0, device=device)
        self._found = torch.empty(0, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(4096, dtype=torch.int32, device=device)

    def reserve(
        self, num_tokens: int, num_queries: int, dim: int, hidden: int, vocabulary: int
    ) -> None:
        """Makes room for passes of so many tokens. Not while a graph that uses it may run."""
        parts = num_tokens * num_queries * 64  # splits, at most
        draws = num_tokens * -(-vocabulary // PARTS_OF_DRAW)
        self._sums = _grown(self._sums, parts * (dim + 1))
        self._tops = _grown(self._tops, parts)
        self._parts = _grown(self._parts, 4 * max(16, _power(num_tokens)) * (hidden + 128))
        self._best = _grown(self._best, draws)
        self._found = _grown(self._found, draws)

    def _options(self, **more: int) -> dict[str, Any]:
        options: dict[str, Any] = {"PDL": self.pdl, **more}
        if self.pdl:
            options["launch_pdl"] = True
        return options

    def linear(
        self,
        x_TK: torch.Tensor,
        weight_NK: torch.Tensor,
        out_TN: torch.Tensor,
        *,
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        num_tokens, num_inputs = x_TK.shape
        num_outputs = out_TN.shape[1]
        tiles = self.tiles.get((num_outputs, num_inputs, gated))
        if tiles is None:
            tiles = usual_tiles(num_outputs, num_inputs, gated)
        split = 1 if gated else tiles.split
        num_tiles = -(-num_outputs // tiles.rows)
        block = max(16, 1 << (num_tokens - 1).bit_length())
        assert split == 1 or split * num_tiles * tiles.rows * block <= len(self._parts), (
            "reserve first"
        )
        inputs, stages = _fitting(tiles, block, gated, x_TK.itemsize, self._memory)
        even = num_outputs % tiles.rows == 0 and num_inputs % (inputs * split) == 0
        self.kernels.linear_kernel[(num_tiles, split)](
            x_TK,
            weight_NK,
            bias_N if bias_N is not None else x_TK,
            out_TN,
            self._parts,
            self._arrived,
            num_tokens,
            num_outputs,
            num_inputs,
            GATED=gated,
            ADD=add,
            BIAS=bias_N is not None,
            BT=block,
            BN=tiles.rows,
            BK=inputs,
            SPLIT=split,
            EVEN=even,
            PRECISION="ieee" if x_TK.dtype == torch.float32 else "tf32",
            **self._options(num_warps=tiles.warps, num_stages=stages),
        )

    def norm(
        self, x_TH: torch.Tensor, norm_H: torch.Tensor, eps: float, out_TH: torch.Tensor
    ) -> None:
        num_tokens, hidden = x_TH.shape
        self.kernels.norm_kernel[(num_tokens,)](
            x_TH, norm_H, out_TH, hidden, eps, BH=_power(hidden), **self._options(num_warps=8)
        )

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
        num_tokens, num_heads, dim = qkv_THD.shape
        num_kv = store_2PKD.shape[2]
        self.kernels.rope_kernel[(num_tokens, num_heads)](
            qkv_THD,
            qkv_THD if q_norm_D is None else q_norm_D,
            qkv_THD if k_norm_D is None else k_norm_D,
            *turns,
            where.positions_T,
            where.slots_T,
            store_2PKD[0],
            store_2PKD[1],
            eps,
            QUERIES=num_heads - 2 * num_kv,
            KVS=num_kv,
            D=dim,
            BD=_power(dim),
            NORM=q_norm_D is not None,
            **self._options(num_warps=1),
        )

    def attend(
        self,
        qkv_THD: torch.Tensor,
        store_2PKD: torch.Tensor,
        where: Pass,
        page: int,
        out_TQD: torch.Tensor,
    ) -> None:
        num_tokens, num_queries, dim = out_TQD.shape
        num_kv = store_2PKD.shape[2]
        group = num_queries // num_kv
        # By the batch, never by the width: a row's sums must not depend on its neighbours.
        splits = max(1, min(64, _power(self.programs // (where.num_sequences * num_kv) or 1)))
        if self.device.type == "cpu":
            splits = min(splits, 4)
        assert num_tokens * num_queries * splits * (dim + 1) <= len(self._sums), "reserve first"
        self.kernels.attend_kernel[(where.num_sequences, num_kv, splits)](
            qkv_THD,
            store_2PKD[0],
            store_2PKD[1],
            where.tables_SW,
            where.contexts_S,
            where.lengths_S,
            where.masks_T,
            self._sums,
            self._tops,
            where.tables_SW.shape[1],
            dim**-0.5,
            M=where.width,
            G=group,
            KVS=num_kv,
            D=dim,
            BD=max(16, _power(dim)),
            PAGE=page,
            BR=max(16, _power(MAX_WIDTH * group)),
            BL=self.key_block,
            SPLITS=splits,
            PRECISION="ieee" if qkv_THD.dtype == torch.float32 else "tf32",
            **self._options(num_warps=4, num_stages=3),
        )
        self.kernels.combine_kernel[(num_tokens * num_queries,)](
            self._sums,
            self._tops,
            out_TQD,
            D=dim,
            BD=_power(dim),
            SPLITS=splits,
            **self._options(num_warps=1),
        )

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
        num_draws = len(logits_TV) // every
        block = min(PARTS_OF_DRAW, _power(num_tokens))
        parts = -(-num_tokens // block)
        assert num_draws * parts <= len(self._best), "reserve first"
        self.kernels.draw_kernel[(num_draws, parts)](
            logits_TV,
            temperature_R,
            keys_T,
            self._best,
            self._found,
            num_tokens,
            logits_TV.stride(0),
            every,
            BV=block,
            PARTS=parts,
            **self._options(num_warps=8),
        )
        self.kernels.pick_kernel[(num_draws,)](
            self._best,
            self._found,
            out,
            out.stride(0),
            PARTS=parts,
            BP=_power(parts),
            **self._options(num_warps=1),
        )

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
        self.kernels.place_kernel[(where.num_sequences,)](
            line_SL,
            lengths_S,
            secrets_S,
            where.tables_SW,
            where.tokens_T,
            where.positions_T,
            where.slots_T,
            where.contexts_S,
            where.lengths_S,
            where.masks_T,
            keys_T,
            offset,
            line_SL.shape[1],
            where.tables_SW.shape[1],
            M=where.width,
            BM=_power(where.width),
            PAGE=page,
            **self._options(num_warps=1),
        )

    def settle(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        draws_SM: torch.Tensor,
        report: torch.Tensor,
    ) -> None:
        num_drafts = draws_SM.shape[1] - 1
        self.kernels.settle_kernel[(len(lengths_S),)](
            line_SL,
            lengths_S,
            draws_SM,
            report,
            line_SL.shape[1],
            K=num_drafts,
            BK=_power(num_drafts + 1),
            **self._options(num_warps=1),
        )


def usual_tiles(num_outputs: int, num_inputs: int, gated: bool) -> Tiles:
    """About one program per processor of an H200, where the shape has that many.

    Found by `benchmarks/gpu_decode.py`; larger tiles lose less than many programs do.
    """
    inputs = min(256, max(16, _power(num_inputs // 2)))
    if gated:
        return Tiles(128, min(128, inputs), stages=3)
    if num_outputs > 16384:
        return Tiles(128, inputs, stages=3)
    if num_outputs > 5000:
        return Tiles(64, inputs)
    if num_inputs <= 4096:
        return Tiles(64 if num_outputs > 2048 else 32, min(512, 2 * inputs), 2, stages=3)
    return Tiles(64 if num_outputs > 2048 else 32, inputs, 2)


def _fitting(tiles: Tiles, block: int, gated: bool, itemsize: int, memory: int) -> tuple[int, int]:
    """Inputs per step and stages that fit a processor's shared memory."""
    inputs, stages = tiles.inputs, tiles.stages if block == 16 else 3

    def need() -> int:
        buffers = stages if block >= 64 else stages - 1  # the wider instructions read them later
        return (tiles.rows * (1 + gated) + block) * inputs * itemsize * buffers

    while need() > memory and inputs > 16:
        if inputs > 64 or stages == 2:
            inputs //= 2
        else:
            stages -= 1
    return inputs, stages


def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda":
        return 1 << 30
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _can_overlap(device: torch.device) -> bool:
    """Whether a kernel may be started before the one it depends on has ended: Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if len(buffer) >= size else buffer.new_empty(size)


def _power(x: int) -> int:
    """The smallest power of two that is not below x."""
    return 1 << (x - 1).bit_length() if x > 1 else 1
