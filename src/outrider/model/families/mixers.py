"""Recurrent layers of a description: a convolution along the text, and what scans its output.

Each has a state: the last `width - 1` inputs of `channels` convolutions, and a float32 array of
shape `matrix` that every token changes. Tensors are named as in `shapes`.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectiveScan:
    """Mamba-2: products of the residual give a gate z, x, B, C and a step d; x, B and C go through
    the convolution and silu. Per head: state = exp(d A) state + d x B', output = state C + D x.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int  # of heads that share B and C
    width: int
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: bool = True  # the output is normalised,
    norm_groups: int = 1  # in so many parts,
    norm_first: bool = False  # before it is multiplied by silu(z), not after
    least_step: float = 0.0
    most_step: float = float("inf")
    scales: tuple[float, ...] = (1.0,) * 5  # of z, x, B, C and the steps

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of z, x, B, C and the steps in the product."""
        shared = self.groups * self.state_size
        return self.inner, self.inner, shared, shared, self.heads

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.state_size

    def shapes(self, hidden: int) -> Shapes:
        found: Shapes = {
            "mixer.in_proj.weight": (sum(self.sizes), hidden),
            "mixer.conv.weight": (self.channels, 1, self.width),
            "mixer.dt_bias": (self.heads,),
            "mixer.A_log": (self.heads,),
            "mixer.D": (self.heads,),
            "mixer.out_proj.weight": (hidden, self.inner),
        }
        if self.bias:
            found["mixer.in_proj.bias"] = (sum(self.sizes),)
        if self.conv_bias:
            found["mixer.conv.bias"] = (self.channels,)
        if self.out_bias:
            found["mixer.out_proj.bias"] = (hidden,)
        if self.norm:
            found["mixer.norm.weight"] = (self.inner,)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelScan:
    """Mamba: products of the residual give x and a gate z; x goes through the convolution and
    silu, and gives a short vector, B and C. A product of the vector gives each channel its step d.
    Per channel: state = exp(d A) state + d x B, output = (state C + D x) silu(z).
    """

    channels: int
    state_size: int
    rank: int  # of the vector
    width: int
    bias: bool
    conv_bias: bool
    norms: str  # of the vector, B and C: "none", "unit" (without weights) or "weights"
    norm_eps: float = 1e-6

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.channels, self.state_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the vector, B and C."""
        return self.rank, self.state_size, self.state_size

    def shapes(self, hidden: int) -> Shapes:
        found: Shapes = {
            "mixer.in_proj.weight": (2 * self.channels, hidden),
            "mixer.conv.weight": (self.channels, 1, self.width),
            "mixer.x_proj.weight": (sum(self.sizes), self.channels),
            "mixer.dt_proj.weight": (self.channels, self.rank),
            "mixer.dt_proj.bias": (self.channels,),
            "mixer.A_log": self.matrix,
            "mixer.D": (self.channels,),
            "mixer.out_proj.weight": (hidden, self.channels),
        }
        if self.bias:
            found |= {"mixer.in_proj.bias": (2 * self.channels,), "mixer.out_proj.bias": (hidden,)}
        if self.conv_bias:
            found["mixer.conv.bias"] = (self.channels,)
        if self.norms == "weights":
            names = ("dt_layernorm", "b_layernorm", "c_layernorm")
            sizes = zip(names, self.sizes, strict=True)
            found |= {f"mixer.{name}.weight": (size,) for name, size in sizes}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """Gated delta rule: queries, keys and values go through the convolution and silu; queries and
    keys get length 1. Per value head, with decay g and strength b of the token:
    state = g state, state += k (b (v - state' k))', output = state' q. The output is normalised by
    head and multiplied by silu(z).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    # Products of the residual: the parts that each gives, of q, k, v, z, strengths b and decays a.
    products: tuple[str, ...]
    most_strength: float = 1.0  # b is at most this
    norm_eps: float | None = None  # of the output; None: that of the other norms

    @property
    def fused(self) -> bool:
        """Whether the parts of a product stand together by key heads."""
        return "qkvz" in self.products

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rows of q, k, v, z, strengths and decays in the products, in this order."""
        return self.keys, self.keys, self.inner, self.inner, self.value_heads, self.value_heads

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.inner

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.value_heads, self.key_dim, self.value_dim

    def shapes(self, hidden: int) -> Shapes:
        heads, rows = self.value_heads, dict(zip("qkvzba", self.sizes, strict=True))
        counts = {name: sum(rows[part] for part in name) for name in self.products}
        return {
            **{f"mixer.in_proj_{name}.weight": (n, hidden) for name, n in counts.items()},
            "mixer.conv.weight": (self.channels, 1, self.width),
            "mixer.dt_bias": (heads,),
            "mixer.A_log": (heads,),
            "mixer.norm.weight": (self.value_dim,),
            "mixer.out_proj.weight": (hidden, self.inner),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDecay:
    """Lightning attention: queries, keys and values are silu of a product of the residual. Per
    head, with a decay g that depends on the layer: state = g state + k v', output = state' q. The
    output is normalised over all heads and multiplied by the sigmoid of another product.
    """

    heads: int
    head_dim: int
    num_layers: int  # of the decoder: decays are weaker in later ones
    norm_eps: float

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def width(self) -> int:
        """There is no convolution."""
        return 1

    @property
    def channels(self) -> int:
        return 3 * self.inner

    @property
    def matrix(self) -> tuple[int, ...]:
        return self.heads, self.head_dim, self.head_dim

    def rates(self, layer: int) -> list[float]:
        """The logarithms of the decays of a layer's heads."""
        part = 1 - layer / (self.num_layers - 1 + 1e-5) + 1e-5
        return [-part * math.exp2(-8 * (head + 1) / self.heads) for head in range(self.heads)]

    def shapes(self, hidden: int) -> Shapes:
        return {
            "mixer.in_proj_qkv.weight": (self.channels, hidden),
            "mixer.in_proj_z.weight": (self.inner, hidden),
            "mixer.norm.weight": (self.inner,),
            "mixer.out_proj.weight": (hidden, self.inner),
        }


Mixer = ShortConvolution | SelectiveScan | ChannelScan | GatedDelta | FixedDecay
