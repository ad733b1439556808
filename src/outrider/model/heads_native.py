"""Drafting heads on the CPU, as native models: a whole draft is one call.

Drafts may be inexact, so the weights may be rounded: int8 halves the bytes that a step of the head
reads and hardly lowers acceptance. Results need not equal those of the torch modules bit for bit.

Shapes: S sequences, n rows of features, F width of all taps side by side, D depths, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider import native
from outrider.contracts import IntArray, ModelSpec, StepBatch
from outrider.model.borrowed import Borrowed
from outrider.model.heads import (
    DFlashHead,
    Eagle3Head,
    FastHead,
    Head,
    MedusaHeads,
    MlpHead,
)
from outrider.model.native_model import WEIGHT_TYPES, NativeModel
from outrider.model.rope import RopeConfig
from outrider.sampling import RowParams

_EMBED, _FINAL_NORM, _HEAD, _O = 0, 1, 2, 7
_Q_BIAS = 8  # then those of keys, values and the last projection
_SINKS = 29
_FC, _HIDDEN_NORM, _MARKOV_EMBED, _MARKOV_HEAD, _FC_BIAS = 21, 22, 23, 24, 37
_PROJECTS, _FUSED, _NORM_RESIDUAL, _FEEDS_NORMED, _FROM_ANCHOR = 1, 2, 4, 8, 16
_OWN_HEADS, _AS_GIVEN = 32, 64
_EAGLE3, _DFLASH, _MEDUSA = 1, 2, 3

_BLOCKS = 72  # int8 with a scale for each 32 inputs, where a decoder has one for each row

HEAD_WEIGHTS = ("int8", *(name for name in WEIGHT_TYPES if name != "int8"))  # the usual first


class NativeHead(NativeModel):
    """Base of the native heads: a native config built from the head's, and features as input."""

    trees = False

    def __init__(self, spec: ModelSpec, dtype: str, rope: RopeConfig, **fields: Any) -> None:
        super().__init__(
            native.Config(
                vocab=spec.vocab_size,
                num_tokens=spec.num_tokens,
                weight_type=_BLOCKS if dtype == "int8" else WEIGHT_TYPES[dtype],
                rounds=dtype == "bfloat16",
                attention_scale=fields["head_dim"] ** -0.5,
                rotary_dim=fields["head_dim"] if spec.num_layers else 0,
                **fields,
            ),
            rope,
            None,
        )
        self.spec = spec
        self._embedding: torch.Tensor | None = None  # native code reads it in place: keep it alive

    def use(self, features_nF: torch.Tensor) -> None:
        """The next call reads these features, one row for each token of its batch."""
        self._features = features_nF.contiguous()
        self._step.features = self._features.data_ptr()

    def guesses(self, state_SH: torch.Tensor, depth: int, first: int = -1) -> torch.Tensor:
        """Of heads that read one state: the logits of so many guesses, [depth * S, V].

        `first`: the first of them. Valid until the next pass.
        """
        self.use(state_SH)
        num_seqs, step = len(state_SH), self._step
        step.num_tokens, step.num_rows = num_seqs, num_seqs * depth
        step.num_seqs = step.table_width = step.has_parents = step.num_taps = 0
        step.exit_layer = first
        step.threads = native.num_threads()
        logits_RV = self._rows(num_seqs * depth)
        native.check(self._lib.outrider_step(self._model_arg, bytes(4), self._step_arg))
        return logits_RV

    def _set_layer(self, layer: int, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        tensors: dict[int, Any] = {
            3: module.input_layernorm,
            4: attention.q_proj,
            5: attention.k_proj,
            6: attention.v_proj,
            _O: attention.o_proj,
            12: attention.q_norm,
            13: attention.k_norm,
            14: module.post_attention_layernorm,
            15: mlp.gate_proj,
            16: mlp.up_proj,
            17: mlp.down_proj,
        }
        for kind, part in tensors.items():
            if part is not None:
                self.set_tensor(kind, layer, part.weight)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for number, projection in enumerate(projections):
            if projection.bias is not None:
                self.set_tensor(_Q_BIAS + number, layer, projection.bias)

    def _set_reach(self, windows: Sequence[int | None], causal: Sequence[bool] = ()) -> None:
        """What the rows of each layer see; empty: all do as usual."""
        for layer in range(max(len(windows), len(causal))):
            window = (windows[layer] if windows else None) or 0
            is_causal = bool(causal) and causal[layer]
            native.check(
                self._lib.outrider_set_layer(self._handle, layer, window, 0, 0, int(is_causal))
            )

    def _set_ids(self, head: Eagle3Head | DFlashHead) -> None:
        if head.d2t is not None:
            self._set_target_ids(head.target_ids)

    def _set_target_ids(self, ids: torch.Tensor) -> None:
        """The target's ids of the output head's rows, ascending."""
        ids = ids.to(torch.int32).cpu().contiguous()
        native.check(self._lib.outrider_set_ids(self._handle, ids.data_ptr(), len(ids)))

    def _set_ends(self, head: Eagle3Head | DFlashHead, borrowed: Borrowed) -> None:
        """The embedding, last norm and output head: the head's own, or the target's."""
        own = head.embed_tokens.weight.contiguous() if head.config.own_embedding else None
        self._embedding = borrowed.embedding_VH if own is None else own
        self.set_tensor(_EMBED, 0, self._embedding)
        if head.norm is not None:
            self.set_tensor(_FINAL_NORM, 0, head.norm.weight)
        self.set_tensor(_HEAD, 0, borrowed.head_VH if head.lm_head is None else head.lm_head.weight)


def _layer_fields(config: Any) -> dict[str, Any]:
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate": config.intermediate_size,
        "eps": config.rms_norm_eps,
        "feature_width": len(config.taps) * (config.target_hidden_size or config.hidden_size),
    }


