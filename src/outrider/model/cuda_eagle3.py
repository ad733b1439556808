"""An EAGLE-3 head on the device: all steps of a draft in one graph, from the target's states.

Row i reads the features of token i and the embedding of token i + 1 (see `proposers.eagle3`). The
position of a row is its place among the rows that the head has read of a text, because rope depends
on differences only. Noise depends on the place in the text, so the sequence keys are shifted by the
difference of the two.

Shape legend: see `outrider.model.cuda_decoder`; F width of all taps side by side, n rows read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import IntArray, ModelSpec, StepBatch, StepOutput
from outrider.cuda.inputs import MAX_TOKENS
from outrider.cuda.ops import Pass
from outrider.cuda.tiles import WIDE
from outrider.errors import EngineError
from outrider.model.borrowed import Borrowed
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.families import DecoderConfig
from outrider.model.heads import Eagle3Head
from outrider.model.int8 import round_rows
from outrider.model.torch_weights import Loader
from outrider.sampling import RowParams


class Product(NamedTuple):
    """The weights of a product, and their scales if they are int8."""

    weight_NK: torch.Tensor
    scale_N: torch.Tensor | None = None

    @classmethod
    def of(cls, weight_NK: torch.Tensor, *, rounded: bool) -> Product:
        weight_NK = weight_NK.contiguous()
        return cls(*round_rows(weight_NK)) if rounded else cls(weight_NK)


class _Weights:
    """The head's tensors under the names that `Loader` uses."""

    def __init__(self, head: Eagle3Head) -> None:
        self._tensors = head.state_dict()

    def tensor(self, name: str, shape: Seq[int]) -> torch.Tensor:
        found: torch.Tensor = self._tensors[name.replace("model.layers.0.", "layers.0.")]
        return found


def _spec(head: Eagle3Head, target: CudaDecoder) -> ModelSpec:
    size = head.config
    return ModelSpec(
        name=head.kind,
        vocab_size=size.vocab_size,
        num_tokens=target.spec.num_tokens,
        num_layers=1,
        hidden_size=size.hidden_size,
        max_positions=target.config.max_positions,
        kv_bytes_per_token=2 * size.num_key_value_heads * size.head_dim * target.dtype.itemsize,
        num_parameters=sum(p.numel() for p in head.parameters()),
    )


