"""The types in which the native step keeps the matrices of a checkpoint."""

from __future__ import annotations

from outrider import native
from outrider.model.families.description import DecoderConfig
from outrider.model.families.mixers import SelectiveScan
from outrider.model.families.shapes import layer_shapes
from outrider.model.native_description import LAYER_TENSORS, has_short_convolutions
from outrider.model.tensors import Source, Weights

EXPERT_PARTS = ("gate", "up", "down")
_PRODUCTS = tuple(name for name in LAYER_TENSORS if name.endswith("_proj.weight"))
_MATRICES = tuple(name for name in _PRODUCTS if not name.startswith("mixer."))
# The products that stand in place of attention's in a layer with a recurrent part.
_INPUTS = tuple(f"mixer.in_proj{part}.weight" for part in ("", "_qkvz", "_qkv", "_q"))
_IN_PLACE: dict[str, tuple[str, ...]] = {f"self_attn.{part}_proj.weight": _INPUTS for part in "qkv"}
_IN_PLACE["self_attn.o_proj.weight"] = ("mixer.out_proj.weight",)
LAYER_KINDS = len(_MATRICES) + 2  # and those of experts


def matrix_kinds(checkpoint: Source, weights: Weights) -> list[int]:
    """The types to keep all matrices in, in the order of `OutriderConfig.types`."""
    config = weights.config
    embedding = checkpoint.kind_of(weights.embedding_place)
    if not config.tied:
        head = checkpoint.kind_of(weights.head_place)
    else:
        head = native.TIED if embedding >= native.PACKED else embedding

    def kind(place: str, whole: bool) -> int:
        if place not in checkpoint:
            return native.STORED_KINDS["F32"]
        found = checkpoint.kind_of(place)
        return found if whole or found < native.PACKED else native.STORED_KINDS["F32"]

    kinds = [embedding, head]
    experts = 0 if config.experts is None else config.experts.count
    for layer in range(config.num_layers):
        shapes = layer_shapes(config, layer)
        for matrix in _MATRICES:
            names = (matrix, *_IN_PLACE.get(matrix, ()))
            name = next((name for name in names if name in shapes), None)
            if name is None or is_scaled(config, name):
                kinds.append(native.STORED_KINDS["F32"])
                continue
            place, whole = weights.place(layer, name)
            whole = whole and (config.latent is None or name not in _MATRICES[:3])
            has_states = name.startswith("mixer.") and not has_short_convolutions(config)
            kinds.append(kind(place, whole and not has_states))
        if not config.has_experts(layer):
            kinds += [native.STORED_KINDS["F32"]] * 2
            continue
        # The matrices of all experts have one type.
        for parts in (EXPERT_PARTS[not config.gated : 2], EXPERT_PARTS[2:]):
            places = (weights.expert_place(layer, i, p) for i in range(experts) for p in parts)
            made = {kind(*place) for place in places}
            kinds.append(made.pop() if len(made) == 1 else native.STORED_KINDS["F32"])
    return kinds


def is_scaled(config: DecoderConfig, name: str) -> bool:
    """Whether the decoder multiplies the stored matrix by a factor."""
    if name == "mixer.in_proj.weight" and isinstance(config.mixer, SelectiveScan):
        return any(scale != 1.0 for scale in config.mixer.scales)
    return config.layout.scales.get(name, 1.0) != 1.0