def _spec(target: ModelSpec, kind: str, num_layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec(
        name=kind,
        vocab_size=target.vocab_size,
        num_tokens=target.num_tokens,
        num_layers=num_layers,
        hidden_size=target.hidden_size,
        max_positions=target.max_positions,
        kv_bytes_per_token=8 * num_layers * kv_heads * (-(-head_dim // 16) * 16),
        num_parameters=0,
    )


class NativeEagle3(NativeHead):
    """Rows are (token i + 1, features of token i) at position i; drafts chains and trees."""

    trees = True

    def __init__(self, head: Eagle3Head, borrowed: Borrowed, target: ModelSpec, dtype: str) -> None:
        config = head.config
        num_layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
        reads = config.projects or reads_fused(head)
        fields = _layer_fields(config) | ({"feature_width": config.hidden_size} if reads else {})
        super().__init__(
            _spec(target, head.kind, num_layers, kv_heads, config.head_dim),
            dtype,
            config.rope,
            kind=_EAGLE3,
            layers=num_layers,
            qk_norm=int(config.qk_norm),
            head_rows=config.draft_vocab_size,
            variant=_variant(head),
            parts=_scaling(config.logit_scale),
            **fields,
        )
        self._borrowed = borrowed
        self.take_weights(head)
        self._set_ids(head)
        self._set_reach(config.windows)
        self._check_ready()
        self._extend_rope(min(2048, target.max_positions))

    def take_weights(self, head: Eagle3Head) -> None:
        """Packs the weights of a head of this shape; may be repeated. The cache stays."""
        self._set_ends(head, self._borrowed)
        if head.fc is not None and not reads_fused(head):
            self.set_tensor(_FC, 0, head.fc.weight)
            if head.fc.bias is not None:
                self.set_tensor(_FC_BIAS, 0, head.fc.bias)
        for number, layer in enumerate(head.layers):
            self._set_layer(number, layer)
        first: Any = head.layers[0]
        if first.hidden_norm is not None:
            self.set_tensor(_HIDDEN_NORM, 0, first.hidden_norm.weight)


class NativePEagle(NativeEagle3):
    """Guesses all drafts in one pass: rows of the mask token follow those of the text."""

    def __init__(self, head: Eagle3Head, borrowed: Borrowed, target: ModelSpec, dtype: str) -> None:
        super().__init__(head, borrowed, target, dtype)
        self._mask_token = head.config.mask_token_id or 0
        with torch.no_grad():
            self._mask_1H = head.fuse(head.mask_hidden.view(1, 1, len(head.taps), -1))[0]

    def guess(self, batch: StepBatch, num_masks: int) -> torch.Tensor:
        """Logits of the last row of each text and of the masks after it, [S, 1 + num_masks, V].

        The batch has the rows of the text, whose features are in `use`. The masks' keys and values
        are written after them; a later pass overwrites them. Valid until the next pass.
        """
        ends, num_seqs = batch.starts_S1[1:], len(batch.context_S)
        after = np.repeat(ends, num_masks)
        steps = np.tile(np.arange(1, num_masks + 1, dtype=np.int32), num_seqs)
        shift = np.arange(num_seqs + 1, dtype=np.int32) * num_masks
        last = (ends + shift[1:] - 1)[:, None]
        rows = last + np.arange(-num_masks, 1, dtype=np.int32)
        masks = np.full(len(after), self._mask_token, np.int32)
        positions = np.insert(batch.positions_T, after, batch.positions_T[after - 1] + steps)
        widened = replace(
            batch,
            tokens_T=np.insert(batch.tokens_T, after, masks),
            positions_T=positions.astype(np.int32),
            starts_S1=batch.starts_S1 + shift,
            logit_rows_R=rows.flatten().astype(np.int32),
        )
        pieces: list[torch.Tensor] = []
        for start, end in pairwise(batch.starts_S1.tolist()):
            pieces += [self._features[start:end], self._mask_1H.expand(num_masks, -1)]
        self.use(torch.cat(pieces))
        packed = self._describe(widened)
        logits_RV = self._rows(self._step.num_rows)
        code = self._lib.outrider_step(self._model_arg, packed, self._step_arg)
        if code:
            self._repair(code, widened, 0)
            native.check(self._lib.outrider_step(self._model_arg, packed, self._step_arg))
        return logits_RV.view(num_seqs, 1 + num_masks, -1)


def reads_fused(head: Eagle3Head) -> bool:
    """Whether the torch module makes one feature of the taps: norms and biases are not native.

    P-EAGLE's masks have such a feature without taps.
    """
    config = head.config
    more = config.num_fc_norms or config.input_norm or config.fc_bias or config.reads_last_state
    return bool(more or config.mask_token_id is not None) and not config.projects


def _scaling(logit_scale: float) -> native.Parts:
    """0 is no factor for the library."""
    return native.Parts(logit_scale=0.0 if logit_scale == 1.0 else logit_scale)


def _variant(head: Eagle3Head) -> int:
    config = head.config
    return (
        _PROJECTS * config.projects
        + _FUSED * reads_fused(head)
        + _NORM_RESIDUAL * config.norm_before_residual
        + _FEEDS_NORMED * config.norm_output
    )


class NativeDFlash(NativeHead):
    """Rows are features of tokens i, with the token after each; drafts one block of chains."""

    def __init__(self, head: DFlashHead, borrowed: Borrowed, target: ModelSpec, dtype: str) -> None:
        config = head.config
        num_layers = config.num_hidden_layers
        spec = _spec(target, head.kind, num_layers, config.num_key_value_heads, config.head_dim)
        super().__init__(
            spec,
            dtype,
            config.rope,
            kind=_DFLASH,
            layers=num_layers,
            qk_norm=1,
            head_rows=config.draft_vocab_size or target.vocab_size,
            markov_rank=config.markov_rank,
            variant=_FROM_ANCHOR if config.samples_from_anchor else 0,
            **_layer_fields(config),
        )
        self.num_places = config.num_drafts
        self._mask_token = config.mask_token_id
        self._set_ends(head, borrowed)
        self.set_tensor(_FC, 0, head.fc.weight)
        self.set_tensor(_HIDDEN_NORM, 0, head.hidden_norm.weight)
        for number, layer in enumerate(head.layers):
            self._set_layer(number, layer)
            if config.sinks:
                attention: Any = layer.self_attn
                self.set_tensor(_SINKS, number, attention.attention_sink_bias)
        if config.markov_rank:
            self.set_tensor(_MARKOV_EMBED, 0, head.markov_embed.weight)
            self.set_tensor(_MARKOV_HEAD, 0, head.markov_head.weight)
        self._set_ids(head)
        self._set_reach(config.windows, config.causal)
        self._check_ready()
        self._extend_rope(min(2048, target.max_positions))

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """Denoises a whole block, as in training, and returns its first tokens."""
        packed = self._describe(batch)
        width = self.num_places
        out = (ctypes.c_int32 * (self._step.num_seqs * width))()
        draft = native.Draft(ctypes.addressof(out), width, self._mask_token)
        self._draft(self._lib.outrider_draft, batch, packed, num_tokens_S, rows, key_S, draft)
        return [out[i * width : i * width + n] for i, n in enumerate(num_tokens_S.tolist())]


class NativeMedusa(NativeHead):
    """Logits of all heads from the target's last states."""

    def __init__(
        self, head: MedusaHeads, borrowed: Borrowed, target: ModelSpec, dtype: str
    ) -> None:
        config = head.config
        has_own = not (config.original_lm_head or config.one_lm_head)
        rows = 0 if config.original_lm_head else config.draft_vocab_size
        spec = _spec(target, head.kind, 0, 0, 1)
        super().__init__(
            spec,
            dtype,
            RopeConfig(),
            kind=_MEDUSA,
            hidden=config.hidden_size,
            layers=config.num_heads * config.num_hidden_layers,
            intermediate=config.num_heads,
            heads=1,
            kv_heads=1,
            head_dim=1,
            head_rows=rows or target.vocab_size,
            feature_width=config.hidden_size,
            eps=borrowed.norm_eps,
            variant=_OWN_HEADS if has_own else 0,
            parts=_scaling(config.logit_scale),
        )
        self.set_tensor(_FINAL_NORM, 0, borrowed.norm_H)
        order = None if head.token_map is None else head.token_map.argsort()
        if config.original_lm_head:
            self.set_tensor(_HEAD, 0, borrowed.head_VH)
        else:
            for number, own in enumerate(head.lm_heads):
                weight: Any = own.weight
                self.set_tensor(_HEAD, number, weight if order is None else weight[order])
        if head.token_map is not None:
            self._set_target_ids(head.token_map[order])
        blocks: Any = head.blocks
        linears = [linear for block in blocks for linear in block["layers"]]
        for number, linear in enumerate(linears):
            self.set_tensor(_O, number, linear.weight)
            if linear.bias is not None:
                self.set_tensor(_Q_BIAS + 3, number, linear.bias)
        self._check_ready()

    def guess(self, hidden_SH: torch.Tensor, depth: int) -> torch.Tensor:
        """The logits, [S, depth, V], from hidden states before the target's last norm."""
        return self.guesses(hidden_SH, depth).view(depth, len(hidden_SH), -1).transpose(0, 1)


class NativeMlp(NativeHead):
    """The output heads of an MLP speculator, where nearly all of its bytes are."""

    def __init__(self, head: MlpHead, target: ModelSpec, dtype: str) -> None:
        config = head.config
        super().__init__(
            _spec(target, head.kind, 0, 0, 1),
            dtype,
            RopeConfig(),
            kind=_MEDUSA,
            hidden=config.inner_dim,
            layers=0,
            intermediate=len(head.head),
            heads=1,
            kv_heads=1,
            head_dim=1,
            head_rows=target.vocab_size,
            feature_width=config.inner_dim,
            eps=1e-6,
            variant=_OWN_HEADS | _AS_GIVEN,
        )
        for number, own in enumerate(head.head):
            weight: Any = own.weight
            self.set_tensor(_HEAD, number, weight)
        self._last = len(head.head) - 1

    def logits(self, state_RI: torch.Tensor, step: int) -> torch.Tensor:
        """[R, V], valid until the next call."""
        return self.guesses(state_RI, 1, min(step, self._last))


def runs_natively(head: Head) -> bool:
    """Whether a native model computes exactly what the head does."""
    if isinstance(head, DFlashHead):
        config = head.config
        ahead = any(window and window < config.block_size for window in config.windows)
        return config.markov_type == "vanilla" and not (ahead or config.mask_embedding)
    return isinstance(head, (Eagle3Head, MedusaHeads, MlpHead))


def native_head(head: Head, borrowed: Borrowed, target: ModelSpec, dtype: str) -> FastHead:
    """See `heads.RunsHeads.make_head`; the head must be one that `runs_natively`."""
    if isinstance(head, Eagle3Head):
        cls = NativeEagle3 if head.config.mask_token_id is None else NativePEagle
        return cls(head, borrowed, target, dtype)
    assert isinstance(head, DFlashHead)
    return NativeDFlash(head, borrowed, target, dtype)
