"""The weights of the torch decoder: fused and permuted, layer by layer.

Shape legend: V vocabulary, H hidden, I intermediate, K key/value heads, G query heads per
key/value head, D head size, N heads of queries or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.model.experts import ExpertLayer
from outrider.model.families.description import DecoderConfig
from outrider.model.families.shapes import norm_names
from outrider.model.latent import LatentLayer, read_latent
from outrider.model.recurrent import MixerLayer, read_mixer
from outrider.model.residuals import InputGate, StreamLayer, read_input_gate, read_stream_layer
from outrider.model.tensors import Tensors, Weights


@dataclass(slots=True, kw_only=True)
class Layer:
    """The weights of one layer, fused and permuted. None: the family has none."""

    attention_norm_H: torch.Tensor | None
    qkv: torch.Tensor  # [(G + 2) * K * D, H]; [0] without attention
    qkv_bias: torch.Tensor | None
    q_norm_D: torch.Tensor | None  # [D], or [N * D] if heads have weights of their own
    k_norm_D: torch.Tensor | None
    q_gate: torch.Tensor | None  # [G * K * D, H]
    q_gate_bias: torch.Tensor | None
    o: torch.Tensor  # [G * K * D, H]: transposed view
    o_bias: torch.Tensor | None
    mlp_norm_H: torch.Tensor | None
    gate_up: torch.Tensor  # [2 * I, H]; [I, H] without a gate; [0] without an MLP
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [I, H]: transposed view
    down_bias: torch.Tensor | None
    window: int | None
    chunk: int | None = None
    rope: int = 0  # index in `DecoderConfig.ropes`, or NO_ROPE
    attention_norm_bias_H: torch.Tensor | None = None
    mlp_norm_bias_H: torch.Tensor | None = None
    attention_out_norm_H: torch.Tensor | None = None
    mlp_out_norm_H: torch.Tensor | None = None
    sinks_GK: torch.Tensor | None = None
    experts: ExpertLayer | None = None
    latent: LatentLayer | None = None
    mixer: MixerLayer | None = None
    num_kv: int = 0
    head_dim: int = 0
    kv: int = -1  # the place of the K/V that it reads; -1: it has no attention
    stores: bool = True  # whether it computes this K/V
    state: int = -1  # how many layers before it have a state
    streams: StreamLayer | None = None
    input_gate: InputGate | None = None
    scale: float = 1.0  # of the state after it
    stays: tuple[float, float] = (0.0, 0.0)  # see `DecoderConfig.norm_stays`; 0: it does not
    cut: float = 0.0  # the share of the MLP's gates that are 0

    @property
    def has_mlp(self) -> bool:
        return self.down.numel() > 0 or self.experts is not None


class Loader:
    """Reads, fuses and permutes weights, and counts their parameters."""

    def __init__(
        self,
        checkpoint: Tensors,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.weights = Weights(checkpoint, config)
        self.config = config
        self.device = device
        self.dtype = dtype

    @property
    def num_parameters(self) -> int:
        return self.weights.num_parameters

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def _maybe(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else self.place(tensor)

    def embedding(self) -> torch.Tensor:
        return self.place(self.weights.embedding())

    def positions(self) -> torch.Tensor | None:
        return self.place(self.weights.positions()) if self.config.position_rows else None

    def norm(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = self.weights.final_norm()
        return self.place(weight), self._maybe(bias)

    def embedding_norm(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        if not self.config.embedding_norm:
            return None
        weight, bias = self.weights.embedding_norm()
        return self.place(weight), self._maybe(bias)

    def head(self) -> torch.Tensor | None:
        """The output head; None if it is tied to the embedding."""
        return self._maybe(self.weights.head())

    def head_bias(self) -> torch.Tensor | None:
        bias = self.weights.head_bias()
        return None if bias is None else bias.to(self.device, torch.float32)

    def _heads(self, index: int, x: torch.Tensor, *, rope: bool, query: bool) -> torch.Tensor:
        """Reorders rows [heads * D, ...]: rotating halves interleaved, queries group-major."""
        config = self.config.of_layer(index)
        dim, turned, rest = config.head_dim, config.rotated, x.shape[1:]
        x = x.reshape(-1, dim, *rest)
        if rope:
            halves = x[:, :turned].reshape(len(x), 2, turned // 2, *rest)
            first = halves.transpose(1, 2).flatten(1, 2)
            x = torch.cat([first, x[:, turned:]], dim=1) if turned < dim else first
        if query:
            x = x.view(config.num_kv_heads, config.group_size, dim, *rest).transpose(0, 1)
        return x.reshape(-1, *rest)

    def _qkv(self, index: int, kind: str) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        read: dict[str, torch.Tensor] = {}
        for which in "qkv" if self.config.has_kv(index) else "q":
            name = f"self_attn.{which}_proj.{kind}"
            has = self.weights.has(index, name)
            read[which] = rows = self.weights.layer(index, name) if has else read["k"]
            if which != "v":
                rows = self._heads(index, rows, rope=True, query=which == "q")
            parts.append(rows.to(self.dtype))
        return self.place(torch.cat(parts))

    def _q_gate(self, index: int, kind: str) -> torch.Tensor | None:
        name = f"self_attn.q_gate.{kind}"
        if not self.weights.has(index, name):
            return None
        rows = self.weights.layer(index, name)
        return self.place(self._heads(index, rows, rope=False, query=True))

    def _head_norm(self, index: int, which: str) -> torch.Tensor | None:
        if not self.config.norms_heads(index) or (which == "k" and not self.config.has_kv(index)):
            return None
        weight = self.weights.layer(index, f"self_attn.{which}_norm.weight")
        query = which == "q" and self.config.qk_span != "head"
        return self.place(self._heads(index, weight, rope=True, query=query))

    def _bias(self, index: int, name: str) -> torch.Tensor | None:
        name = f"{name}.bias"
        return (
            self.place(self.weights.layer(index, name)) if self.weights.has(index, name) else None
        )

    def _norm(
        self, index: int, name: str, present: Sequence[str]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if name not in present:
            return None, None
        weight, bias = self.weights.norm(index, name)
        return self.place(weight), self._maybe(bias)

    def _gate_up(self, index: int, kind: str) -> torch.Tensor:
        names = ("gate", "up") if self.config.gated else ("up",)
        parts = [self.weights.layer(index, f"mlp.{name}_proj.{kind}") for name in names]
        return self.place(torch.cat(parts))

    def _down(self, index: int) -> torch.Tensor:
        return self.place(self.weights.layer(index, "mlp.down_proj.weight")).t()

    def _sinks(self, index: int) -> torch.Tensor | None:
        if not self.config.sinks:
            return None
        sinks = self.weights.layer(index, "self_attn.sinks")
        return self.place(sinks.view(self.config.of_layer(index).num_kv_heads, -1)).t()

    def layer(self, index: int) -> Layer:
        config = self.config
        names = norm_names(config, index)
        attention_norm, attention_norm_bias = self._norm(index, "input_layernorm", names)
        mlp_norm, mlp_norm_bias = self._norm(index, "post_attention_layernorm", names)
        has_mlp, attends = config.inner_size(index) > 0, config.has_attention(index)
        latent = read_latent(self.weights, index, self.place) if config.latent else None
        o = torch.empty(0, 0)
        if attends:
            o = self.weights.layer(index, "self_attn.o_proj.weight")
        if attends and latent is None:
            o = self._heads(index, o.t(), rope=False, query=True).t()
        has_qkv = attends and latent is None
        return Layer(
            attention_norm_H=attention_norm,
            attention_norm_bias_H=attention_norm_bias,
            latent=latent,
            mixer=read_mixer(self.weights, index, self.place),
            qkv=self._qkv(index, "weight") if has_qkv else torch.empty(0),
            qkv_bias=self._qkv(index, "bias") if config.qkv_bias and attends else None,
            q_gate=self._q_gate(index, "weight") if attends else None,
            q_gate_bias=self._q_gate(index, "bias") if attends else None,
            q_norm_D=self._head_norm(index, "q") if attends else None,
            k_norm_D=self._head_norm(index, "k") if attends else None,
            sinks_GK=self._sinks(index) if attends else None,
            o=self.place(o).t(),
            o_bias=self._bias(index, "self_attn.o_proj"),
            attention_out_norm_H=self._norm(index, "attention_out_norm", names)[0],
            mlp_norm_H=mlp_norm,
            mlp_norm_bias_H=mlp_norm_bias,
            gate_up=self._gate_up(index, "weight") if has_mlp else torch.empty(0),
            gate_up_bias=self._gate_up(index, "bias") if has_mlp and config.mlp_bias else None,
            down=self._down(index) if has_mlp else torch.empty(0),
            down_bias=self._bias(index, "mlp.down_proj"),
            mlp_out_norm_H=self._norm(index, "mlp_out_norm", names)[0],
            window=config.windows[index],
            chunk=config.chunk_of(index),
            rope=config.rope_of(index),
            num_kv=config.of_layer(index).num_kv_heads,
            head_dim=config.of_layer(index).head_dim,
            kv=sum(map(config.has_kv, range(config.kv_layer(index)))) if attends else -1,
            stores=config.has_kv(index),
            streams=read_stream_layer(self.weights, index, self.place),
            input_gate=read_input_gate(self.weights, index, self.place),
            scale=self.weights.layer_scale(index),
            stays=config.norm_stays[index] if config.norm_stays else (0.0, 0.0),
            cut=config.sparsity[index] if config.sparsity else 0.0,
            state=sum(map(config.has_state, range(index))),
            experts=self._experts(index) if config.has_experts(index) else None,
        )

    def _experts(self, index: int) -> ExpertLayer:
        experts = self.config.experts
        assert experts is not None
        router, router_bias = self.weights.router(index)
        choice_bias, shared_gate = self.weights.choice_bias(index), self.weights.shared_gate(index)
        names = ("gate", "up", "down") if self.config.gated else ("up", "down")
        parts = {
            part: [self.weights.expert(index, expert, part) for expert in range(experts.count)]
            for part in names
        }
        gate_up, gate_up_bias = [], []
        if not self.config.gated:
            gate_up = [self.place(up) for up, _ in parts["up"]]
        for (gate, gate_bias), (up, up_bias) in zip(
            parts.get("gate", ()), parts["up"], strict=False
        ):
            gate_up.append(self.place(torch.cat([gate, up])))
            if gate_bias is not None and up_bias is not None:
                gate_up_bias.append(self.place(torch.cat([gate_bias, up_bias])))

        def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(self.device, torch.float32)

        def extra(name: str) -> torch.Tensor | None:
            has = self.weights.has(index, name)
            return self.place(self.weights.layer(index, name)) if has else None

        if experts.apart:
            size = self.config.hidden_size**-0.5
            router = router.float() * self.weights.layer(index, "router.scale").float() * size
        return ExpertLayer(
            config=experts,
            eps=self.config.norm_eps,
            in_norm_H=extra("pre_feedforward_layernorm_2.weight"),
            out_norm_H=extra("post_feedforward_layernorm_2.weight"),
            beside_norm_H=extra("post_feedforward_layernorm_1.weight"),
            scales_E=wide(extra("router.per_expert_scale")),
            activation=self.config.activation,
            gated=self.config.gated,
            router_EH=router.to(self.device, torch.float32),
            router_bias_E=wide(router_bias),
            choice_bias_E=wide(choice_bias),
            gate_up=gate_up,
            gate_up_bias=gate_up_bias or None,
            down=[self.place(weight) for weight, _ in parts["down"]],
            down_bias=[self.place(bias) for _, bias in parts["down"] if bias is not None] or None,
            shared_gate_H=None if shared_gate is None else self.place(shared_gate),
        )
