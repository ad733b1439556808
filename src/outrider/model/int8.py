"""8-bit weights: int8 rows with one scale each, half of the bytes that a step reads.

Only the weights of products are rounded, the output head included; embeddings and norms are not.
Passes that are too wide for the kernels restore the weights of a layer before they use them.

Shape legend: N outputs, K inputs of a product.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch

from outrider.model.torch_weights import Layer

_ROWS = 8192  # rounded at a time, because an output head is large


class Scales(NamedTuple):
    """The scales of a layer's products, by row; None if they are not rounded."""

    qkv: torch.Tensor | None = None
    o: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class RoundedLayer(Layer):
    """A layer whose `qkv`, `o`, `gate_up` and `down` are int8."""

    scales: Scales

    def restored(self, dtype: torch.dtype) -> Layer:
        """The layer with weights of type `dtype`."""
        weights = _fields(self)
        for name, scale in self.scales._asdict().items():
            weight_NK = weights[name].t() if name in _TRANSPOSED else weights[name]
            weight_NK = (weight_NK * scale[:, None]).to(dtype)
            weights[name] = weight_NK.t() if name in _TRANSPOSED else weight_NK
        return Layer(**weights)


_TRANSPOSED = ("o", "down")  # stored as [inputs, outputs]


def _fields(layer: Layer) -> dict[str, Any]:
    return {field.name: getattr(layer, field.name) for field in fields(Layer)}


def round_rows(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 weights and float32 scales; the largest weight of each row becomes +-127."""
    values_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=weight_NK.device)
    scale_N = torch.empty(len(weight_NK), device=weight_NK.device)
    for start in range(0, len(weight_NK), _ROWS):
        some = slice(start, start + _ROWS)
        wide = weight_NK[some].float()
        scale_N[some] = wide.abs().amax(1).clamp(min=1e-30) / 127
        values_NK[some] = (wide / scale_N[some, None]).round().to(torch.int8)
    return values_NK, scale_N


def round_layer(layer: Layer) -> RoundedLayer:
    weights, scales = _fields(layer), {}
    for name in Scales._fields:
        weight_NK = weights[name].t() if name in _TRANSPOSED else weights[name]
        values_NK, scales[name] = round_rows(weight_NK)
        weights[name] = values_NK.t() if name in _TRANSPOSED else values_NK
    return RoundedLayer(**weights, scales=Scales(**scales))
