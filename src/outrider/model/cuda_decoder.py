"""The compact decoder for GPUs: static shapes, our own kernels, one graph launch per pass.

A pass of few tokens is padded to a bucket (sequences, width) and laid out in buffers that never
move. The first pass of a bucket runs kernel by kernel and is captured; later ones replay the graph.
Tokens are drawn in the same graph, so that no row of logits is copied to the host. Wide passes
(prompts) run in `TorchDecoder`, with the same weights and KV store.

On a CPU the same code runs with the operations in torch and without graphs.

Shape legend: T = S * M tokens of the padded pass, S sequences, M tokens of each, R rows with
logits, V vocabulary, H hidden, I intermediate, Q query heads, K key/value heads, D head size,
W pages of a sequence at most.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import IntArray, StepBatch, StepOutput
from outrider.cuda.inputs import MAX_TOKENS, Inputs
from outrider.cuda.ops import MAX_WIDTH, Pass, TorchOps
from outrider.cuda.triton_ops import TritonOps
from outrider.model.attention import Plan
from outrider.model.int8 import RoundedLayer, Scales, round_layer, round_rows
from outrider.model.states import StatePass
from outrider.model.torch_decoder import TorchDecoder
from outrider.model.torch_weights import Layer
from outrider.noise import draw_keys
from outrider.sampling import RowParams

_UNSCALED = Scales()
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, MAX_WIDTH)


class CudaDecoder(TorchDecoder):
    """`contracts.Model` and `DraftsChains`. One pass at a time."""

    ops: TorchOps
    continues = False  # the kernels run whole passes only
    rounds_drafts = True
    executor = "cuda"  # what runs several of its steps in one call
    head_scale_V: torch.Tensor | None = None  # of an output head in int8

    def round_weights(self) -> Self:
        """Replaces the weights of all products by int8 ones (`outrider.model.int8`)."""
        for i, layer in enumerate(self.layers):
            self.layers[i] = round_layer(layer)
        self.head_VH, self.head_scale_V = round_rows(self.head_VH)
        return self

    def allocate(self, num_blocks: int, block_size: int) -> None:
        super().allocate(num_blocks, block_size)
        config, device = self.config, self.device
        self.ops = TritonOps(device) if device.type == "cuda" else TorchOps()
        positions = config.max_positions + MAX_TOKENS
        angles = torch.arange(positions, device=device).float()[:, None] * self._frequencies
        scale = config.rope.attention_factor
        self._turns = (angles.cos() * scale, angles.sin() * scale)
        pages = min(num_blocks, -(-positions // block_size))
        self.inputs = Inputs(pages, device)

        def room(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.empty(MAX_TOKENS, *shape, dtype=dtype, device=device)

        num_heads = config.num_heads + 2 * config.num_kv_heads
        self._x = room(config.hidden_size)
        self._normed = room(config.hidden_size)
        self._qkv = room(num_heads * config.head_dim)
        self._attended = room(config.num_heads, config.head_dim)
        self._inner = room(config.intermediate_size)
        self.logits = room(config.vocab_size, dtype=torch.float32)
        self.drawn = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)
        self.line = torch.zeros(MAX_TOKENS, MAX_TOKENS, dtype=torch.int32, device=device)
        self._taps: dict[tuple[int, ...], torch.Tensor] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self.capture_s = 0.0
        self.capture_bytes = 0
        self.ops.reserve(
            MAX_TOKENS,
            config.num_heads,
            config.head_dim,
            max(config.hidden_size, num_heads * config.head_dim),
            config.vocab_size,
        )

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> StepOutput:
        bucket = self._bucket(batch, 0)
        if bucket is None:
            self.inputs.num_changes += 1
            return super().forward(batch)
        place_T = self.inputs.lay_out(batch, *bucket, self._block_size)
        rows = place_T[batch.logit_rows_R]
        how = batch.draws
        draws_here = how is not None and not how.rows.filters
        host = self.inputs.host
        if how is not None and draws_here:
            host["temperature"][rows] = how.rows.temperature_R
            host["keys"][rows] = np.array(how.keys_R, np.uint64).view(np.int64)
        self.inputs.send(bucket[0])
        where = self.inputs.at(*bucket)

        def run() -> None:
            self.compute(where, exit_layer=batch.exit_layer, taps=batch.taps)
            self.draw(where.num_sequences * where.width)

        self.replay(("pass", *bucket, batch.exit_layer, batch.taps), run)
        logits = self.logits[: bucket[0] * bucket[1]]
        if len(rows) != len(logits) or bool((rows != np.arange(len(rows))).any()):
            logits = logits[torch.from_numpy(rows).to(self.device)]
        draws = self.drawn.cpu().numpy()[rows].tolist() if draws_here else None
        return StepOutput(logits, self._tapped(batch.taps, place_T), draws)

    def _tapped(
        self, taps: tuple[int, ...], place_T: npt.NDArray[np.int64]
    ) -> dict[int, torch.Tensor]:
        """Copies of the tapped hidden states, for the tokens of the batch."""
        if not taps:
            return {}
        rows = torch.from_numpy(place_T).to(self.device)
        tapped = self.tapped(taps)[rows]
        return {layer: tapped[:, i] for i, layer in enumerate(taps)}

    def tapped(self, taps: tuple[int, ...]) -> torch.Tensor:
        """The buffer into which passes with these taps write hidden states, [tokens, taps, H]."""
        if taps not in self._taps:
            shape = (MAX_TOKENS, len(taps), self.config.hidden_size)
            self._taps[taps] = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return self._taps[taps]

    @torch.no_grad()
    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]] | None:
        """See `capabilities.DraftsChains`: all steps of a draft in one graph.

        None while the drafter reads a prompt, and for requests with filters.
        """
        bucket = self._bucket(batch, int(num_tokens_S.max()))
        if bucket is None or rows.filters:
            return None
        self.lay_out_draft(batch, bucket, rows, key_S)
        return self.replay_draft(bucket, num_tokens_S.tolist(), batch.exit_layer)

    def lay_out_draft(
        self,
        batch: StepBatch,
        bucket: tuple[int, int],
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.int64]:
        """Sends the inputs of a draft; returns the rows of the batch's tokens."""
        num_sequences = len(batch.context_S)
        place_T = self.inputs.lay_out(batch, *bucket, self._block_size)
        host = self.inputs.host
        host["temperature"][: bucket[0]] = 0
        host["temperature"][:num_sequences] = rows.temperature_R
        host["secrets"][: bucket[0]] = 0
        host["secrets"][:num_sequences] = key_S.view(np.int64)
        host["committed"][: bucket[0]] = host["lengths"][: bucket[0]]
        lengths = torch.from_numpy(host["lengths"][:num_sequences])
        secrets = torch.from_numpy(host["secrets"][:num_sequences])
        host["keys"][place_T[batch.logit_rows_R]] = draw_keys(secrets, lengths).numpy()
        self.inputs.send(bucket[0])
        return place_T

    def replay_draft(
        self, bucket: tuple[int, int], counts: list[int], exit_layer: int | None = None
    ) -> list[list[int]]:
        most = max(counts)

        def run() -> None:
            self.draft(*bucket, most, exit_layer=exit_layer)

        self.replay(("draft", *bucket, most, exit_layer), run)
        drafted = self.line[: len(counts), 2 : 2 + most].tolist()
        return [chain[:count] for chain, count in zip(drafted, counts, strict=True)]

    def most_drafts(self, num_sequences: int) -> int:
        """See `capabilities.PrefersThinPasses`: the most drafts that fit in a captured pass."""
        padded = padded_batch(num_sequences)
        widths = [width for width in _WIDTHS if padded * width <= MAX_TOKENS]
        return widths[-1] - 1 if widths else 0

    def prepared(self) -> str:
        limits = f"up to {MAX_WIDTH} tokens a sequence and {MAX_TOKENS} in all"
        if not self._graphs:
            return f"none captured yet; {limits}"
        megabytes = self.capture_bytes / (1 << 20)
        return (
            f"{len(self._graphs)} captured in {self.capture_s:.2f} s, {megabytes:.0f} MB; {limits}"
        )

    @property
    def block_size(self) -> int:
        return self._block_size

    def can_reach(self, length: int) -> bool:
        """Whether the kernels can run sequences of this length: no window is shorter."""
        return self._min_window is None or length <= self._min_window

    # The parts of graphs. The code below reads nothing from the host.

    def compute(
        self, where: Pass, *, exit_layer: int | None = None, taps: tuple[int, ...] = ()
    ) -> None:
        """All layers and the output head over a pass: logits for all of its tokens.

        The hidden states at `taps` stay valid until the next pass.
        """
        assert isinstance(self.store, torch.Tensor), "allocate first"
        config, ops, page = self.config, self.ops, self._block_size
        num_tokens = where.num_sequences * where.width
        x, qkv, inner = (b[:num_tokens] for b in (self._x, self._qkv, self._inner))
        attended, normed = self._attended[:num_tokens], self._normed[:num_tokens]
        heads = qkv.view(num_tokens, -1, config.head_dim)
        eps = config.norm_eps
        torch.index_select(self.embedding_VH, 0, where.tokens_T, out=x)
        layers = self.layers[:exit_layer]
        kept = dict(zip(taps, self.tapped(taps).unbind(1), strict=True)) if taps else {}
        for i, (layer, store) in enumerate(zip(layers, self.store, strict=False)):
            if i in kept:
                kept[i][:num_tokens].copy_(x)
            assert layer.attention_norm_H is not None
            assert layer.mlp_norm_H is not None
            scales = layer.scales if isinstance(layer, RoundedLayer) else _UNSCALED
            ops.norm(x, layer.attention_norm_H, eps, normed)
            ops.linear(normed, layer.qkv, qkv, scale_N=scales.qkv, bias_N=layer.qkv_bias)
            ops.rope(heads, layer.q_norm_D, layer.k_norm_D, eps, self._turns, where, store)
            ops.attend(heads, store, where, page, attended)
            o, gate_up, down = layer.o.t(), layer.gate_up, layer.down.t()
            mixed = attended.flatten(1)
            ops.linear(mixed, o, x, scale_N=scales.o, bias_N=layer.o_bias, add=True)
            ops.norm(x, layer.mlp_norm_H, eps, normed)
            bias = layer.gate_up_bias
            ops.linear(normed, gate_up, inner, scale_N=scales.gate_up, bias_N=bias, gated=True)
            ops.linear(inner, down, x, scale_N=scales.down, bias_N=layer.down_bias, add=True)
        if len(layers) in kept:
            kept[len(layers)][:num_tokens].copy_(x)
        ops.norm(x, self.norm_H, eps, normed)
        ops.linear(normed, self.head_VH, self.logits[:num_tokens], scale_N=self.head_scale_V)

    def _layer(
        self,
        layer: Layer,
        x_TH: torch.Tensor,
        turns: dict[int, torch.Tensor],
        plan: Plan,
        states: StatePass | None,
    ) -> None:
        if isinstance(layer, RoundedLayer):
            layer = layer.restored(self.dtype)
        super()._layer(layer, x_TH, turns, plan, states)

    def _logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        if self.head_scale_V is None:
            return super()._logits(x_RH)
        logits_RV = torch.empty(len(x_RH), len(self.head_VH), device=self.device)
        for some in range(0, len(x_RH), MAX_TOKENS):
            rows = slice(some, some + MAX_TOKENS)
            self.ops.linear(x_RH[rows], self.head_VH, logits_RV[rows], scale_N=self.head_scale_V)
        return logits_RV

    def draw(self, num_rows: int) -> None:
        """Draws a token for every row of the pass, with the temperatures and keys of the inputs."""
        on = self.inputs.device
        self.ops.draw(
            self.logits[:num_rows],
            self.spec.num_tokens,
            on["temperature"],
            on["keys"],
            self.drawn[:num_rows],
        )

    def move(self, moves_S2: torch.Tensor) -> None:
        """Copies keys and values from slot to slot; a slot of -1: nothing."""
        assert isinstance(self.store, torch.Tensor), "allocate first"
        self.ops.move(self.store, moves_S2)

    def draft(
        self,
        num_sequences: int,
        width: int,
        num_drafts: int,
        *,
        num_others: int = 0,
        exit_layer: int | None = None,
    ) -> None:
        """Runs a pass over `width` tokens that are laid out, then drafts `num_drafts` tokens.

        Drafts go to `line[s, 2:]`, followed by `num_others` runners-up of each. Temperatures and
        secrets are per sequence.
        """
        on, ops = self.inputs.device, self.ops
        where = self.inputs.at(num_sequences, width)
        one = self.inputs.at(num_sequences, 1)
        line = self.line[:num_sequences]
        temperature, secrets = on["temperature"][:num_sequences], on["secrets"][:num_sequences]
        committed = on["committed"][:num_sequences]
        self._begin_draft(num_sequences, width)
        for i in range(num_drafts):
            if i:
                where = one
                ops.place(line, committed, secrets, 1 + i, self._block_size, one, on["keys"])
            self.compute(where, exit_layer=exit_layer)
            others = 2 + num_drafts + i * num_others
            ops.draw(
                self.logits[: num_sequences * where.width],
                self.spec.num_tokens,
                temperature,
                on["keys"],
                line[:, 2 + i],
                every=where.width,
                others=line[:, others : others + num_others] if num_others else None,
            )

    def _begin_draft(self, num_sequences: int, width: int) -> None:
        """Prepares the first pass of a draft."""

    def replay(self, key: Hashable, run: Callable[[], None]) -> None:
        """Runs `run` and captures it the first time; later replays the captured graph of `key`."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        elif self.device.type == "cuda":
            with torch.cuda.device(self.device):  # kernels launch on the thread's current device
                self._run_and_capture(key, run)
        else:
            run()

    def _run_and_capture(self, key: Hashable, run: Callable[[], None]) -> None:
        run()
        if not self.ops.can_capture:
            return
        started = time.perf_counter()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        # The garbage collector must not destroy graphs of an old model during a capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        finally:
            if collects:
                gc.enable()
        self._pool = graph.pool()
        self._graphs[key] = graph
        self.capture_s += time.perf_counter() - started
        self.capture_bytes += torch.cuda.memory_reserved(self.device) - reserved

    def _bucket(self, batch: StepBatch, num_drafts: int) -> tuple[int, int] | None:
        """The (sequences, width) to pad a pass to; None: it is too large for the kernels."""
        counts = np.diff(batch.starts_S1)
        widest, num_sequences = int(counts.max()), len(counts)
        if widest > MAX_WIDTH or 2 + num_drafts > self.line.shape[1]:
            return None
        longest = int((batch.context_S + counts).max()) + num_drafts
        if not self.can_reach(longest):
            return None
        if -(-longest // self._block_size) > self.inputs.table_width:
            return None
        width = next(w for w in _WIDTHS if w >= widest)
        padded = padded_batch(num_sequences)
        return (padded, width) if padded * width <= MAX_TOKENS else None


def padded_batch(num_sequences: int) -> int:
    """The number of sequences that a batch is padded to."""
    return 1 << (num_sequences - 1).bit_length()
