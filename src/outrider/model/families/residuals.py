"""What Gemma 3n and 4 have around a layer: inputs of its own, and several residual streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """A vector of each token for each layer, which gates what the layer adds last.

    It is made of the token's embedding by a product, and of a second table with `rows` tokens.
    """

    size: int
    rows: int

    def layer_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            "per_layer_input_gate.weight": (self.size, hidden),
            "per_layer_projection.weight": (hidden, self.size),
            "post_per_layer_input_norm.weight": (hidden,),
        }

    def trunk_shapes(self, hidden: int, layers: int) -> dict[str, tuple[int, ...]]:
        return {
            "embed_tokens_per_layer.weight": (self.rows, layers * self.size),
            "per_layer_model_projection.weight": (layers * self.size, hidden),
            "per_layer_projection_norm.weight": (self.size,),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Several residuals, of which a layer computes one and predicts the others (AltUp).

    Beside its attention runs a product of low rank (LAuReL).
    """

    count: int
    active: int
    rank: int
    scaled: bool  # the computed one is scaled before the layer's own input multiplies it

    def layer_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {
            "altup.correct_output_scale": (hidden,),
            "altup.correction_coefs.weight": (self.count, self.count),
            "altup.prediction_coefs.weight": (self.count**2, self.count),
            "altup.modality_router.weight": (self.count, hidden),
            "altup.router_norm.weight": (hidden,),
            "laurel.linear_left.weight": (self.rank, hidden),
            "laurel.linear_right.weight": (hidden, self.rank),
            "laurel.post_laurel_norm.weight": (hidden,),
        }

    def trunk_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        names = ("altup_projections", "altup_unembed_projections")
        others = range(self.count - 1)
        return {f"{name}.{i}.weight": (hidden, hidden) for name in names for i in others}
