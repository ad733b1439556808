"""The operations of `outrider.cuda.ops` by Triton kernels: buffers, grids and launches.

Shape legend: see `outrider.cuda.ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.cuda.ops import MAX_WIDTH, Pass, TorchOps
from outrider.cuda.tiles import WIDE, Shape, Tiles, fitting, power_of_two, usual_tiles

PARTS_OF_DRAW = 4096  # logits that one program of a draw reads
MAX_RANKS = 3  # of a draw: the drawn token and its runners-up


class TritonOps(TorchOps):
    """Runs the kernels on a CUDA device, or interpreted on the CPU (TRITON_INTERPRET=1)."""

    can_capture = True

    def __init__(
        self,
        device: torch.device,
        *,
        tiles: dict[Shape, Tiles] | None = None,
        pdl: bool | None = None,
    ) -> None:
        """`tiles` replace the usual ones for their shapes."""
        from outrider.cuda import cycle_kernels, kernels

        self._kernels: Any = kernels
        self._cycle_kernels: Any = cycle_kernels
        self.pdl = _can_overlap(device) if pdl is None else pdl
        self._memory = _shared_memory(device)
        self.tiles = dict(tiles or {})
        self.key_block = 32
        self.programs = 256  # of attention, at least
        self.device = device
        self._sums = torch.empty(0, device=device)
        self._tops = torch.empty(0, device=device)
        self.partial_sums = torch.empty(0, device=device)
        self.best_scores = torch.empty(0, device=device)
        self._found = torch.empty(0, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(4096, dtype=torch.int32, device=device)

    def reserve(
        self, num_tokens: int, num_queries: int, dim: int, outputs: int, vocabulary: int
    ) -> None:
        if vocabulary <= WIDE:
            outputs = max(outputs, vocabulary)
        parts = num_tokens * num_queries * 64  # splits, at most
        draws = num_tokens * MAX_RANKS * -(-vocabulary // PARTS_OF_DRAW)
        self._sums = _grown(self._sums, parts * (dim + 1))
        self._tops = _grown(self._tops, parts)
        self.partial_sums = _grown(
            self.partial_sums, 4 * max(16, power_of_two(num_tokens)) * (outputs + 128)
        )
        self.best_scores = _grown(self.best_scores, draws)
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
        scale_N: torch.Tensor | None = None,
        bias_N: torch.Tensor | None = None,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        num_tokens, num_inputs = x_TK.shape
        num_outputs = out_TN.shape[1]
        shape = Shape(num_outputs, num_inputs, gated, scale_N is not None)
        tiles = self.tiles.get(shape) or usual_tiles(shape)
        split = 1 if gated else tiles.split
        num_tiles = -(-num_outputs // tiles.rows)
        block = max(16, 1 << (num_tokens - 1).bit_length())
        assert split == 1 or split * num_tiles * tiles.rows * block <= len(self.partial_sums), (
            "reserve first"
        )
        inputs, stages = fitting(
            tiles, block, gated, x_TK.itemsize, self._memory, rounded=shape.rounded
        )
        even = num_outputs % tiles.rows == 0 and num_inputs % (inputs * split) == 0
        self._kernels.linear_kernel[(num_tiles, split)](
            x_TK,
            weight_NK,
            scale_N if scale_N is not None else x_TK,
            bias_N if bias_N is not None else x_TK,
            out_TN,
            self.partial_sums,
            self._arrived,
            num_tokens,
            num_outputs,
            num_inputs,
            GATED=gated,
            ADD=add,
            BIAS=bias_N is not None,
            SCALED=scale_N is not None,
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
        self._kernels.norm_kernel[(num_tokens,)](
            x_TH, norm_H, out_TH, hidden, eps, BH=power_of_two(hidden), **self._options(num_warps=8)
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
        self._kernels.rope_kernel[(num_tokens, num_heads)](
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
            BD=power_of_two(dim),
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
        # By the batch, never by the width: the sums of a row must not depend on other rows.
        splits = max(1, min(64, power_of_two(self.programs // (where.num_sequences * num_kv) or 1)))
        if self.device.type == "cpu":
            splits = min(splits, 4)
        assert num_tokens * num_queries * splits * (dim + 1) <= len(self._sums), "reserve first"
        programs = where.num_sequences * (1 + where.width - where.chain)
        self._kernels.attend_kernel[(programs, num_kv, splits)](
            qkv_THD,
            store_2PKD[0],
            store_2PKD[1],
            where.tables_SW,
            where.contexts_S,
            where.lengths_S,
            where.masks_T,
            where.slots_T,
            self._sums,
            self._tops,
            where.tables_SW.shape[1],
            dim**-0.5,
            M=where.width,
            CHAIN=where.chain,
            OTHERS=where.num_others,
            G=group,
            KVS=num_kv,
            D=dim,
            BD=max(16, power_of_two(dim)),
            PAGE=page,
            BR=max(16, power_of_two(MAX_WIDTH * group)),
            BL=self.key_block,
            SPLITS=splits,
            PRECISION="ieee" if qkv_THD.dtype == torch.float32 else "tf32",
            **self._options(num_warps=4, num_stages=3),
        )
        self._kernels.combine_kernel[(num_tokens * num_queries,)](
            self._sums,
            self._tops,
            out_TQD,
            D=dim,
            BD=power_of_two(dim),
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
        others: torch.Tensor | None = None,
    ) -> None:
        num_draws = len(logits_TV) // every
        ranks = 1 if others is None else 1 + others.shape[1]
        assert ranks <= MAX_RANKS
        block = min(PARTS_OF_DRAW, power_of_two(num_tokens))
        parts = -(-num_tokens // block)
        assert num_draws * parts * ranks <= len(self.best_scores), "reserve first"
        self._cycle_kernels.draw_kernel[(num_draws, parts)](
            logits_TV,
            temperature_R,
            keys_T,
            self.best_scores,
            self._found,
            num_tokens,
            logits_TV.stride(0),
            every,
            BV=block,
            PARTS=parts,
            RANKS=ranks,
            **self._options(num_warps=8),
        )
        self._cycle_kernels.pick_kernel[(num_draws,)](
            self.best_scores,
            self._found,
            out,
            out if others is None else others,
            out.stride(0),
            0 if others is None else others.stride(0),
            PARTS=parts,
            RANKS=ranks,
            BP=power_of_two(parts * ranks),
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
        self._cycle_kernels.place_kernel[(where.num_sequences,)](
            line_SL,
            lengths_S,
            secrets_S,
            *_laid_out(where),
            keys_T,
            offset,
            line_SL.shape[1],
            where.tables_SW.shape[1],
            M=where.width,
            CHAIN=where.chain,
            OTHERS=where.num_others,
            BM=power_of_two(where.width),
            PAGE=page,
            **self._options(num_warps=1),
        )

    def settle(
        self,
        line_SL: torch.Tensor,
        lengths_S: torch.Tensor,
        draws_SM: torch.Tensor,
        where: Pass,
        report: torch.Tensor,
        moves_S2: torch.Tensor,
    ) -> None:
        num_drafts = where.chain - 1
        self._cycle_kernels.settle_kernel[(len(lengths_S),)](
            line_SL,
            lengths_S,
            draws_SM,
            where.slots_T,
            report,
            moves_S2,
            line_SL.shape[1],
            M=where.width,
            K=num_drafts,
            OTHERS=where.num_others,
            BK=power_of_two(num_drafts + 1),
            BO=power_of_two(max(1, where.num_others)),
            **self._options(num_warps=1),
        )

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
        self._cycle_kernels.follow_kernel[(where.num_sequences,)](
            report,
            lengths_S,
            secrets_S,
            *_laid_out(where),
            keys_T,
            sources_T,
            verified_width,
            where.tables_SW.shape[1],
            M=where.width,
            BM=power_of_two(where.width),
            PAGE=page,
            **self._options(num_warps=1),
        )

    def move(self, store_L2PKD: torch.Tensor, moves_S2: torch.Tensor) -> None:
        num_layers, _, num_slots, num_kv, dim = store_L2PKD.shape
        self._cycle_kernels.move_kernel[(len(moves_S2), 2 * num_layers)](
            store_L2PKD,
            moves_S2,
            num_slots,
            num_kv * dim,
            BS=power_of_two(num_kv * dim),
            **self._options(num_warps=1),
        )


def _laid_out(where: Pass) -> tuple[torch.Tensor, ...]:
    """The arguments of all kernels that lay out a pass, in their order."""
    return (
        where.tables_SW,
        where.tokens_T,
        where.positions_T,
        where.slots_T,
        where.contexts_S,
        where.lengths_S,
        where.masks_T,
    )


def _shared_memory(device: torch.device) -> int:
    """The bytes that one program may use."""
    if device.type != "cuda":
        return 1 << 30
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _can_overlap(device: torch.device) -> bool:
    """Whether a kernel may start before the previous one has ended: Hopper and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
    return buffer if len(buffer) >= size else buffer.new_empty(size)
