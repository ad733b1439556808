"""The compact decoder: any description of `outrider.model.families`, in torch.

A Llama takes a dozen operations a layer. It is the reference of the native step and the base of the
GPU decoder. Two permutations at load
time save operations in every layer; they change no number:

- query heads are stored group-major, [G, K], so that the heads that share a key become the rows of
  one attention call by a view;
- the two halves of each head are interleaved, so that rope is one complex multiplication.

Shape legend: T tokens of the pass, R rows with logits, V vocabulary, H hidden, I intermediate,
K key/value heads, G query heads per key/value head, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F

from outrider.contracts import IntArray, ModelSpec, StepBatch, StepOutput
from outrider.model import torch_store
from outrider.model.attention import Plan, Terms
from outrider.model.checkpoints import open_checkpoint
from outrider.model.experts import ExpertLayer
from outrider.model.families import DecoderConfig, read_decoder_config
from outrider.model.families.description import NO_ROPE
from outrider.model.gguf.files import model_name
from outrider.model.mlp import ACTIVATIONS, cut_gates
from outrider.model.residuals import InputTable, StreamEnds, read_input_table, read_stream_ends
from outrider.model.states import StatePass, States
from outrider.model.tensors import Tensors
from outrider.model.torch_heads import finish_logits, grown, norm_heads, rotate
from outrider.model.torch_weights import Layer, Loader
from outrider.model.weights import count_tokens, read_config, read_eos_ids


class TorchDecoder:
    """`contracts.Model` for the families of `outrider.model.families`."""

    spec: ModelSpec
    continues: bool
    rounds_drafts = False  # draft models beside it are fastest in int8

    def __init__(
        self,
        config: DecoderConfig,
        spec: ModelSpec,
        layers: list[Layer],
        embedding_VH: torch.Tensor,
        norm_H: torch.Tensor,
        head_VH: torch.Tensor,
        *,
        norm_bias_H: torch.Tensor | None = None,
        head_bias_V: torch.Tensor | None = None,
        positions_PH: torch.Tensor | None = None,
        embedding_norm: tuple[torch.Tensor, torch.Tensor | None] | None = None,
        input_table: InputTable | None = None,
        stream_ends: StreamEnds | None = None,
    ) -> None:
        """`positions_PH`: the table of learned positions. `embedding_norm`: weight and bias."""
        self.config = config
        self.spec = spec
        self.device = embedding_VH.device
        self.dtype = embedding_VH.dtype
        self.layers = layers
        self.embedding_VH = embedding_VH
        self.norm_H = norm_H
        self.head_VH = head_VH
        self.norm_bias_H = norm_bias_H
        self.head_bias_V = head_bias_V
        self.positions_PH = positions_PH
        self.embedding_norm = embedding_norm
        self.input_table, self.stream_ends = input_table, stream_ends
        slopes = torch.tensor(config.slopes, device=self.device)
        self._slopes_GK = slopes.view(config.num_kv_heads, -1).t() if config.slopes else None
        self._activation = ACTIVATIONS[config.activation]
        self._ropes = [
            (
                torch.tensor(rope.attention_factor, device=self.device),
                rope.frequencies(config.rope_dims(i)).to(self.device),
            )
            for i, rope in enumerate(config.ropes)
        ]
        self._frequencies = self._ropes[0][1]
        self._used_ropes = {layer.rope for layer in layers} - {NO_ROPE}
        limits = [size for size in (*config.windows, *config.chunks) if size is not None]
        self._kinds_of_heads = {(layer.num_kv, layer.head_dim) for layer in layers}
        self._min_window = 0 if config.slopes else min(limits, default=None)
        # States of a pass are those of all layers; inputs of layers are made of embeddings.
        self.continues = config.mixer is None and input_table is None
        self.store: torch_store.Store | None = None
        self._rounds_kv = False
        self.states: States | None = None
        self._block_size = 0

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        kv_dtype: str = "auto",
        max_length: int | None = None,
    ) -> Self:
        """Reads a Hugging Face folder. `dtype` None: float32 on a CPU, else as stored."""
        folder = Path(folder)
        raw = read_config(folder)
        config = read_decoder_config(raw, max_length)
        model = cls.read(
            open_checkpoint(folder),
            config,
            name=model_name(folder),
            num_tokens=count_tokens(folder, config.vocab_size),
            eos_ids=read_eos_ids(folder, raw),
            device=torch.device(device),
            dtype=dtype,
        )
        if kv_dtype == "int8":
            model._rounds_kv = True
            model.spec = replace(model.spec, kv_bytes_per_token=torch_store.rounded_bytes(config))
        return model

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
        embedding, positions, head = loader.embedding(), loader.positions(), loader.head()
        norm, norm_bias = loader.norm()
        head_bias, embedding_norm = loader.head_bias(), loader.embedding_norm()
        input_table = read_input_table(loader.weights, loader.place)
        stream_ends = read_stream_ends(loader.weights, loader.place)
        spec = ModelSpec(
            name=name,
            vocab_size=config.vocab_size,
            num_tokens=num_tokens,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            max_positions=config.max_positions,
            shortened=config.shortened,
            # With recurrent layers also its id: a state may have to be computed again.
            kv_bytes_per_token=config.kv_width * dtype.itemsize + 4 * bool(config.mixer),
            num_parameters=loader.num_parameters,
            eos_ids=eos_ids,
            draft_dtype="int8" if cls.rounds_drafts and device.type == "cuda" else None,
        )
        return cls(
            config,
            spec,
            layers,
            embedding,
            norm,
            embedding if head is None else head,
            norm_bias_H=norm_bias,
            head_bias_V=head_bias,
            positions_PH=positions,
            embedding_norm=embedding_norm,
            input_table=input_table,
            stream_ends=stream_ends,
        )

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Replaces the KV store by an empty one of `num_blocks * block_size` slots."""
        config, num_slots = self.config, num_blocks * block_size
        self.store = None  # frees the old store before the new one is allocated
        self.store = torch_store.make_store(
            config, num_slots, self.dtype, self.device, rounds=self._rounds_kv
        )
        self._block_size = block_size
        if config.mixer is not None:
            self.states = States(
                config.mixer,
                config.num_states,
                num_blocks,
                block_size,
                self.spec.kv_bytes_per_token,
                self.device,
            )

    def has_state(self, slot: int) -> bool:
        """See `KeepsStates`."""
        return self.states is None or self.states.has_state(slot)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> StepOutput:
        assert self.store is not None, "allocate first"
        states = None if self.states is None else self.states.begin(batch, self.forward)
        plans = self._plans(batch)
        positions = torch.from_numpy(batch.positions_T).to(self.device)
        turns = {
            i: torch.polar(scale, positions[:, None] * frequencies)[:, None]
            for i, (scale, frequencies) in enumerate(self._ropes)
            if i in self._used_ropes
        }
        begun = batch.begun
        if begun is None:
            first, x_TH = 0, self._embed(torch.from_numpy(batch.tokens_T), positions)
        else:
            first, x_TH = begun.layer, begun.states_NH.clone()  # layers add to x in place
        inputs = None
        if self.input_table is not None:
            inputs = self.input_table(torch.from_numpy(batch.tokens_T).to(self.device), x_TH)
        x = x_TH if self.stream_ends is None else self.stream_ends.begin(x_TH)
        taps: dict[int, torch.Tensor] = {}
        depth = len(self.layers) if batch.exit_layer is None else batch.exit_layer
        for i in range(first, depth):
            if i in batch.taps:
                taps[i] = self._seen(x).clone()
            layer = self.layers[i]
            plan = plans[layer.num_kv, layer.head_dim]
            beyond = None if inputs is None else inputs[i]
            x = self._whole_layer(layer, x, beyond, turns, plan, states)
        if depth in batch.taps:
            taps[depth] = self._seen(x)
        x_TH = x if self.stream_ends is None else self.stream_ends.end(x)
        rows = torch.from_numpy(batch.logit_rows_R).to(self.device)
        x_RH = x_TH if len(rows) == len(x_TH) == 1 else x_TH[rows]
        logits = self._logits(self._norm(x_RH, self.norm_H, self.norm_bias_H))
        logits = finish_logits(self.config, logits, self.head_bias_V)
        return StepOutput(logits_RV=logits, taps=taps)

    def _plans(self, batch: StepBatch) -> dict[tuple[int, int], Plan]:
        """One for each kind of heads."""
        return {
            (num_kv, dim): Plan(
                batch,
                block_size=self._block_size,
                group_size=self.config.num_heads // num_kv,
                kv_width=num_kv * dim,
                device=self.device,
                dtype=self.dtype,
                min_window=self._min_window,
            )
            for num_kv, dim in self._kinds_of_heads
        }

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H]: the state that a layer reads."""
        return x if self.config.streams is None else x[:, self.config.streams.active]

    def _whole_layer(
        self,
        layer: Layer,
        x: torch.Tensor,
        input_TP: torch.Tensor | None,
        turns: dict[int, torch.Tensor],
        plan: Plan,
        states: StatePass | None,
    ) -> torch.Tensor:
        """Runs a layer and what its family has around it; changes `x` in place without streams."""
        if layer.streams is not None:
            assert layer.input_gate is not None
            assert input_TP is not None
            x_TNH = layer.streams.predict(x)
            computed_TH = self._seen(x_TNH).clone()
            self._layer(layer, computed_TH, turns, plan, states)
            x_TNH = layer.streams.correct(x_TNH, computed_TH)
            layer.streams.add_input(x_TNH, layer.input_gate, input_TP)
            return x_TNH
        self._layer(layer, x, turns, plan, states)
        if layer.input_gate is not None and input_TP is not None:
            x += layer.input_gate(x, input_TP)
        return x if layer.scale == 1.0 else x.mul_(layer.scale)

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        """Copies the K/V of physical slots; all sources are read before any target is written."""
        assert self.store is not None, "allocate first"
        from_, to = (torch.from_numpy(a).to(self.device, torch.int64) for a in (source, target))
        torch_store.move_slots(self.store, from_, to)
        if self.states is not None:
            self.states.copy_slots(source, target)

    def _embed(self, tokens_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        x_TH = self.embedding_VH[tokens_T.to(self.device)]
        if self.config.embedding_scale != 1.0:
            x_TH *= torch.tensor(self.config.embedding_scale, dtype=self.dtype, device=self.device)
        if self.positions_PH is not None:
            x_TH += self.positions_PH[positions_T + self.config.position_offset]
        if self.embedding_norm is not None:
            x_TH = self._norm(x_TH, *self.embedding_norm)
        return x_TH

    def _layer(
        self,
        layer: Layer,
        x_TH: torch.Tensor,
        turns: dict[int, torch.Tensor],
        plan: Plan,
        states: StatePass | None,
    ) -> None:
        """Runs one layer: adds to `x_TH` in place and stores keys, values and states."""
        h = self._norm(x_TH, layer.attention_norm_H, layer.attention_norm_bias_H)
        if layer.stays[0]:
            torch.mul(h, layer.stays[0], out=x_TH)
        beside = self._mlp_input(layer, x_TH, h) if self.config.parallel else None
        if layer.mixer is not None:
            assert states is not None
            mixed = layer.mixer(h, states, layer.state)
            self._add_product(x_TH, mixed, layer.mixer.out, layer.mixer.out_bias)
        if layer.kv >= 0:
            attended = self._attend(layer, h, turns, plan)
            self._add_product(x_TH, attended, layer.o, layer.o_bias, layer.attention_out_norm_H)
        if layer.streams is not None:
            x_TH.add_(layer.streams.low_rank(h)).mul_(2.0**-0.5)
        if not layer.has_mlp:
            return
        h = self._mlp_input(layer, x_TH, h) if beside is None else beside
        if layer.experts is not None:
            self._add_experts(layer, layer.experts, x_TH, h)
            return
        inner = self._activated(layer, h)
        self._add_product(x_TH, inner, layer.down, layer.down_bias, layer.mlp_out_norm_H)

    def _activated(self, layer: Layer, h_TH: torch.Tensor) -> torch.Tensor:
        """[T, I]: what the MLP's output product multiplies."""
        inner = F.linear(h_TH, layer.gate_up, layer.gate_up_bias)
        if not self.config.gated:
            return self._activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        if layer.cut:
            gate = cut_gates(gate, layer.cut)
        return self._activation(gate).mul_(up)

    def _add_experts(
        self, layer: Layer, experts: ExpertLayer, x_TH: torch.Tensor, h_TH: torch.Tensor
    ) -> None:
        """Adds the chosen experts of each token, and the MLP beside them."""
        if experts.config.apart:
            part = experts.apart(x_TH, self._activated(layer, h_TH) @ layer.down)
            x_TH.add_(self._norm(part, layer.mlp_out_norm_H))
            return
        part = experts(h_TH)
        if layer.down.numel():
            shared = self._activated(layer, h_TH) @ layer.down
            if layer.down_bias is not None:
                shared += layer.down_bias
            factor = experts.shared_factor(h_TH)
            part += shared if factor is None else shared * factor
        x_TH.add_(self._norm(part, layer.mlp_out_norm_H), alpha=self.config.residual_scale)

    def _mlp_input(self, layer: Layer, x_TH: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        if self.config.one_norm:
            return normed
        h = self._norm(x_TH, layer.mlp_norm_H, layer.mlp_norm_bias_H)
        if layer.stays[1]:
            torch.mul(h, layer.stays[1], out=x_TH)
        return h

    def _attend(
        self,
        layer: Layer,
        h_TH: torch.Tensor,
        turns: dict[int, torch.Tensor],
        plan: Plan,
    ) -> torch.Tensor:
        """[T, G * K * D]; stores the new tokens' keys and values."""
        assert self.store is not None
        config = self.config
        num_kv, dim, num_q = layer.num_kv, layer.head_dim, config.num_heads
        num_tokens, group = len(h_TH), num_q // num_kv
        if layer.latent is not None:
            qkv = layer.latent.heads(h_TH, dim)
        else:
            qkv = F.linear(h_TH, layer.qkv, layer.qkv_bias)
            qkv = qkv.view(num_tokens, -1, dim)
        if not config.qk_norm_late:
            norm_heads(config, layer, qkv)
        if layer.rope != NO_ROPE:
            turned = turns[layer.rope]
            rotate(qkv[:, : num_q + num_kv, : 2 * turned.shape[-1]], turned)
        if config.qk_norm_late:
            norm_heads(config, layer, qkv)
        if layer.stores:
            new_2TKD = qkv[:, num_q:].view(num_tokens, 2, num_kv, dim).transpose(0, 1)
            if config.value_unit:
                values = new_2TKD[1]
                values.copy_(F.rms_norm(values, (dim,), None, config.norm_eps))
            torch_store.write(self.store, layer.kv, plan.new_slots, new_2TKD)
        q_TND = qkv[:, :num_q]
        if config.growth is not None and (config.growth.everywhere or layer.rope == NO_ROPE):
            q_TND = q_TND * grown(config.growth, plan.positions_T, self.dtype)
        attended = plan.attend(
            q_TND.reshape(num_tokens, group, num_kv, dim),
            *torch_store.keys_and_values(self.store, layer.kv, self.dtype),
            Terms(
                scale=config.score_scale,
                window=layer.window,
                chunk=layer.chunk,
                softcap=config.score_cap,
                sinks_GK=layer.sinks_GK,
                slopes_GK=self._slopes_GK,
            ),
        )
        if config.latent is not None:
            attended = attended[..., : config.latent.value]
        attended = attended.reshape(num_tokens, -1)
        if layer.q_gate is not None:
            attended = attended * torch.sigmoid(F.linear(h_TH, layer.q_gate, layer.q_gate_bias))
        return attended

    def _add_product(
        self,
        x_TH: torch.Tensor,
        a: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_H: torch.Tensor | None = None,
    ) -> None:
        scale = self.config.residual_scale
        if norm_H is not None:
            part = a @ weight if bias is None else torch.addmm(bias, a, weight)
            x_TH.add_(self._norm(part, norm_H), alpha=scale)
            return
        x_TH.addmm_(a, weight, alpha=scale)
        if bias is not None:
            x_TH.add_(bias, alpha=scale)

    def _logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        return F.linear(x_RH, self.head_VH).float()

    def _norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` itself without a weight."""
        if weight is None:
            return x
        if self.config.layer_norm:
            return F.layer_norm(x, weight.shape, weight, bias, self.config.norm_eps)
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)
