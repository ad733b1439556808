"""The compact decoder: Llama-shaped models in a dozen torch operations a layer.

It is the reference of the native step and the base of the GPU decoder. Two permutations at load
time save operations in every layer; they change no number:

- query heads are stored group-major, [G, K], so that the heads that share a key become the rows of
  one attention call by a view;
- the two halves of each head are interleaved, so that rope is one complex multiplication.

Shape legend: T tokens of the pass, R rows with logits, V vocabulary, H hidden, I intermediate,
K key/value heads, G query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
import torch.nn.functional as F

from outrider.contracts import IntArray, ModelSpec, StepBatch, StepOutput
from outrider.model.attention import Plan
from outrider.model.families import DecoderConfig, read_decoder_config
from outrider.model.gguf.files import model_name
from outrider.model.weights import count_tokens, open_checkpoint, read_config, read_eos_ids


class Tensors(Protocol):
    """A source of weights: `Checkpoint`, or any other object with tensors by name."""

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor: ...


@dataclass(slots=True)
class Layer:
    """The weights of one layer, fused and permuted. Biases are None if the family has none."""

    attention_norm_H: torch.Tensor
    qkv: torch.Tensor  # [(G + 2) * K * D, H]
    qkv_bias: torch.Tensor | None
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    o: torch.Tensor  # [G * K * D, H]: transposed view
    o_bias: torch.Tensor | None
    mlp_norm_H: torch.Tensor
    gate_up: torch.Tensor  # [2 * I, H]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [I, H]: transposed view
    down_bias: torch.Tensor | None
    window: int | None


class TorchDecoder:
    """`contracts.Model` for the families of `outrider.model.families`."""

    spec: ModelSpec
    continues = True
    rounds_drafts = False  # draft models beside it are fastest in int8

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        layers: list[Layer],
        embedding_VH: torch.Tensor,
        norm_H: torch.Tensor,
        head_VH: torch.Tensor,
    ) -> None:
        self.config = config
        self.spec = spec
        self.device = embedding_VH.device
        self.dtype = embedding_VH.dtype
        self.layers = layers
        self.embedding_VH = embedding_VH
        self.norm_H = norm_H
        self.head_VH = head_VH
        self._frequencies = config.rope.frequencies(config.head_dim).to(self.device)
        self._rope_scale = torch.tensor(config.rope.attention_factor, device=self.device)
        self._min_window = min((w for w in config.windows if w is not None), default=None)
        self.store: torch.Tensor | None = None
        self._block_size = 0

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Reads a Hugging Face folder. `dtype` None: float32 on a CPU, else as stored."""
        folder = Path(folder)
        raw = read_config(folder)
        config = read_decoder_config(raw)
        return cls.read(
            open_checkpoint(folder),
            config,
            name=model_name(folder),
            num_tokens=count_tokens(folder, config.vocab_size),
            eos_ids=read_eos_ids(folder, raw),
            device=torch.device(device),
            dtype=dtype,
        )

    @classmethod
    def read(
        cls,
        checkpoint: Tensors,
        config: DecoderConfig,
        *,
        name: str,
        num_tokens: int,
        eos_ids: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Builds the decoder from any source of tensors."""
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else getattr(torch, config.dtype)
        loader = Loader(checkpoint, config, device, dtype)
        layers = [loader.layer(i) for i in range(config.num_layers)]
        embedding, norm, head = loader.embedding(), loader.norm(), loader.head()
        head = embedding if head is None else head
        spec = ModelSpec(
            name=name,
            vocab_size=config.vocab_size,
            num_tokens=num_tokens,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            max_positions=config.max_positions,
            kv_bytes_per_token=2
            * config.num_layers
            * config.num_kv_heads
            * config.head_dim
            * dtype.itemsize,
            num_parameters=loader.num_parameters,
            eos_ids=eos_ids,
            draft_dtype="int8" if cls.rounds_drafts and device.type == "cuda" else None,
        )
        return cls(config, spec, layers, embedding, norm, head)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Replaces the KV store by an empty one of `num_blocks * block_size` slots."""
        config = self.config
        num_slots = num_blocks * block_size
        shape = (config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
        self.store = None  # frees the old store before the new one is allocated
        self.store = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._block_size = block_size

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> StepOutput:
        assert self.store is not None, "allocate first"
        plan = Plan(
            batch,
            block_size=self._block_size,
            group_size=self.config.group_size,
            kv_width=self.config.num_kv_heads * self.config.head_dim,
            device=self.device,
            dtype=self.dtype,
            min_window=self._min_window,
        )
        positions = torch.from_numpy(batch.positions_T).to(self.device)
        turns = torch.polar(self._rope_scale, positions[:, None] * self._frequencies)[:, None]
        begun = batch.begun
        if begun is None:
            first, x_TH = 0, self.embedding_VH[torch.from_numpy(batch.tokens_T).to(self.device)]
        else:
            first, x_TH = begun.layer, begun.states_NH.clone()  # layers add to x in place
        taps: dict[int, torch.Tensor] = {}
        depth = len(self.layers) if batch.exit_layer is None else batch.exit_layer
        for i in range(first, depth):
            if i in batch.taps:
                taps[i] = x_TH.clone()
            self._layer(self.layers[i], self.store[i], x_TH, turns, plan)
        if depth in batch.taps:
            taps[depth] = x_TH
        rows = torch.from_numpy(batch.logit_rows_R).to(self.device)
        x_RH = x_TH if len(rows) == len(x_TH) == 1 else x_TH[rows]
        logits = self._logits(self._norm(x_RH, self.norm_H))
        return StepOutput(logits_RV=logits, taps=taps)

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copies the K/V of physical slots; all sources are read before any target is written."""
        assert self.store is not None, "allocate first"
        from_, to = (torch.from_numpy(a).to(self.device, torch.int64) for a in (source, target))
        self.store.index_copy_(2, to, self.store.index_select(2, from_))

    def _layer(
        self,
        layer: Layer,
        store_2SKD: torch.Tensor,
        x_TH: torch.Tensor,
        turns: torch.Tensor,
        plan: Plan,
    ) -> None:
        """Runs one layer: adds to `x_TH` in place and stores the new tokens' keys and values."""
        config = self.config
        num_kv, group, dim = config.num_kv_heads, config.group_size, config.head_dim
        num_tokens = len(x_TH)
        h = self._norm(x_TH, layer.attention_norm_H)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(num_tokens, (group + 2) * num_kv, dim)
        num_q = group * num_kv
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            qkv[:, :num_q] = self._norm(qkv[:, :num_q], layer.q_norm_D)
            qkv[:, num_q : num_q + num_kv] = self._norm(
                qkv[:, num_q : num_q + num_kv], layer.k_norm_D
            )
        _rotate(qkv[:, : num_q + num_kv], turns)
        new_2TKD = qkv[:, num_q:].view(num_tokens, 2, num_kv, dim).transpose(0, 1)
        if isinstance(plan.new_slots, slice):
            store_2SKD[:, plan.new_slots] = new_2TKD
        else:
            store_2SKD.index_copy_(1, plan.new_slots, new_2TKD)
        attended = plan.attend(
            qkv[:, :num_q].view(num_tokens, group, num_kv, dim),
            store_2SKD[0],
            store_2SKD[1],
            scale=dim**-0.5,
            window=layer.window,
        )
        self._add_product(x_TH, attended.reshape(num_tokens, -1), layer.o, layer.o_bias)
        h = self._norm(x_TH, layer.mlp_norm_H)
        gate, up = F.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        self._add_product(x_TH, F.silu(gate).mul_(up), layer.down, layer.down_bias)

    def _add_product(
        self, x_TH: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        x_TH.addmm_(a, weight)
        if bias is not None:
            x_TH.add_(bias)

    def _logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        return F.linear(x_RH, self.head_VH).float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _rotate(x_THD: torch.Tensor, turns: torch.Tensor) -> None:
    """Rope in place: pairs of `x_THD` times the unit complex numbers `turns`, [T, 1, D / 2]."""
    pairs = x_THD.view(*x_THD.shape[:-1], -1, 2)
    if x_THD.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns)))


