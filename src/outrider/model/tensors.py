"""The tensors of a described decoder under Llama's names, whatever the checkpoint calls them.

Both decoders read through `Weights`. It splits what a checkpoint fuses, turns what it transposes,
adds the shift of norms, and reorders heads whose rope rotates neighbours, so that the decoders know
one rope only: scores do not change if queries and keys are permuted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from outrider.errors import ModelError
from outrider.model.families.description import DecoderConfig
from outrider.model.families.mixers import FixedDecay, GatedDelta, SelectiveScan
from outrider.model.families.shapes import layer_shapes, trunk_shapes
from outrider.model.rope import sinusoids
from outrider.model.stored import Blocks


class Tensors(Protocol):
    """A source of weights: `Checkpoint`, or any other object with tensors by name."""

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor: ...


class Source(Tensors, Protocol):
    """A checkpoint, whatever holds it: it also says what it has, and gives blocks as they are."""

    def __contains__(self, name: str) -> bool: ...

    def kind_of(self, name: str) -> int:
        """The type to keep a matrix in, as outrider.h numbers it."""
        ...

    def blocks(
        self, name: str, shape: Sequence[int]
    ) -> AbstractContextManager[tuple[Blocks, bool]]:
        """The blocks of a tensor that is packed, and whether rotary pairs are neighbours."""
        ...


class Weights:
    """Tensors as they are stored, apart from the changes named above. Counts what it reads."""

    def __init__(self, source: Tensors, config: DecoderConfig) -> None:
        self.config = config
        self.num_parameters = 0
        self._source = source
        self._shapes = [layer_shapes(config, layer) for layer in range(config.num_layers)]
        layout = config.layout
        self._trunk = self._first(layout.trunks, f"{layout.embedding}.weight")
        self._head = self._first(layout.heads, ".weight")
        self._fused: dict[str, torch.Tensor] = {}

    def prefix_of(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return f"{self._trunk}{self.config.layout.layers}{layer}."

    @property
    def final_norm_name(self) -> str:
        return f"{self._trunk}{self.config.layout.final_norm}"

    def _first(self, prefixes: tuple[str, ...], rest: str) -> str:
        """The first prefix under which the checkpoint has a tensor."""
        if len(prefixes) == 1:
            return prefixes[0]
        held = getattr(self._source, "__contains__", lambda name: False)
        return next((prefix for prefix in prefixes if held(prefix + rest)), prefixes[0])

    def _read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        tensor = self._source.tensor(name, shape)
        self.num_parameters += tensor.numel()
        return tensor

    @property
    def embedding_place(self) -> str:
        return f"{self._trunk}{self.config.layout.embedding}.weight"

    @property
    def head_place(self) -> str:
        return f"{self._head}.weight"

    def embedding(self) -> torch.Tensor:
        config = self.config
        return self._read(self.embedding_place, (config.vocab_size, config.hidden_size))

    def embedding_norm(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias."""
        at = f"{self._trunk}{self.config.layout.embedding_norm}"
        return self._norm(f"{at}.weight"), self._bias(f"{at}.bias")

    def positions(self) -> torch.Tensor:
        """The table of positions, learned or computed."""
        config = self.config
        if config.sinusoids:
            return sinusoids(config.position_rows, config.hidden_size)
        name = f"{self._trunk}{config.layout.positions}.weight"
        return self._read(name, (config.position_rows, config.hidden_size))

    def trunk(self, name: str) -> torch.Tensor:
        """A tensor of `trunk_shapes`."""
        return self._read(f"{self._trunk}{name}", trunk_shapes(self.config)[name])

    def layer_scale(self, layer: int) -> float:
        """What multiplies the state after a layer. It is no parameter in transformers."""
        name = f"{self.prefix_of(layer)}layer_scalar"
        return float(self._source.tensor(name, (1,))) if self.config.layer_scale else 1.0

    def head(self) -> torch.Tensor | None:
        """The output head; None if it is tied to the embedding."""
        if self.config.tied:
            return None
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._read(self.head_place, shape)

    def head_bias(self) -> torch.Tensor | None:
        if not self.config.head_bias:
            return None
        return self._read(f"{self._head}.bias", (self.config.vocab_size,))

    def final_norm(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias."""
        at = self.final_norm_name
        return self._norm(f"{at}.weight"), self._bias(f"{at}.bias")

    def norm(self, layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of one of `norm_names`."""
        at = self._place(layer, name)
        return self._norm(f"{at}.weight"), self._bias(f"{at}.bias")

    def _norm(self, name: str) -> torch.Tensor:
        if not self.config.norm_weight:
            return torch.ones(self.config.hidden_size)
        return self._shifted(self._read(name, (self.config.hidden_size,)))

    def _bias(self, name: str) -> torch.Tensor | None:
        return self._read(name, (self.config.hidden_size,)) if self.config.norm_bias else None

    def _shifted(self, weight: torch.Tensor) -> torch.Tensor:
        shift = self.config.norm_shift
        return weight.float() + shift if shift else weight

    def _place(self, layer: int, module: str) -> str:
        layout = self.config.layout
        if module.startswith("mlp.") and self.config.has_experts(layer):
            module = f"{layout.experts.shared}.{module.removeprefix('mlp.')}"
        layer -= module in layout.in_layer_before
        at, name = f"{self._trunk}{layout.layers}{layer}.", layout.modules.get(module, module)
        other = layout.others.get(name)
        return at + name if other is None else self._first((at + name, at + other), ".weight")

    def has(self, layer: int, name: str) -> bool:
        """Whether the layer has the tensor."""
        return name in self._shapes[layer]

    def place(self, layer: int, name: str) -> tuple[str, bool]:
        """What the checkpoint calls the tensor that holds `name`, and whether it is just this."""
        module, _, kind = name.rpartition(".")
        part, layout = module.removeprefix("self_attn.").removesuffix("_proj"), self.config.layout
        if part in ("q", "k", "v") and layout.fused_qkv:
            return f"{self._place(layer, layout.fused_qkv)}.{kind}", False
        if part in ("q", "q_gate") and self.config.attention_gate:
            return f"{self._place(layer, 'self_attn.q_proj')}.{kind}", False
        if part in ("mlp.gate", "mlp.up") and layout.fused_gate_up:
            return f"{self._place(layer, layout.fused_gate_up)}.{kind}", False
        moved = self.config.rope_pairs and part in ("q", "k")
        return f"{self._place(layer, module)}.{kind}", not (moved or layout.transposed)

    def expert_place(self, layer: int, index: int, part: str) -> tuple[str, bool]:
        """The same of the "gate", "up" or "down" of an expert."""
        layout = self.config.layout.experts
        if layout.all_gate_up is None:
            return f"{self._expert_place(layer, part).replace('E', str(index))}.weight", True
        return self._expert_place(layer, "all_down" if part == "down" else "all_gate_up"), False

    def layer(self, layer: int, name: str) -> torch.Tensor:
        """A tensor of `layer_shapes`, except the norms over the hidden size."""
        module, _, kind = name.rpartition(".")
        part = module.removeprefix("self_attn.").removesuffix("_proj")
        if part in ("q_norm", "k_norm"):
            return self._head_norm(layer, name, part[0])
        if part in ("q", "q_gate") and self.config.attention_gate:
            tensor = self._from_gated_q(layer, part, kind)
        elif part in ("q", "k", "v") and self.config.layout.fused_qkv:
            tensor = self._from_qkv(layer, part, kind)
        elif part in ("mlp.gate", "mlp.up") and self.config.layout.fused_gate_up:
            tensor = self._from_gate_up(layer, part, kind)
        elif name == "mixer.conv.weight":
            tensor = self._convolution(layer, name)
        else:
            whole = name in self.config.layout.modules or kind not in ("weight", "bias")
            place = self._place(layer, name if whole else module)
            place = place if whole else f"{place}.{kind}"
            tensor = self._matrix(place, self._shapes[layer][name])
        scale = self.config.layout.scales.get(name, 1.0)
        tensor = tensor if scale == 1.0 else tensor.float() * scale
        paired = part in ("q", "k") and self.config.latent is None
        return self._paired(tensor) if paired else tensor

    def delta_inputs(self, layer: int, mixer: GatedDelta) -> torch.Tensor:
        """The products of `GatedDelta`, in the order of its `sizes`, as one."""
        parts = [self.layer(layer, f"mixer.in_proj_{name}.weight") for name in mixer.products]
        h = parts[0].shape[1]
        if mixer.fused:  # q, k, v, z of key head 0, of key head 1, ...
            per = [size // mixer.key_heads for size in mixer.sizes]
            parts = [
                piece.flatten(0, 1)
                for whole, sizes in zip(parts, (per[:4], per[4:]), strict=True)
                for piece in torch.split(whole.view(mixer.key_heads, -1, h), sizes, dim=1)
            ]
        return torch.cat(parts)

    def decay_inputs(self, layer: int, mixer: FixedDecay) -> torch.Tensor:
        """The products of `FixedDecay` as one: the gate, values, keys and queries."""
        qkv = self.layer(layer, "mixer.in_proj_qkv.weight")
        heads = qkv.view(mixer.heads, 3, mixer.head_dim, -1)  # those of head 0, of head 1, ...
        parts = [heads[:, which].flatten(0, 1) for which in (2, 1, 0)]
        return torch.cat([self.layer(layer, "mixer.in_proj_z.weight"), *parts])

    def _convolution(self, layer: int, name: str) -> torch.Tensor:
        """The weights of the convolution, which may be a tensor each for q, k and v."""
        shape, mixer = self._shapes[layer][name], self.config.mixer
        parts, place = self.config.layout.split_convolution, self.place(layer, name)[0]
        held = getattr(self._source, "__contains__", lambda _: True)
        if not parts or not isinstance(mixer, GatedDelta) or held(place):
            return self._read(place, shape)
        places = [f"{self._place(layer, part)}.weight" for part in parts]
        try:
            return self._split(places, mixer.sizes[:3], shape)
        except ModelError:  # transformers writes three parts of one size, whatever they belong to
            third = -(-mixer.channels // 3)
            return self._split(places, (third, third, mixer.channels - 2 * third), shape)

    def _split(
        self, places: Sequence[str], sizes: Sequence[int], shape: Sequence[int]
    ) -> torch.Tensor:
        rows = zip(places, sizes, strict=True)
        return torch.cat([self._read(place, (size, *shape[1:])) for place, size in rows])

    def _matrix(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if len(shape) == 2 and self.config.layout.transposed:
            return self._read(name, (shape[1], shape[0])).t()
        return self._read(name, shape)

    def _whole(self, layer: int, module: str, kind: str, rows: int) -> torch.Tensor:
        """A fused tensor, read once for all of its parts."""
        name = f"{self._place(layer, module)}.{kind}"
        if name not in self._fused:
            self._keep_fused_of(name)
            shape = (rows, self.config.hidden_size) if kind == "weight" else (rows,)
            self._fused[name] = self._matrix(name, shape)
        return self._fused[name]

    def _keep_fused_of(self, name: str) -> None:
        """Forgets fused tensors of other modules."""
        module = name.rpartition(".")[0]
        self._fused = {k: v for k, v in self._fused.items() if k.rpartition(".")[0] == module}

    def _from_gated_q(self, layer: int, part: str, kind: str) -> torch.Tensor:
        """Queries, or what gates the attention: one product, by heads."""
        rows = 2 * self.config.num_heads * self.config.head_dim
        whole = self._whole(layer, "self_attn.q_proj", kind, rows)
        rest = whole.shape[1:]
        heads = whole.view(self.config.num_heads, 2, self.config.head_dim, *rest)
        return heads[:, int(part == "q_gate")].reshape(-1, *rest)

    def _from_qkv(self, layer: int, part: str, kind: str) -> torch.Tensor:
        config, layout = self.config, self.config.layout
        num_q, num_kv = config.num_heads, config.num_kv_heads
        rows = (num_q + 2 * num_kv) * config.head_dim
        assert layout.fused_qkv is not None
        whole = self._whole(layer, layout.fused_qkv, kind, rows)
        rest = whole.shape[1:]
        groups = layout.fused_groups
        counts = {"q": num_q, "k": num_kv, "v": num_kv}
        sizes = [counts[which] * config.head_dim // groups for which in layout.fused_order]
        parts = torch.split(whole.view(groups, -1, *rest), sizes, dim=1)
        return parts[layout.fused_order.index(part)].reshape(-1, *rest)

    def _from_gate_up(self, layer: int, part: str, kind: str) -> torch.Tensor:
        fused = self.config.layout.fused_gate_up
        assert fused is not None
        whole = self._whole(layer, fused, kind, 2 * self.config.inner_size(layer))
        return whole.chunk(2)[part == "mlp.up"]

    def router(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[experts, H] and the bias of the scores."""
        assert self.config.experts is not None
        count, at = self.config.experts.count, self._expert_place(layer, "router")
        weight = self._read(f"{at}.weight", (count, self.config.hidden_size))
        biased = self.config.experts.router_bias
        return weight, self._read(f"{at}.bias", (count,)) if biased else None

    def choice_bias(self, layer: int) -> torch.Tensor | None:
        experts = self.config.experts
        assert experts is not None
        if not experts.choice_bias:
            return None
        name = self._expert_place(layer, "choice_bias")
        return self._source.tensor(name, self._stored_shape(name, experts.count)).reshape(-1)

    def _stored_shape(self, name: str, count: int) -> tuple[int, ...]:
        """Ernie stores the bias as one row."""
        return (1, count) if "moe_statics" in name else (count,)

    def shared_gate(self, layer: int) -> torch.Tensor | None:
        """[H]: the product whose sigmoid scales the MLP beside the experts."""
        assert self.config.experts is not None
        if not self.config.experts.shared_gate:
            return None
        name = f"{self._expert_place(layer, 'shared_gate')}.weight"
        return self._read(name, (1, self.config.hidden_size))[0]

    def expert_shape(self, part: str) -> tuple[int, int]:
        assert self.config.experts is not None
        hidden, inner = self.config.hidden_size, self.config.experts.inner
        return (hidden, inner) if part == "down" else (inner, hidden)

    def expert_bias(self, layer: int, index: int, part: str) -> torch.Tensor | None:
        """The bias of an expert that has tensors of its own."""
        assert self.config.experts is not None
        if not self.config.experts.bias:
            return None
        at = self._expert_place(layer, part).replace("E", str(index))
        return self._read(f"{at}.bias", self.expert_shape(part)[:1])

    def expert(self, layer: int, index: int, part: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the "gate", "up" or "down" of one expert: [outputs, inputs]."""
        experts, layout = self.config.experts, self.config.layout.experts
        assert experts is not None
        hidden, inner = self.config.hidden_size, experts.inner
        if layout.all_gate_up is None:
            at = self._expert_place(layer, part).replace("E", str(index))
            weight = self._read(f"{at}.weight", self.expert_shape(part))
            return weight, self.expert_bias(layer, index, part)
        sizes = {"down": (hidden, inner)}.get(part, (2 * inner, hidden))
        place = self._expert_place(layer, "all_down" if part == "down" else "all_gate_up")
        weight = self._of_all(place, index, sizes[::-1] if layout.transposed else sizes)
        weight = weight.t() if layout.transposed else weight
        bias = self._of_all(f"{place}_bias", index, sizes[:1]) if experts.bias else None
        if part == "down":
            return weight, bias
        which = int(part == "up")
        rows = (
            slice(which, None, 2)
            if layout.interleaved
            else slice(inner * which, inner * (which + 1))
        )
        return weight[rows], None if bias is None else bias[rows]

    def _of_all(self, name: str, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """One expert's part of a tensor of all experts, which is read once."""
        if name not in self._fused:
            self._keep_fused_of(name)
            assert self.config.experts is not None
            self._fused[name] = self._read(name, (self.config.experts.count, *shape))
        return self._fused[name][index]

    def _expert_place(self, layer: int, part: str) -> str:
        layout = self.config.layout
        return f"{self._trunk}{layout.layers}{layer}.{getattr(layout.experts, part)}"

    def _head_norm(self, layer: int, name: str, which: str) -> torch.Tensor:
        """[D] or [heads * D], in the order of the rows of queries or keys."""
        config = self.config
        if config.qk_unit:
            return torch.ones(config.head_dim)
        shape, by_head = self._shapes[layer][name], config.layout.head_norms
        if by_head is not None:
            at = self._place(layer, by_head.replace("*", which))
            norms = [
                self._read(f"{at}.{head}.weight", (config.head_dim,))
                for head in range(shape[0] // config.head_dim)
            ]
            weight = torch.cat(norms)
        else:
            at = self._place(layer, name.removesuffix(".weight"))
            stored = (shape[0] // config.head_dim, config.head_dim)
            weight = self._read(f"{at}.weight", stored if config.qk_span == "heads" else shape)
        return self._shifted(self._paired(weight.reshape(-1)))

    def _paired(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of heads such that the two halves of what rotates rotate together."""
        if not self.config.rope_pairs:
            return rows
        turned, rest = self.config.rotated, rows.shape[1:]
        heads = rows.reshape(-1, self.config.head_dim, *rest)
        pairs = heads[:, :turned].reshape(len(heads), turned // 2, 2, *rest)
        first = pairs.transpose(1, 2).flatten(1, 2)
        return torch.cat([first, heads[:, turned:]], dim=1).reshape(-1, *rest)


def scaled_rows(mixer: SelectiveScan, tensor: torch.Tensor) -> torch.Tensor:
    """The product of a scan, or its bias, with the factors of its parts."""
    if all(scale == 1.0 for scale in mixer.scales):
        return tensor
    parts = zip(mixer.sizes, mixer.scales, strict=True)
    scale = torch.cat([torch.full((n,), s) for n, s in parts]).to(tensor)
    return tensor * scale.view(-1, *(1 for _ in tensor.shape[1:]))
