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

from outrider.model.families.mixers import (
    ChannelScan,
    FixedDecay,
    GatedDelta,
    SelectiveScan,
    ShortConvolution,
)
from outrider.model.states import StatePass
from outrider.model.tensors import Weights, scaled_rows

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

    def delta_inputs(self, mixer: GatedDelta) -> torch.Tensor:
        return self._place(self._weights.delta_inputs(self._layer, mixer))

    def decay_inputs(self, mixer: FixedDecay) -> torch.Tensor:
        return self._place(self._weights.decay_inputs(self._layer, mixer))


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


class ScanLayer:
    """`SelectiveScan`. N heads of P dimensions, with states of S numbers for each."""

    def __init__(self, get: _Tensors, mixer: SelectiveScan, eps: float) -> None:
        self._mixer, self._eps = mixer, eps
        self.inputs, self.input_bias = get("in_proj.weight"), get.maybe("in_proj.bias")
        self.inputs = scaled_rows(mixer, self.inputs)
        if self.input_bias is not None:
            self.input_bias = scaled_rows(mixer, self.input_bias)
        self.conv_CW, self.conv_bias_C = get.convolution()
        self.step_bias_N, self.skip_N = get.wide("dt_bias"), get.wide("D")
        self.rate_N = -get.wide("A_log").exp()
        self.norm_I = get.wide("norm.weight") if mixer.norm else None
        self.out, self.out_bias = get("out_proj.weight").t(), get.maybe("out_proj.bias")

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        mixer, num_tokens = self._mixer, len(h_TH)
        shared = (num_tokens, mixer.groups, mixer.state_size)
        rows = F.linear(h_TH, self.inputs, self.input_bias)
        z, xbc, steps = torch.split(rows, [mixer.inner, mixer.channels, mixer.heads], dim=-1)
        xbc = F.silu(states.convolve(at, xbc, self.conv_CW, self.conv_bias_C))
        x, b, c = torch.split(xbc, [*mixer.sizes[1:4]], dim=-1)
        step_TN = F.softplus(steps.float() + self.step_bias_N)
        step_TN = step_TN.clamp(mixer.least_step, mixer.most_step)
        decay_TN11 = (step_TN * self.rate_N).exp()[..., None, None]
        x_TNP = x.reshape(num_tokens, mixer.heads, mixer.head_dim)
        added_TNP1 = (x_TNP * step_TN[..., None])[..., None]
        repeats = mixer.heads // mixer.groups
        b_TN1S, c_TN1S = (
            y.reshape(shared).repeat_interleave(repeats, dim=1)[:, :, None] for y in (b, c)
        )

        def advance(state_nNPS: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            state_nNPS.mul_(decay_TN11[tokens]).addcmul_(added_TNP1[tokens], b_TN1S[tokens])
            out: torch.Tensor = (state_nNPS * c_TN1S[tokens]).sum(-1)
            return out

        y_TNP = states.recur(at, advance, torch.empty_like(x_TNP))
        y_TI = y_TNP.addcmul_(x_TNP, self.skip_N[:, None]).flatten(1)
        return self._gated(y_TI, F.silu(z.float())).to(h_TH.dtype)

    def _gated(self, y_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        if self.norm_I is None:
            return y_TI * gate_TI
        parts = (len(y_TI), self._mixer.norm_groups, -1)
        y = y_TI if self._mixer.norm_first else y_TI * gate_TI
        y = y.view(parts)
        y = F.rms_norm(y, y.shape[-1:], None, self._eps).flatten(1) * self.norm_I
        return y * gate_TI if self._mixer.norm_first else y


class ChannelScanLayer:
    """`ChannelScan`. C channels with states of S numbers each; P numbers of the short vector."""

    def __init__(self, get: _Tensors, mixer: ChannelScan) -> None:
        self._mixer = mixer
        self.inputs, self.input_bias = get("in_proj.weight"), get.maybe("in_proj.bias")
        self.conv_CW, self.conv_bias_C = get.convolution()
        self.vectors, self.steps = get.wide("x_proj.weight"), get.wide("dt_proj.weight")
        self.step_bias_C, self.skip_C = get.wide("dt_proj.bias"), get.wide("D")
        self.rate_CS = -get.wide("A_log").exp()
        self.norms: list[torch.Tensor | None] = [None] * 3
        if mixer.norms == "weights":
            self.norms = [get.wide(f"{name}_layernorm.weight") for name in ("dt", "b", "c")]
        self.out, self.out_bias = get("out_proj.weight").t(), get.maybe("out_proj.bias")

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        x, z = F.linear(h_TH, self.inputs, self.input_bias).chunk(2, dim=-1)
        x_TC = F.silu(states.convolve(at, x, self.conv_CW, self.conv_bias_C))
        parts = torch.split(F.linear(x_TC, self.vectors), [*self._mixer.sizes], dim=-1)
        step_TP, b_TS, c_TS = map(self._norm, parts, self.norms)
        step_TC = F.softplus(F.linear(step_TP, self.steps) + self.step_bias_C)
        added_TC1 = (x_TC * step_TC)[..., None]

        def advance(state_nCS: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            state_nCS.mul_((step_TC[tokens][..., None] * self.rate_CS).exp())
            state_nCS.addcmul_(added_TC1[tokens], b_TS[tokens][:, None])
            out: torch.Tensor = (state_nCS * c_TS[tokens][:, None]).sum(-1)
            return out

        y_TC = states.recur(at, advance, torch.empty_like(x_TC)).addcmul_(x_TC, self.skip_C)
        return (y_TC * F.silu(z.float())).to(h_TH.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if self._mixer.norms == "none":
            return x
        return F.rms_norm(x, x.shape[-1:], weight, self._mixer.norm_eps)


class DeltaLayer:
    """`GatedDelta`. N value heads; keys have P dimensions, values V."""

    def __init__(self, get: _Tensors, mixer: GatedDelta, eps: float) -> None:
        self._mixer = mixer
        self.inputs = get.delta_inputs(mixer)
        self.conv_CW, self.conv_bias_C = get.convolution()
        self.step_bias_N, self.rate_N = get.wide("dt_bias"), -get.wide("A_log").exp()
        self.norm_V = get.wide("norm.weight")
        self._eps = eps if mixer.norm_eps is None else mixer.norm_eps
        self.out = get("out_proj.weight").t()
        self.out_bias: torch.Tensor | None = None

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        mixer, num_tokens = self._mixer, len(h_TH)
        heads = mixer.value_heads
        rows = F.linear(h_TH, self.inputs)
        qkv, z, b, a = torch.split(rows, [mixer.channels, mixer.inner, heads, heads], dim=-1)
        qkv = F.silu(states.convolve(at, qkv, self.conv_CW, self.conv_bias_C))
        q, k, v = torch.split(qkv, [*mixer.sizes[:3]], dim=-1)
        q_TNP, k_TNP = (self._unit(x) for x in (q, k))
        q_TNP = q_TNP * mixer.key_dim**-0.5
        v_TNV = v.reshape(num_tokens, heads, mixer.value_dim)
        strength_TN1 = b.float().sigmoid()[..., None] * mixer.most_strength
        decay_TN11 = (F.softplus(a.float() + self.step_bias_N) * self.rate_N).exp()[..., None, None]

        def advance(state_nNPV: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            k_nNP1 = k_TNP[tokens][..., None]
            state_nNPV.mul_(decay_TN11[tokens])
            known_nNV = (state_nNPV * k_nNP1).sum(-2)
            change_nNV = (v_TNV[tokens] - known_nNV) * strength_TN1[tokens]
            state_nNPV.addcmul_(k_nNP1, change_nNV[:, :, None])
            out: torch.Tensor = (state_nNPV * q_TNP[tokens][..., None]).sum(-2)
            return out

        y_TNV = states.recur(at, advance, torch.empty_like(v_TNV))
        y_TNV = F.rms_norm(y_TNV, (mixer.value_dim,), self.norm_V, self._eps)
        return (y_TNV.flatten(1) * F.silu(z.float())).to(h_TH.dtype)

    def _unit(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, N, P]: keys of length 1, repeated for the value heads that share them."""
        mixer = self._mixer
        x = x_TK.reshape(len(x_TK), mixer.key_heads, mixer.key_dim)
        x = x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
        return x.repeat_interleave(mixer.value_heads // mixer.key_heads, dim=1)


class DecayLayer:
    """`FixedDecay`. N heads; queries, keys and values have P dimensions."""

    def __init__(self, get: _Tensors, mixer: FixedDecay, layer: int) -> None:
        self._mixer = mixer
        self.inputs, self.norm_I = get.decay_inputs(mixer), get.wide("norm.weight")
        decay_N = torch.tensor(mixer.rates(layer)).exp().to(self.norm_I.device)
        self.decay_N11 = decay_N[:, None, None]
        self.out = get("out_proj.weight").t()
        self.out_bias: torch.Tensor | None = None

    def __call__(self, h_TH: torch.Tensor, states: StatePass, at: int) -> torch.Tensor:
        mixer = self._mixer
        z, *parts = torch.split(F.linear(h_TH, self.inputs), mixer.inner, dim=-1)
        shape = (len(h_TH), mixer.heads, mixer.head_dim)
        v_TNP, k_TNP, q_TNP = (F.silu(part.float()).view(shape) for part in parts)

        def advance(state_nNPP: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
            state_nNPP.mul_(self.decay_N11)
            state_nNPP.addcmul_(k_TNP[tokens][..., None], v_TNP[tokens][:, :, None])
            out: torch.Tensor = (state_nNPP * q_TNP[tokens][..., None]).sum(-2)
            return out

        y_TI = states.recur(at, advance, torch.empty_like(v_TNP)).flatten(1)
        y_TI = F.rms_norm(y_TI, (mixer.inner,), self.norm_I, mixer.norm_eps)
        return (y_TI * torch.sigmoid(z.float())).to(h_TH.dtype)


def read_mixer(weights: Weights, layer: int, place: Place) -> MixerLayer | None:
    """None: the layer has no state."""
    mixer = weights.config.mixer
    if mixer is None or not weights.config.has_state(layer):
        return None
    get = _Tensors(weights, layer, place)
    if isinstance(mixer, ShortConvolution):
        return ConvolutionLayer(get)
    if isinstance(mixer, SelectiveScan):
        return ScanLayer(get, mixer, weights.config.norm_eps)
    if isinstance(mixer, ChannelScan):
        return ChannelScanLayer(get, mixer)
    if isinstance(mixer, FixedDecay):
        return DecayLayer(get, mixer, layer)
    return DeltaLayer(get, mixer, weights.config.norm_eps)
