"""Recurrent layers of a description: a convolution along the text, and what scans its output.

Each has a state: the last `width - 1` inputs of `channels` convolutions, and a float32 array of
shape `matrix` that every token changes. Tensors are named as in `shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """B, C and x are products of the residual: it adds the product of C * convolution(B * x)."""

    channels: int
    width: int
    bias: bool

    @property
    def matrix(self) -> tuple[int, ...]:
        return ()

    def shapes(self, hidden: int) -> Shapes:
        found: Shapes = {
            "mixer.in_proj.weight": (3 * self.channels, hidden),
            "mixer.conv.weight": (self.channels, 1, self.width),
            "mixer.out_proj.weight": (hidden, self.channels),
        }
        if self.bias:
            found["mixer.in_proj.bias"] = (3 * self.channels,)
            found["mixer.conv.bias"] = (self.channels,)
            found["mixer.out_proj.bias"] = (hidden,)
        return found


Mixer = ShortConvolution
