"""Llama-shaped models on the CPU: one call of the native engine is one whole step.

Weights keep their stored type (bfloat16 is widened in registers, without loss) or are quantised
while loading; arithmetic and cache are float32. The result of a row depends on its own path only,
bit for bit: not on the batch, the step width, the tree, the block layout or the number of threads.

Shape legend: T tokens of the pass, R rows with logits, S sequences, V vocabulary, H hidden.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from outrider import native
from outrider.contracts import (
    IntArray,
    ModelSpec,
    StepBatch,
    StepOutput,
)
from outrider.errors import UnknownName
from outrider.model.checkpoints import open_checkpoint
from outrider.model.families import DecoderConfig, read_decoder_config
from outrider.model.families.description import Latent
from outrider.model.families.mixers import FixedDecay, GatedDelta
from outrider.model.families.shapes import count_parameters, layer_shapes, norm_names
from outrider.model.gguf.files import model_name
from outrider.model.latent import LatentRows, latent_rows
from outrider.model.native_description import (
    LAYER_TENSORS,
    NORMS,
    STATE_TENSORS,
    cannot_run,
    experts_of,
    fixed_tensors,
    has_short_convolutions,
    layer_arrays,
    mixer_of,
    mixes_of,
    parts_of,
    state_tensor,
    stays_of,
    widths_of,
)
from outrider.model.native_kinds import EXPERT_PARTS, LAYER_KINDS, is_scaled, matrix_kinds
from outrider.model.native_model import SOURCE_TYPES, WEIGHT_TYPES, NativeModel
from outrider.model.tensors import Source, Weights
from outrider.model.weights import count_tokens, read_config, read_eos_ids
from outrider.sampling import RowParams

if TYPE_CHECKING:
    from outrider.model.borrowed import Borrowed
    from outrider.model.heads import FastHead, Head

log = logging.getLogger(__name__)

_PACKED = "packed"  # the arithmetic of weights that are stored in blocks
_LOSSLESS = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


def available(config: DecoderConfig, device: str) -> bool:
    """Whether the native engine is compiled here and can run this model."""
    runs = not cannot_run(config)
    return runs and torch.device(device).type == "cpu" and native.available()


_O = LAYER_TENSORS["self_attn.o_proj.weight"]


class NativeDecoder(NativeModel):
    """`contracts.Model` and `capabilities.DraftsInOneCall`, for one thread at a time."""

    spec: ModelSpec
    executor = "native"  # runs several steps in one call

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        dtype: str,
        kinds: Seq[int] | None,
        threads: int | None,
        *,
        kv_dtype: str = "auto",
    ) -> None:
        """`dtype` of the arithmetic; `kinds` of the matrices, unless all have that of `dtype`."""
        types = None if kinds is None else (ctypes.c_int32 * len(kinds))(*kinds)
        # Alive until they are read.
        arrays, widths, mixes = layer_arrays(config), widths_of(config), mixes_of(config)
        stays = stays_of(config)
        super().__init__(
            native.Config(
                hidden=config.hidden_size,
                layers=config.num_layers,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                intermediate=config.intermediate_size,
                vocab=config.vocab_size,
                num_tokens=spec.num_tokens,
                rotary_dim=config.rotated,
                weight_type=WEIGHT_TYPES.get(dtype, 0),
                rounds=dtype == "bfloat16",
                qk_norm=config.qk_norm,
                head_rows=config.vocab_size,
                kv_bytes=kv_dtype == "int8",
                eps=config.norm_eps,
                attention_scale=config.score_scale,
                types=None if types is None else ctypes.addressof(types),
                widths=None if widths is None else ctypes.addressof(widths),
                stays=None if stays is None else ctypes.addressof(stays),
                parts=parts_of(config),
                experts=experts_of(config, *arrays),
                mixer=mixer_of(config, mixes),
            ),
            config.rope,
            threads,
            other_ropes=config.other_ropes,
        )
        self.config = config
        self.spec = spec
        self.dtype = dtype
        self.load_s = 0.0
        self._has_states = mixes is not None and config.num_states > 0
        self.continues = not self._has_states  # states of a pass are those of all layers
        self._embedding: torch.Tensor | None = None  # native code reads it in place: keep it alive
        self._drawn = (ctypes.c_int32 * 64)()
        self._extend_rope(min(2048, config.max_positions))

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        dtype: str = "auto",
        threads: int | None = None,
        kv_dtype: str = "auto",
        max_length: int | None = None,
    ) -> NativeDecoder:
        """Maps a Hugging Face folder and repacks its weights once.

        dtype "auto" is the stored one; quantised weights are multiplied as they are, by activations
        rounded to int8 in blocks of 32. "bfloat16" also rounds activations (sums stay float32),
        "float32" rounds nothing, "int8" and "int4" quantise. kv_dtype "int8" rounds keys and
        values, with a scale for each token and head; else they are float32. `threads` None follows
        `native.set_threads`. Raises `ModelError` for a folder that cannot be loaded.
        """
        folder = Path(folder)
        raw = read_config(folder)
        config = read_decoder_config(raw, max_length)
        spec = _spec(folder, raw, config, kv_dtype)
        source = open_checkpoint(folder)
        return cls.read(source, config, spec, dtype=dtype, threads=threads, kv_dtype=kv_dtype)

    @classmethod
    def read(
        cls,
        checkpoint: Source,
        config: DecoderConfig,
        spec: ModelSpec,
        *,
        dtype: str = "auto",
        threads: int | None = None,
        kv_dtype: str = "auto",
    ) -> NativeDecoder:
        """Builds the decoder from any source of tensors."""
        started = time.perf_counter()
        if dtype != "auto" and dtype not in WEIGHT_TYPES:
            raise UnknownName("dtype", dtype, ["auto", *WEIGHT_TYPES])
        weights = Weights(checkpoint, config)
        kinds = matrix_kinds(checkpoint, weights)
        has_blocks = max(kinds) >= native.PACKED
        if dtype == "auto":
            dtype = _PACKED if has_blocks else _LOSSLESS.get(config.dtype, "float32")
        # As stored where that makes the same bits from less memory.
        keeps = dtype == _PACKED or (dtype == "float32" and not has_blocks)
        model = cls(config, spec, dtype, kinds if keeps else None, threads, kv_dtype=kv_dtype)
        model._read(checkpoint, weights, kinds)
        model.load_s = time.perf_counter() - started
        log.info(
            "loaded %s as %s (%s) in %.2f s, %.0f MB of weights",
            model.spec.name,
            dtype,
            native.isa(),
            model.load_s,
            model.weight_bytes / 1e6,
        )
        return model

    def _read(self, checkpoint: Source, weights: Weights, kinds: Seq[int]) -> None:
        """`kinds` as `matrix_kinds` gives them."""
        config, table = self.config, (self.config.vocab_size, self.config.hidden_size)
        if not self._set_blocks(checkpoint, 0, 0, weights.embedding_place, table):
            embedding = weights.embedding().contiguous()
            if embedding.dtype not in SOURCE_TYPES:
                embedding = embedding.float()
            self._embedding = embedding
            self.set_tensor(0, 0, embedding)
            if config.tied:
                self.set_tensor(2, 0, embedding)
        self._set(1, 30, 0, weights.final_norm())
        if config.tied or not self._set_blocks(checkpoint, 2, 0, weights.head_place, table):
            head = weights.head()
            if head is not None:
                self.set_tensor(2, 0, head)
        for layer in range(config.num_layers):
            for name in norm_names(config, layer):
                self._set(*NORMS[name], layer, weights.norm(layer, name))
            for name, shape in layer_shapes(config, layer).items():
                if name.rpartition(".")[0] in NORMS:
                    continue
                if self._has_states and name.startswith("mixer."):
                    continue  # see `_read_mixer`
                kind, (place, whole) = LAYER_TENSORS.get(name, -1), weights.place(layer, name)
                whole = whole and not is_scaled(config, name)
                if config.latent is not None and kind != _O and name.startswith("self_attn."):
                    continue  # see `_read_latent`
                if not (whole and self._set_blocks(checkpoint, kind, layer, place, shape)):
                    tensor = weights.layer(layer, name)
                    self.set_tensor(kind, layer, tensor.flatten(1) if tensor.ndim > 2 else tensor)
            if self._has_states and config.has_state(layer):
                self._read_mixer(weights, layer)
            if config.has_experts(layer):
                made = kinds[2 + LAYER_KINDS * layer :][LAYER_KINDS - 2 : LAYER_KINDS]
                self._read_experts(checkpoint, weights, layer, made)
            if config.latent is not None:
                self._read_latent(latent_rows(weights, layer), config.latent, layer)
            if config.qk_unit and config.norms_heads(layer):
                for which in "qk":
                    name = f"self_attn.{which}_norm.weight"
                    self.set_tensor(LAYER_TENSORS[name], layer, weights.layer(layer, name))
            window, chunk = config.windows[layer] or 0, config.chunk_of(layer) or 0
            rope = config.rope_of(layer)
            native.check(self._lib.outrider_set_layer(self._handle, layer, window, chunk, rope, 0))
        if config.embedding_norm:
            self._set(51, 52, 0, weights.embedding_norm())
        if config.slopes:
            self.set_tensor(50, 0, torch.tensor(config.slopes))
        bias = weights.head_bias()
        if bias is not None:
            self.set_tensor(31, 0, bias)
        if config.position_rows:
            self.set_tensor(32, 0, weights.positions())
        self._check_ready()

    def _set(
        self, kind: int, bias_kind: int, layer: int, norm: tuple[torch.Tensor, torch.Tensor | None]
    ) -> None:
        weight, bias = norm
        self.set_tensor(kind, layer, weight)
        if bias is not None:
            self.set_tensor(bias_kind, layer, bias)

    def _read_mixer(self, weights: Weights, layer: int) -> None:
        mixer = self.config.mixer
        if isinstance(mixer, GatedDelta):
            kind = STATE_TENSORS["mixer.in_proj.weight"]
            self.set_tensor(kind, layer, weights.delta_inputs(layer, mixer))
        if isinstance(mixer, FixedDecay):
            made = fixed_tensors(mixer, layer, weights.decay_inputs(layer, mixer))
            for name, tensor in made.items():
                self.set_tensor(STATE_TENSORS[name], layer, tensor)
        for name, kind in STATE_TENSORS.items():
            if weights.has(layer, name):
                tensor = state_tensor(self.config, name, weights.layer(layer, name))
                self.set_tensor(kind, layer, tensor.flatten(1) if tensor.ndim > 2 else tensor)

    def has_state(self, slot: int) -> bool:
        """See `KeepsStates`."""
        return not self._has_states or bool(self.states(native.STATES_HAS, slot))

    def states(self, what: int, slot: int = 0) -> int:
        """Asks the store of recurrent states; `what` as in outrider.h."""
        return int(self._lib.outrider_states(self._handle, what, slot))

    def _read_latent(self, rows: LatentRows, size: Latent, layer: int) -> None:
        keys, values = rows.keys_and_values(size)
        of_kind = {4: rows.q_NDR.flatten(0, 1), 5: keys, 6: values}
        of_kind |= {55: rows.kv_a, 56: rows.kv_a_norm}
        if rows.q_a is not None and rows.q_a_norm is not None:
            of_kind |= {53: rows.q_a, 54: rows.q_a_norm}
        for kind, tensor in of_kind.items():
            self.set_tensor(kind, layer, tensor)

    def _read_experts(
        self,
        checkpoint: Source,
        weights: Weights,
        layer: int,
        kinds: Seq[int],
    ) -> None:
        """`kinds`: of gates and ups, and of downs."""
        assert self.config.experts is not None
        router, bias = weights.router(layer)
        for kind, tensor in (
            (33, router),
            (34, bias),
            (35, weights.choice_bias(layer)),
            (36, weights.shared_gate(layer)),
        ):
            if tensor is not None:
                self.set_tensor(kind, layer, tensor)
        for expert in range(self.config.experts.count):
            for part, name in enumerate(EXPERT_PARTS):
                if part == 0 and not self.config.gated:
                    continue
                kind = kinds[part == 2]
                if self.dtype == _PACKED and kind >= native.PACKED:
                    place, _ = weights.expert_place(layer, expert, name)
                    shape = weights.expert_shape(name)
                    with checkpoint.blocks(place, shape) as (blocks, _):
                        self.set_expert_blocks(part, layer, expert, blocks, kind, shape[1])
                    bias = weights.expert_bias(layer, expert, name)
                else:
                    weight, bias = weights.expert(layer, expert, name)
                    self.set_expert(part, layer, expert, weight)
                if bias is not None:
                    self.set_expert(part + 3, layer, expert, bias)

    def _set_blocks(
        self,
        checkpoint: Source,
        kind: int,
        layer: int,
        name: str,
        shape: tuple[int, ...],
    ) -> bool:
        """Sets a tensor that stays in blocks; False if it is of another kind."""
        if self.dtype != _PACKED or name not in checkpoint:
            return False
        stored = checkpoint.kind_of(name)
        if stored < native.PACKED:
            return False
        with checkpoint.blocks(name, shape) as (blocks, turned):
            self.set_blocks(kind, layer, blocks, stored + turned * native.TURNED, shape[1])
        return True

    def forward(self, batch: StepBatch) -> StepOutput:
        """The logits are a view of a buffer that the next forward overwrites."""
        packed = self._describe(batch)
        step = self._step
        logits_RV = self._rows(step.num_rows)
        taps = self._tap_buffers(batch) if batch.taps else {}
        call = self._lib.outrider_step
        arguments: tuple[object, ...] = (self._model_arg, packed, self._step_arg)
        if batch.draws is not None:
            if len(self._drawn) < step.num_rows:
                self._drawn = (ctypes.c_int32 * (2 * step.num_rows))()
            call = self._lib.outrider_step_and_draw
            arguments += (batch.draws.packed(), self._drawn)
        code = call(*arguments)
        if code:
            self._repair(code, batch, 0)
            native.check(call(*arguments))
        draws = None if batch.draws is None else self._drawn[: step.num_rows]
        return StepOutput(logits_RV, taps, draws)

    def head_weights(self, head: Head) -> tuple[str, ...]:
        """See `heads.RunsHeads`."""
        from outrider.model.heads_native import HEAD_WEIGHTS, runs_natively

        return HEAD_WEIGHTS if runs_natively(head) else ()

    def make_head(self, head: Head, borrowed: Borrowed, weights: str) -> FastHead:
        from outrider.model.heads_native import native_head

        return native_head(head, borrowed, self.spec, weights)

    def run_cycles(self, packed: bytes, parameters: bytes, cycles: native.Cycles) -> None:
        """Several steps in one call; see `OutriderCycles` in outrider.h."""
        native.check(
            self._lib.outrider_run_cycles(self._model_arg, packed, parameters, ctypes.byref(cycles))
        )

    def draft_and_keep(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """See `capabilities.DraftsAndKeeps`."""
        counts = num_tokens_S.tolist()
        states_SNH = torch.empty(len(counts), max(counts) + 1, self.spec.hidden_size)
        chains = self._draft_chain(batch, num_tokens_S, rows, key_S, states_SNH)
        kept = [states_SNH[i, : count + 1] for i, count in enumerate(counts)]
        return chains, kept

    def _tap_buffers(self, batch: StepBatch) -> dict[int, torch.Tensor]:
        step = self._step
        shape = (step.num_tokens, self.spec.hidden_size)
        taps = {layer: torch.empty(shape) for layer in batch.taps}
        depth = self.spec.num_layers if batch.exit_layer is None else batch.exit_layer
        if any(not 0 <= layer <= depth for layer in taps):
            raise ValueError(f"taps {batch.taps} reach beyond the {depth} layers of this pass")
        self._tap_layers = (ctypes.c_int32 * len(taps))(*taps)
        self._tap_out = (ctypes.c_void_p * len(taps))(*(t.data_ptr() for t in taps.values()))
        step.num_taps = len(taps)
        step.taps = ctypes.addressof(self._tap_layers)
        step.tap_out = ctypes.addressof(self._tap_out)
        return taps

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copies the K/V of physical slots; all sources are read before any target is written."""
        from_ = np.ascontiguousarray(source, dtype=np.int32)
        to = np.ascontiguousarray(target, dtype=np.int32)
        if from_.shape != to.shape:
            raise ValueError("as many targets as sources")
        native.check(
            self._lib.outrider_copy_slots(
                self._handle, from_.ctypes.data, to.ctypes.data, from_.size
            )
        )


def _spec(folder: Path, raw: dict[str, Any], config: DecoderConfig, kv_dtype: str) -> ModelSpec:
    width = -(-config.head_dim // 16) * 16
    slot = width + 4 if kv_dtype == "int8" else 4 * width  # bytes of a key or value
    inputs = 0  # of convolutions, kept for every token
    if has_short_convolutions(config):
        inputs = config.num_states * config.hidden_size
    elif config.num_states:
        inputs = 1  # its id, where a state may have to be computed again
    return ModelSpec(
        name=model_name(folder),
        vocab_size=config.vocab_size,
        num_tokens=count_tokens(folder, config.vocab_size),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        max_positions=config.max_positions,
        shortened=config.shortened,
        kv_bytes_per_token=2 * config.num_attentions * config.num_kv_heads * slot + 4 * inputs,
        num_parameters=count_parameters(config),
        eos_ids=read_eos_ids(folder, raw),
        draft_dtype="int8" if native.isa().startswith("avx512") else "auto",
    )