class Loader:
    """Reads, fuses and permutes weights, and counts their parameters."""

    def __init__(
        self,
        checkpoint: Tensors,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.device = device
        self.dtype = dtype
        self.num_parameters = 0

    def _read(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.checkpoint.tensor(name, shape)
        self.num_parameters += tensor.numel()
        return tensor

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def embedding(self) -> torch.Tensor:
        config = self.config
        return self._place(
            self._read("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        )

    def norm(self) -> torch.Tensor:
        return self._place(self._read("model.norm.weight", self.config.hidden_size))

    def head(self) -> torch.Tensor | None:
        """The output head; None if it is tied to the embedding."""
        if self.config.tied:
            return None
        return self._place(
            self._read("lm_head.weight", self.config.vocab_size, self.config.hidden_size)
        )

    def _heads(self, x: torch.Tensor, *, rope: bool, query: bool) -> torch.Tensor:
        """Reorders rows [heads * D, ...]: halves interleaved, query heads group-major."""
        config = self.config
        dim, rest = config.head_dim, x.shape[1:]
        if rope:
            x = x.view(-1, 2, dim // 2, *rest).transpose(1, 2)
        x = x.reshape(-1, dim, *rest)
        if query:
            x = x.view(config.num_kv_heads, config.group_size, dim, *rest).transpose(0, 1)
        return x.reshape(-1, *rest)

    def _qkv(self, prefix: str, *rest: int) -> torch.Tensor:
        config = self.config
        num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = (
            self._read(prefix.replace("*", name), size, *rest)
            for name, size in (("q", num_q), ("k", num_kv), ("v", num_kv))
        )
        parts = [self._heads(q, rope=True, query=True), self._heads(k, rope=True, query=False), v]
        return self._place(torch.cat([part.to(self.dtype) for part in parts]))

    def layer(self, index: int) -> Layer:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        num_q, dim = config.num_heads * config.head_dim, config.head_dim
        at = f"model.layers.{index}."
        o = self._read(f"{at}self_attn.o_proj.weight", hidden, num_q)
        o = self._heads(o.t(), rope=False, query=True).t()
        norms: list[torch.Tensor | None] = [None, None]
        if config.qk_norm:
            norms = [
                self._place(
                    self._heads(
                        self._read(f"{at}self_attn.{which}_norm.weight", dim),
                        rope=True,
                        query=False,
                    )
                )
                for which in "qk"
            ]

        def bias(name: str, size: int, present: bool) -> torch.Tensor | None:
            return self._place(self._read(f"{at}{name}.bias", size)) if present else None

        gate_up_bias = None
        if config.mlp_bias:
            gate_up_bias = self._place(
                torch.cat([self._read(f"{at}mlp.{w}_proj.bias", inner) for w in ("gate", "up")])
            )
        return Layer(
            attention_norm_H=self._place(self._read(f"{at}input_layernorm.weight", hidden)),
            qkv=self._qkv(f"{at}self_attn.*_proj.weight", hidden),
            qkv_bias=self._qkv(f"{at}self_attn.*_proj.bias") if config.qkv_bias else None,
            q_norm_D=norms[0],
            k_norm_D=norms[1],
            o=self._place(o).t(),
            o_bias=bias("self_attn.o_proj", hidden, config.o_bias),
            mlp_norm_H=self._place(self._read(f"{at}post_attention_layernorm.weight", hidden)),
            gate_up=self._place(
                torch.cat(
                    [self._read(f"{at}mlp.{w}_proj.weight", inner, hidden) for w in ("gate", "up")]
                )
            ),
            gate_up_bias=gate_up_bias,
            down=self._place(self._read(f"{at}mlp.down_proj.weight", hidden, inner)).t(),
            down_bias=bias("mlp.down_proj", hidden, config.mlp_bias),
            window=config.windows[index],
        )
