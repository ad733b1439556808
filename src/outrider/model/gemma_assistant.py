"""Gemma 4's assistant: a small decoder that reads the keys and values of its target.

One row drafts one token. It reads the embedding of the token before and a state: the target's last
one, after its norm, or what the row before made of its own. All rows of a draft stand where the
last token stands. The layers have queries only. Their keys and values are those of the target's
last layer of the same kind (with a window or without) that computes any; they are computed again
here, from the residual that this layer reads.

Shapes: R rows, n tokens, H hidden of the target, A of the assistant, N heads, D head size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.contracts import Model
from outrider.errors import ModelError
from outrider.model.borrowed import Borrowed, borrow
from outrider.model.checkpoints import open_checkpoint
from outrider.model.dialects.folder import Tensors
from outrider.model.families import read_decoder_config
from outrider.model.families.description import DecoderConfig
from outrider.model.head_layers import KeyValue, rotary, rotate
from outrider.model.rope import RopeConfig
from outrider.model.tensors import Weights
from outrider.model.weights import read_config, read_json

Mix = Callable[[int, "int | None", Tensor], Tensor]
ARCHITECTURE = "Gemma4AssistantForCausalLM"


def is_assistant(folder: Path) -> bool:
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return str((config.get("architectures") or [""])[0]) == ARCHITECTURE


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayer:
    """What makes keys and values of the residual that a layer of the target reads."""

    layer: int  # of the target; also the tap
    config: DecoderConfig  # of this layer
    rope: RopeConfig
    slides: bool
    norm_H: Tensor
    keys: Tensor
    values: Tensor | None  # None: those of the keys
    key_norm_D: Tensor

    def keys_values(self, states_nH: Tensor, positions_n: Tensor) -> KeyValue:
        """[1, heads, n, D] each."""
        eps, size = self.config.norm_eps, self.config.head_dim
        normed_nH = F.rms_norm(states_nH, states_nH.shape[-1:], self.norm_H, eps)
        keys = F.linear(normed_nH, self.keys).view(1, len(states_nH), -1, size).transpose(1, 2)
        values = keys
        if self.values is not None:
            values = F.linear(normed_nH, self.values).view(1, len(states_nH), -1, size)
            values = values.transpose(1, 2)
        keys = F.rms_norm(keys, (size,), self.key_norm_D, eps)
        keys = rotate(keys, rotary(positions_n[None], size, self.rope))
        return keys, F.rms_norm(values, (size,), None, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantLayer:
    shared: int  # index of the keys and values that it reads
    reach: int | None  # how many of the last ones; None: all
    size: int  # of a head
    rope: RopeConfig
    norms: tuple[Tensor, Tensor, Tensor, Tensor]
    queries: Tensor
    query_norm_D: Tensor
    output: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    scale: float


class GemmaAssistant:
    """See the module. Torch on the target's device."""

    def __init__(self, target: Model, folder: Path, apart: Path) -> None:
        """`folder` is the target's, `apart` the assistant's."""
        device = getattr(target, "device", torch.device("cpu"))
        dtype = getattr(target, "dtype", None) if device.type != "cpu" else None
        self._device, self._dtype = device, dtype or torch.float32
        self._folder = apart
        config = read_json(apart / "config.json")
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ModelError(f"the config.json of {apart} has no text_config: download it again")
        whole = read_decoder_config(read_config(folder))
        if whole.family != "gemma4_text":
            raise ModelError(f"{apart} drafts for Gemma 4, not for a model of type {whole.family}")
        width, vocab_size = config.get("backbone_hidden_size"), text.get("vocab_size")
        if (width, vocab_size) != (whole.hidden_size, whole.vocab_size):
            raise ModelError(
                f"{apart} was made for a target of width {width} with {vocab_size} ids; "
                f"{target.spec.name} has {whole.hidden_size} and {whole.vocab_size}"
            )
        self.config = read_decoder_config(text | {"model_type": "gemma4_text"})
        self.borrowed: Borrowed = borrow(folder, device, self._dtype)
        self.shared = self._shared_layers(Weights(open_checkpoint(folder), whole), whole)
        self._source = open_checkpoint(apart)
        own = Weights(self._source, self.config)
        self.layers = [self._layer(own, index) for index in range(self.config.num_layers)]
        self._norm_A = self._move(own.final_norm()[0])
        self._embedding_VA = self._move(own.embedding())
        size = self.config.hidden_size
        self._before = self._read("pre_projection.weight", size, 2 * whole.hidden_size)
        self._after = self._read("post_projection.weight", whole.hidden_size, size)
        self._centroids: Tensor | None = None
        if config.get("use_ordered_embeddings"):
            count = int(config["num_centroids"])
            self._num_open = int(config["centroid_intermediate_top_k"])
            self._centroids = self._read("masked_embedding.centroids.weight", count, size)
            ids = Tensors(apart).get("masked_embedding.token_ordering").long()
            if not torch.equal(ids.sort().values, torch.arange(whole.vocab_size)):
                raise ModelError(f"{apart}: token_ordering does not name every id once")
            self._clusters = ids.view(count, -1).to(device)

    @property
    def taps(self) -> tuple[int, ...]:
        """The residuals that the shared layers read."""
        return tuple(layer.layer for layer in self.shared)

    def _move(self, tensor: Tensor) -> Tensor:
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{self._folder} has values that are no numbers: it is damaged")
        return tensor.to(self._device, self._dtype).contiguous()

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._move(self._source.tensor(name, shape))

    def _shared_layers(self, weights: Weights, config: DecoderConfig) -> list[SharedLayer]:
        """Of each kind, the last layer with keys and values of its own; those with windows last."""
        found: dict[bool, SharedLayer] = {}
        for layer in range(config.num_layers):
            if not config.has_kv(layer):
                continue
            own = config.of_layer(layer)
            same = bool(config.values_of_keys) and config.values_of_keys[layer]
            found[config.windows[layer] is not None] = SharedLayer(
                layer=layer,
                config=own,
                rope=_rope(config, layer),
                slides=config.windows[layer] is not None,
                norm_H=self._move(weights.norm(layer, "input_layernorm")[0]),
                keys=self._move(weights.layer(layer, "self_attn.k_proj.weight")),
                values=None
                if same
                else self._move(weights.layer(layer, "self_attn.v_proj.weight")),
                key_norm_D=self._move(weights.layer(layer, "self_attn.k_norm.weight")),
            )
        return [found[slides] for slides in sorted(found)]

    def _layer(self, weights: Weights, index: int) -> AssistantLayer:
        config = self.config
        window = config.windows[index]
        slides = window is not None
        kinds = [layer.slides for layer in self.shared]
        if slides not in kinds:
            raise ModelError(f"{self._folder} needs a target with layers of both kinds")

        def read(name: str) -> Tensor:
            return self._move(weights.layer(index, f"{name}.weight"))

        names = ("input_layernorm", "attention_out_norm", "post_attention_layernorm")
        norms = [self._move(weights.norm(index, n)[0]) for n in (*names, "mlp_out_norm")]
        return AssistantLayer(
            shared=kinds.index(slides),
            reach=None if window is None else window + 1,
            size=config.of_layer(index).head_dim,
            rope=_rope(config, index),
            norms=(norms[0], norms[1], norms[2], norms[3]),
            queries=read("self_attn.q_proj"),
            query_norm_D=read("self_attn.q_norm"),
            output=read("self_attn.o_proj"),
            gate=read("mlp.gate_proj"),
            up=read("mlp.up_proj"),
            down=read("mlp.down_proj"),
            scale=weights.layer_scale(index),
        )

    def first_states(self, last_RH: Tensor) -> Tensor:
        """What the first row reads, from the target's states after all layers."""
        return self.borrowed.normed(last_RH.to(self.borrowed.norm_H.dtype))

    def run(
        self, tokens: list[int], states_RH: Tensor, positions: list[int], mix: Mix
    ) -> tuple[Tensor, Tensor]:
        """States for the next rows, [R, H], and logits, [R, V].

        `mix(shared, reach, queries)` attends for all rows, [1, N, R, D]; see `AssistantLayer`.
        """
        embeds_RH = self.borrowed.embed(tokens) * self.borrowed.embedding_scale
        x_RA = F.linear(torch.cat([embeds_RH, states_RH], -1), self._before)
        places_1R = torch.tensor(positions, device=x_RA.device)[None]
        for layer in self.layers:
            x_RA = self._through(layer, x_RA, places_1R, mix)
        last_RA = self._normed(x_RA, self._norm_A)
        return F.linear(last_RA, self._after), self._logits(last_RA)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _through(self, layer: AssistantLayer, x_RA: Tensor, places_1R: Tensor, mix: Mix) -> Tensor:
        before, after, before_mlp, after_mlp = layer.norms
        queries = F.linear(self._normed(x_RA, before), layer.queries)
        queries = queries.view(1, len(x_RA), -1, layer.size).transpose(1, 2)
        queries = self._normed(queries, layer.query_norm_D)
        queries = rotate(queries, rotary(places_1R, layer.size, layer.rope))
        mixed = mix(layer.shared, layer.reach, queries * layer.size**0.5)  # scores are not scaled
        mixed_R = mixed.transpose(1, 2).flatten(2)[0]
        x_RA = x_RA + self._normed(F.linear(mixed_R, layer.output), after)
        inner = self._normed(x_RA, before_mlp)
        gate = F.gelu(F.linear(inner, layer.gate), approximate="tanh")
        added = F.linear(gate * F.linear(inner, layer.up), layer.down)
        return (x_RA + self._normed(added, after_mlp)) * layer.scale

    def _logits(self, last_RA: Tensor) -> Tensor:
        if self._centroids is None:
            return F.linear(last_RA, self._embedding_VA).float()
        best_RC = F.linear(last_RA, self._centroids).topk(self._num_open).indices
        ids_RW = self._clusters[best_RC].flatten(1)
        some_RW = (self._embedding_VA[ids_RW] @ last_RA[:, :, None])[..., 0].float()
        least_R1 = some_RW.min(-1, keepdim=True).values - 1
        return least_R1.repeat(1, len(self._embedding_VA)).scatter_(1, ids_RW, some_RW)


def _rope(config: DecoderConfig, layer: int) -> RopeConfig:
    index = config.rope_of(layer)
    return (config.rope, *config.other_ropes)[index]