class CudaEagle3(CudaDecoder):
    """Drafts chains: a decoder of one layer, whose residual stream starts with features."""

    trees = False

    def __init__(
        self, head: Eagle3Head, borrowed: Borrowed, target: CudaDecoder, *, rounded: bool
    ) -> None:
        size, shape = head.config, target.config
        config = DecoderConfig(
            family="llama",
            vocab_size=size.vocab_size,
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_layers=1,
            num_heads=size.num_attention_heads,
            num_kv_heads=size.num_key_value_heads,
            head_dim=size.head_dim,
            norm_eps=size.rms_norm_eps,
            max_positions=shape.max_positions,
            rope=size.rope,
            tied=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(None,),
            dtype=shape.dtype,
        )
        device, dtype = target.device, target.dtype
        own: Any = head.embed_tokens if size.own_embedding else None
        embedding_VH = borrowed.embedding_VH if own is None else own.weight
        embedding_VH = embedding_VH.to(device, dtype)
        layer = Loader(_Weights(head), config, device, dtype).layer(0)
        assert head.norm is not None
        assert head.lm_head is not None
        norm_H, head_WH = (w.to(device, dtype) for w in (head.norm.weight, head.lm_head.weight))
        super().__init__(
            config, _spec(head, target), [], embedding_VH, norm_H.contiguous(), head_WH
        )
        self.taps = head.taps
        first: Any = head.layers[0]
        assert head.fc is not None
        assert layer.attention_norm_H is not None
        assert layer.mlp_norm_H is not None
        self._token_norm_H, self._mlp_norm_H = layer.attention_norm_H, layer.mlp_norm_H
        self._state_norm_H = first.hidden_norm.weight.to(device, dtype).contiguous()
        by_embedding, by_state = layer.qkv.chunk(2, dim=1)
        self._fc, self._by_embedding, self._by_state, self._o, self._gate_up, self._down = (
            Product.of(weight.to(device, dtype), rounded=rounded)
            for weight in (
                head.fc.weight, by_embedding, by_state, layer.o.t(), layer.gate_up, layer.down.t(),
            )
        )  # fmt: skip
        self._head = Product.of(head_WH, rounded=rounded)
        self.head_VH = self._head.weight_NK
        ids_W = head.target_ids.to(device)
        self._ids_W = None if len(ids_W) == size.vocab_size else ids_W
        self._given = torch.empty(0)
        self._width = 1  # rows of a sequence in `_x`, while a draft is laid out

    def allocate(self, num_blocks: int, block_size: int) -> None:
        super().allocate(num_blocks, block_size)
        width, num_ids = len(self.taps) * self.config.hidden_size, len(self._head.weight_NK)
        self.features = torch.zeros(MAX_TOKENS, width, dtype=self.dtype, device=self.device)
        self.sources = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=self.device)
        self._embedded = torch.zeros_like(self._x)
        self._x.zero_()
        self.logits.fill_(-torch.inf)  # for ids outside the draft vocabulary
        if self._ids_W is None:
            self._few_logits = self.logits
        else:
            self._few_logits = self.logits.new_empty(MAX_TOKENS, num_ids)
        if num_ids <= WIDE:
            config = self.config
            self.ops.reserve(
                MAX_TOKENS, config.num_heads, config.head_dim, num_ids, config.vocab_size
            )

    def forward(self, batch: StepBatch) -> StepOutput:
        raise EngineError("a head only drafts")

    def use(self, features_nF: torch.Tensor) -> None:
        """See `heads.FastHead`."""
        self._given = features_nF

    @torch.no_grad()
    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """See `heads.FastHead`; the drafts ignore filters, which only the target applies."""
        bucket = self._bucket(batch, int(num_tokens_S.max()))
        if bucket is None:
            bucket = self._bucket(_last_rows(batch), int(num_tokens_S.max()))
        if bucket is None:  # too many sequences, or too long
            self._read(batch, np.arange(len(batch.tokens_T)))
            return [[] for _ in batch.context_S]
        self.begin(batch, bucket, rows, key_S)
        return self.replay_draft(bucket, num_tokens_S.tolist())

    @torch.no_grad()
    def begin(
        self,
        batch: StepBatch,
        bucket: tuple[int, int],
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> None:
        """Lays out a draft after the batch; reads a batch that is too wide for the bucket first."""
        last_S = batch.logit_rows_R
        text_S = batch.positions_T[last_S] + 2  # tokens of the text
        rows_S = batch.context_S + np.diff(batch.starts_S1)
        features = self._given
        if int(np.diff(batch.starts_S1).max()) > bucket[1]:
            self._read(batch, np.setdiff1d(np.arange(len(batch.tokens_T)), last_S))
            features = features[torch.from_numpy(last_S).to(features.device)]
            batch = _last_rows(batch)
        else:
            batch = _at_slots(batch)
        place_T = self.lay_out_draft(
            batch, bucket, rows, key_S + (text_S - rows_S).astype(np.uint64)
        )
        self.features[torch.from_numpy(place_T).to(self.device)] = features.to(self.features)

    def follow(self, report: torch.Tensor, verified: Pass, features_TF: torch.Tensor) -> None:
        """Lays out the draft after a verdict; a part of graphs."""
        on = self.inputs.device
        where = self.inputs.at(verified.num_sequences, verified.chain)
        committed, secrets = (on[name][: len(report)] for name in ("committed", "secrets"))
        self.ops.follow(
            report, committed, secrets, self._block_size, verified.width, where, on["keys"],
            self.sources,
        )  # fmt: skip
        count = len(where.tokens_T)
        torch.index_select(features_TF, 0, self.sources[:count], out=self.features[:count])

    def _begin_draft(self, num_sequences: int, width: int) -> None:
        num_rows = num_sequences * width
        self._linear(self.features[:num_rows], self._fc, self._x[:num_rows])
        self._width = width

    def compute(
        self, where: Pass, *, exit_layer: int | None = None, taps: tuple[int, ...] = ()
    ) -> None:
        """Continues from the states of the previous pass."""
        assert isinstance(self.store, torch.Tensor), "allocate first"
        config, ops = self.config, self.ops
        num_tokens = len(where.tokens_T)
        x, inner, attended, normed = (
            b[:num_tokens] for b in (self._x, self._inner, self._attended, self._normed)
        )
        if self._width != where.width:  # the last row of each sequence
            newest = self._x[self._width - 1 : where.num_sequences * self._width : self._width]
            x.copy_(newest.clone())
            self._width = where.width
        heads = self._project(x, where)
        ops.attend(heads, self.store[0], where, self._block_size, attended)
        self._linear(attended.flatten(1), self._o, x, add=True)
        ops.norm(x, self._mlp_norm_H, config.norm_eps, normed)
        self._linear(normed, self._gate_up, inner, gated=True)
        self._linear(inner, self._down, x, add=True)
        ops.norm(x, self.norm_H, config.norm_eps, normed)
        self._linear(normed, self._head, self._few_logits[:num_tokens])
        if self._ids_W is not None:
            self.logits[:num_tokens].index_copy_(1, self._ids_W, self._few_logits[:num_tokens])

    def _project(self, x_TH: torch.Tensor, where: Pass) -> torch.Tensor:
        """Computes queries, keys and values of a pass, and stores keys and values."""
        assert isinstance(self.store, torch.Tensor), "allocate first"
        eps, num_tokens = self.config.norm_eps, len(x_TH)
        embedded, normed, qkv = (b[:num_tokens] for b in (self._embedded, self._normed, self._qkv))
        torch.index_select(self.embedding_VH, 0, where.tokens_T, out=embedded)
        self.ops.norm(embedded, self._token_norm_H, eps, normed)
        self._linear(normed, self._by_embedding, qkv)
        self.ops.norm(x_TH, self._state_norm_H, eps, normed)
        self._linear(normed, self._by_state, qkv, add=True)
        heads = qkv.view(num_tokens, -1, self.config.head_dim)
        self.ops.rope(heads, None, None, eps, self._turns, where, self.store[0])
        return heads

    def _read(self, batch: StepBatch, rows_n: npt.NDArray[np.int64]) -> None:
        """Computes and stores keys and values of these rows of the batch."""
        batch = _at_slots(batch)
        owner_T = np.repeat(np.arange(len(batch.context_S)), np.diff(batch.starts_S1))
        page_T = batch.tables_SW[owner_T, batch.positions_T // self._block_size]
        slots_T = page_T * self._block_size + batch.positions_T % self._block_size
        for start in range(0, len(rows_n), MAX_TOKENS):
            some = rows_n[start : start + MAX_TOKENS]
            tokens, positions, slots = (
                torch.from_numpy(values[some].astype(np.int32)).to(self.device)
                for values in (batch.tokens_T, batch.positions_T, slots_T)
            )
            nothing = self.inputs.at(len(some), 1)
            where = Pass(
                len(some), 1, tokens, positions, slots, nothing.masks_T, nothing.contexts_S,
                nothing.lengths_S, nothing.tables_SW,
            )  # fmt: skip
            given = self._given[torch.from_numpy(some).to(self._given.device)].to(self.features)
            x = self._x[: len(some)]
            self._linear(given, self._fc, x)
            self._project(x, where)

    def _linear(
        self,
        x_TK: torch.Tensor,
        product: Product,
        out_TN: torch.Tensor,
        *,
        gated: bool = False,
        add: bool = False,
    ) -> None:
        weight_NK, scale_N = product
        self.ops.linear(x_TK, weight_NK, out_TN, scale_N=scale_N, gated=gated, add=add)


def _at_slots(batch: StepBatch) -> StepBatch:
    """The batch with positions that count the head's rows of each text."""
    counts_S = np.diff(batch.starts_S1)
    first_T = np.repeat(batch.context_S - batch.starts_S1[:-1], counts_S)
    return replace(batch, positions_T=(np.arange(len(batch.tokens_T)) + first_T).astype(np.int32))


def _last_rows(batch: StepBatch) -> StepBatch:
    """The last row of each sequence, as if the other rows had been read."""
    last_S, num_sequences = batch.logit_rows_R, len(batch.context_S)
    context_S = (batch.context_S + np.diff(batch.starts_S1) - 1).astype(np.int32)
    return replace(
        batch,
        tokens_T=batch.tokens_T[last_S],
        positions_T=context_S,
        starts_S1=np.arange(num_sequences + 1, dtype=np.int32),
        context_S=context_S,
        logit_rows_R=np.arange(num_sequences, dtype=np.int32),
    )
