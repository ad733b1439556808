"""Recurrent layers in torch: what `outrider.model.families.mixers` describes.

A layer gives [T, I], which its output product `out` adds to the residual. Convolutions and
recurrences compute in float32, whatever the type of the weights.

Shape legend: T tokens of the pass, H hidden, C channels of the convolution, W its width, I inner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from outrider.model.families.mixers import ShortConvolution
from outrider.model.states import StatePass
from outrider.model.tensors import Weights

Place = Callable[[torch.Tensor], torch.Tensor]


class MixerLayer(Protocol):
    """The recurrent part of one layer."""

    out: torch.Tensor  # [I, H]: transposed view
    out_bias: torch.Tensor | None

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        """[T, I]; reads and writes the states of the `at`-th recurrent layer."""
        ...


class _Tensors:
    """The tensors of a layer's mixer by their names in the description."""

    def __init__(self, weights: Weights, layer: int, place: Place) -> None:
        self._weights, self._layer, self._place = weights, layer, place

    def __call__(self, name: str) -> torch.Tensor:
        """On the device, in the model's type."""
        return self._place(self._weights.layer(self._layer, f"mixer.{name}"))

    def maybe(self, name: str) -> torch.Tensor | None:
        return self(name) if self._weights.has(self._layer, f"mixer.{name}") else None

    def wide(self, name: str) -> torch.Tensor:
        """In float32, as it is stored."""
        stored = self._weights.layer(self._layer, f"mixer.{name}")
        return stored.float().to(self._place(stored[:1]).device)

    def convolution(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[C, W] and [C], in float32."""
        has_bias = self._weights.has(self._layer, "mixer.conv.bias")
        bias = self.wide("conv.bias") if has_bias else None
        return self.wide("conv.weight")[:, 0].contiguous(), bias


class ConvolutionLayer:
    """`ShortConvolution`: C * convolution(B * x)."""

    def __init__(self, get: _Tensors) -> None:
        self.inputs, self.input_bias = get("in_proj.weight"), get.maybe("in_proj.bias")
        self.conv_CW, self.conv_bias_C = get.convolution()
        self.out, self.out_bias = get("out_proj.weight").t(), get.maybe("out_proj.bias")

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        b, c, x = F.linear(h_TH, self.inputs, self.input_bias).chunk(3, dim=-1)
        convolved = states.convolve(at, b * x, self.conv_CW, self.conv_bias_C)
        return c * convolved.to(c.dtype)


def read_mixer(weights: Weights, layer: int, place: Place) -> MixerLayer | None:
    """None: the layer has no state."""
    mixer = weights.config.mixer
    if mixer is None or not weights.config.has_state(layer):
        return None
    get = _Tensors(weights, layer, place)
    if isinstance(mixer, ShortConvolution):
        return ConvolutionLayer(get)
    raise AssertionError(mixer)
