"""Drafting heads on the CPU, as native models: a whole draft is one call.

Drafts may be inexact, so the weights may be rounded: int8 halves the bytes that a step of the head
reads and hardly lowers acceptance. Results need not equal those of the torch modules bit for bit.

Shapes: S sequences, n rows of features, F width of all taps side by side, D depths, V vocabulary.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider import native
from outrider.contracts import IntArray, ModelSpec, StepBatch
from outrider.model.borrowed import Borrowed
from outrider.model.heads import DFlashHead, Eagle3Head, FastHead, Head, MedusaHeads
from outrider.model.native_model import WEIGHT_TYPES, NativeModel
from outrider.model.rope import RopeConfig
from outrider.sampling import RowParams

_EMBED, _FINAL_NORM, _HEAD, _O = 0, 1, 2, 7
_Q_BIAS = 8  # then those of keys, values and the last projection
_FC, _HIDDEN_NORM, _MARKOV_EMBED, _MARKOV_HEAD, _FC_BIAS = 21, 22, 23, 24, 37
_PROJECTS, _FUSED, _NORM_RESIDUAL, _FEEDS_NORMED, _FROM_ANCHOR = 1, 2, 4, 8, 16
_EAGLE3, _DFLASH, _MEDUSA = 1, 2, 3

HEAD_WEIGHTS = ("int8", *(name for name in WEIGHT_TYPES if name != "int8"))  # the usual first


class NativeHead(NativeModel):
    """Base of the native heads: a native config built from the head's, and features as input."""

    trees = False

    def __init__(self, spec: ModelSpec, dtype: str, rope: RopeConfig, **fields: Any) -> None:
        super().__init__(
            native.Config(
                vocab=spec.vocab_size,
                num_tokens=spec.num_tokens,
                weight_type=WEIGHT_TYPES[dtype],
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
        "feature_width": len(config.taps) * config.hidden_size,
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
            **fields,
        )
        self._set_ends(head, borrowed)
        if head.fc is not None and not reads_fused(head):
            self.set_tensor(_FC, 0, head.fc.weight)
            if head.fc.bias is not None:
                self.set_tensor(_FC_BIAS, 0, head.fc.bias)
        for number, layer in enumerate(head.layers):
            self._set_layer(number, layer)
        first: Any = head.layers[0]
        if first.hidden_norm is not None:
            self.set_tensor(_HIDDEN_NORM, 0, first.hidden_norm.weight)
        if head.d2t is not None:
            ids = head.target_ids.to(torch.int32).contiguous()
            native.check(self._lib.outrider_set_ids(self._handle, ids.data_ptr(), len(ids)))
        self._check_ready()
        self._extend_rope(min(2048, target.max_positions))


def reads_fused(head: Eagle3Head) -> bool:
    """Whether the torch module makes one feature of the taps: norms and biases are not native."""
    config = head.config
    more = config.num_fc_norms or config.input_norm or config.fc_bias or config.reads_last_state
    return bool(more) and not config.projects


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
            head_rows=target.vocab_size,
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
        if config.markov_rank:
            self.set_tensor(_MARKOV_EMBED, 0, head.markov_embed.weight)
            self.set_tensor(_MARKOV_HEAD, 0, head.markov_head.weight)
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
    """Logits of all heads from the target's last states; only for heads with its output head."""

    def __init__(
        self, head: MedusaHeads, borrowed: Borrowed, target: ModelSpec, dtype: str
    ) -> None:
        config = head.config
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
            head_rows=target.vocab_size,
            feature_width=config.hidden_size,
            eps=borrowed.norm_eps,
        )
        self.set_tensor(_FINAL_NORM, 0, borrowed.norm_H)
        own: Any = head.lm_heads[0] if config.one_lm_head else None
        self.set_tensor(_HEAD, 0, borrowed.head_VH if own is None else own.weight)
        blocks: Any = head.blocks
        linears = [linear for block in blocks for linear in block["layers"]]
        for number, linear in enumerate(linears):
            self.set_tensor(_O, number, linear.weight)
            if linear.bias is not None:
                self.set_tensor(_Q_BIAS + 3, number, linear.bias)
        self._check_ready()

    def guess(self, hidden_SH: torch.Tensor, depth: int) -> torch.Tensor:
        """The logits, [S, depth, V], from hidden states before the target's last norm."""
        self.use(hidden_SH)
        num_seqs, step = len(hidden_SH), self._step
        step.num_tokens, step.num_rows = num_seqs, num_seqs * depth
        step.num_seqs = step.table_width = step.has_parents = step.num_taps = 0
        step.exit_layer = -1
        step.threads = native.num_threads()
        logits_RV = self._rows(num_seqs * depth)
        native.check(self._lib.outrider_step(self._model_arg, bytes(4), self._step_arg))
        return logits_RV.view(depth, num_seqs, -1).transpose(0, 1)


def runs_natively(head: Head) -> bool:
    """Whether a native model computes exactly what the head does."""
    if isinstance(head, Eagle3Head):
        eagle = head.config
        size = eagle.target_hidden_size or eagle.hidden_size
        is_odd = eagle.mask_token_id is not None or eagle.logit_scale != 1.0 or bool(eagle.windows)
        return not is_odd and size == eagle.hidden_size
    if isinstance(head, MedusaHeads):
        medusa = head.config
        shared = medusa.original_lm_head or (medusa.one_lm_head and head.token_map is None)
        return shared and medusa.logit_scale == 1.0
    if isinstance(head, DFlashHead):
        dflash = head.config
        varies = (dflash.windows, dflash.causal, dflash.mask_embedding, dflash.target_hidden_size)
        few = dflash.draft_vocab_size not in (None, dflash.vocab_size)
        return not (any(varies) or few) and dflash.markov_type == "vanilla"
    return False


def native_head(head: Head, borrowed: Borrowed, target: ModelSpec, dtype: str) -> FastHead:
    """See `heads.RunsHeads.make_head`; the head must be one that `runs_natively`."""
    if isinstance(head, Eagle3Head):
        return NativeEagle3(head, borrowed, target, dtype)
    assert isinstance(head, DFlashHead)
    return NativeDFlash(head, borrowed, target, dtype)
