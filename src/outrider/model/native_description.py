"""A `DecoderConfig` as the structures of outrider.h, and what of it the native step runs."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from outrider import native
from outrider.model.families.description import (
    ACTIVATIONS,
    ROUTERS,
    SPANS,
    DecoderConfig,
    unlike,
)
from outrider.model.families.mixers import (
    ChannelScan,
    FixedDecay,
    GatedDelta,
    SelectiveScan,
    ShortConvolution,
)
from outrider.model.tensors import scaled_rows

# Tensor name -> kind in outrider.h.
LAYER_TENSORS = {
    "self_attn.q_proj.weight": 4,
    "self_attn.k_proj.weight": 5,
    "self_attn.v_proj.weight": 6,
    "self_attn.o_proj.weight": 7,
    "self_attn.q_proj.bias": 8,
    "self_attn.k_proj.bias": 9,
    "self_attn.v_proj.bias": 10,
    "self_attn.o_proj.bias": 11,
    "self_attn.q_norm.weight": 12,
    "self_attn.k_norm.weight": 13,
    "mlp.gate_proj.weight": 15,
    "mlp.up_proj.weight": 16,
    "mlp.down_proj.weight": 17,
    "mlp.gate_proj.bias": 18,
    "mlp.up_proj.bias": 19,
    "mlp.down_proj.bias": 20,
    "self_attn.sinks": 29,
    "mixer.out_proj.weight": 7,
    "mixer.out_proj.bias": 11,
    "mixer.in_proj.weight": 57,
    "mixer.in_proj.bias": 58,
    "mixer.conv.weight": 59,
    "mixer.conv.bias": 60,
    "self_attn.q_gate.weight": 48,
    "self_attn.q_gate.bias": 49,
}
# The same of layers with a scan or the delta rule.
STATE_TENSORS = {
    "mixer.in_proj.weight": 38,
    "mixer.in_proj.bias": 39,
    "mixer.out_proj.weight": 40,
    "mixer.out_proj.bias": 41,
    "mixer.dt_bias": 42,
    "mixer.A_log": 43,
    "mixer.D": 44,
    "mixer.norm.weight": 45,
    "mixer.conv.weight": 46,
    "mixer.conv.bias": 47,
}
# Norm over the hidden size -> the kinds of its weight and bias.
NORMS = {
    "input_layernorm": (3, 25),
    "post_attention_layernorm": (14, 26),
    "attention_out_norm": (27, -1),
    "mlp_out_norm": (28, -1),
}

# The deviations from Llama that the native step runs.
RUNS = frozenset(
    {
        "layer_norm",
        "norm_weight",
        "norm_bias",
        "norm_shift",
        "norm_before",
        "norm_after",
        "norms_out",
        "norm_stays",
        "last_o_bias",
        "parallel",
        "one_norm",
        "qk_layer_norm",
        "qk_span",
        "qk_norm_late",
        "rotary_dim",
        "rope_pairs",
        "other_ropes",
        "layer_ropes",
        "chunks",
        "growth",
        "slopes",
        "embedding_norm",
        "qk_unit",
        "attention_scale",
        "score_cap",
        "sinks",
        "activation",
        "gated",
        "position_rows",
        "position_offset",
        "sinusoids",
        "limited",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "logit_cap",
        "head_bias",
        "experts",
        "mixer",
        "mixing",
        "mlps",
        "attention_gate",
        "latent",
    }
)


def cannot_run(config: DecoderConfig) -> str:
    """The first part that the native step cannot run; "" for none."""
    if isinstance(config.mixer, ChannelScan):
        return "mixer"
    return unlike(config, RUNS)


def has_short_convolutions(config: DecoderConfig) -> bool:
    """Whether it keeps the inputs of convolutions for every token, not states."""
    return isinstance(config.mixer, ShortConvolution)


def widths_of(config: DecoderConfig) -> Any:
    """Per layer the width of the convolution in place of attention; None: there is none."""
    if not isinstance(config.mixer, ShortConvolution):
        return None
    width, layers = config.mixer.width, range(config.num_layers)
    return (ctypes.c_int32 * config.num_layers)(*(width * config.has_state(i) for i in layers))


def stays_of(config: DecoderConfig) -> Any:
    """Per layer the two factors of `norm_stays`; None: norms leave the residual as it is."""
    if not config.norm_stays:
        return None
    factors = [factor for pair in config.norm_stays for factor in pair]
    return (ctypes.c_float * len(factors))(*factors)


def mixes_of(config: DecoderConfig) -> Any:
    """Per layer the bits of outrider.h: whether it attends, and has a state; None: all attend."""
    if not config.mixing or has_short_convolutions(config):
        return None
    bits = (config.has_attention(i) + 2 * config.has_state(i) for i in range(config.num_layers))
    return (ctypes.c_int32 * config.num_layers)(*bits)


def mixer_of(config: DecoderConfig, mixes: Any) -> native.Mixer:
    mixer = config.mixer
    if isinstance(mixer, SelectiveScan):
        return native.Mixer(
            heads=mixer.heads,
            groups=mixer.groups,
            rows=mixer.state_size,
            outputs=mixer.head_dim,
            width=mixer.width,
            norm_groups=mixer.norm_groups if mixer.norm else 0,
            norm_first=mixer.norm_first,
            least_step=mixer.least_step,
            most_step=mixer.most_step,
            mixes=ctypes.addressof(mixes),
        )
    if isinstance(mixer, GatedDelta):
        return native.Mixer(
            delta=1,
            heads=mixer.value_heads,
            groups=mixer.key_heads,
            rows=mixer.key_dim,
            outputs=mixer.value_dim,
            width=mixer.width,
            norm_groups=mixer.value_heads,
            norm_first=1,
            most_strength=mixer.most_strength,
            eps=mixer.norm_eps or 0.0,
            mixes=ctypes.addressof(mixes),
        )
    if isinstance(mixer, FixedDecay):  # a scan without convolution, whose every step is 1
        return native.Mixer(
            heads=mixer.heads,
            groups=mixer.heads,
            rows=mixer.head_dim,
            outputs=mixer.head_dim,
            width=1,
            norm_groups=1,
            norm_first=1,
            sigmoid_gate=1,
            least_step=1.0,
            most_step=1.0,
            eps=mixer.norm_eps,
            mixes=ctypes.addressof(mixes),
        )
    return native.Mixer()


def fixed_tensors(mixer: FixedDecay, layer: int, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a scan has besides the stored tensors, of a layer whose products are `inputs`."""
    no_steps = inputs.new_zeros(mixer.heads, inputs.shape[1])
    return {
        "mixer.in_proj.weight": torch.cat([inputs, no_steps]),
        "mixer.conv.weight": torch.ones(mixer.channels, 1),
        "mixer.dt_bias": torch.zeros(mixer.heads),
        "mixer.A_log": torch.tensor(mixer.rates(layer)),
        "mixer.D": torch.zeros(mixer.heads),
    }


def state_tensor(config: DecoderConfig, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a scan or of the delta rule, as the native step reads it."""
    mixer = config.mixer
    if name == "mixer.A_log":
        return -tensor.float().exp()
    if name == "mixer.norm.weight" and isinstance(mixer, GatedDelta):
        return tensor.float().repeat(mixer.value_heads)
    if name.startswith("mixer.in_proj.") and isinstance(mixer, SelectiveScan):
        return scaled_rows(mixer, tensor)
    return tensor


def parts_of(config: DecoderConfig) -> native.Parts:
    return native.Parts(
        layer_norm=config.layer_norm,
        no_input_norms=not config.norm_before,
        out_norms=config.norm_after or any(config.norms_out),
        either_norms=bool(config.norms_out),
        parallel=config.parallel,
        one_norm=config.one_norm,
        qk_layer_norm=config.qk_layer_norm,
        qk_span=SPANS.index(config.qk_span),
        qk_late=config.qk_norm_late,
        activation=ACTIVATIONS.index(config.activation),
        plain_mlp=not config.gated,
        position_rows=config.position_rows,
        position_offset=config.position_offset,
        qk_rotated=config.qk_unit,
        gates_attention=config.attention_gate,
        growth_every=config.growth.every if config.growth else 0,
        growth_first=config.growth.first if config.growth else 0,
        growth_everywhere=config.growth.everywhere if config.growth else 0,
        growth=config.growth.factor if config.growth else 0,
        **_latent_parts(config),
        score_cap=config.score_cap or 0,
        embedding_scale=_factor(config.embedding_scale),
        residual_scale=_factor(config.residual_scale),
        logit_scale=_factor(config.logit_scale),
        logit_cap=config.logit_cap or 0,
    )


def _latent_parts(config: DecoderConfig) -> dict[str, int]:
    latent = config.latent
    if latent is None:
        return {}
    return {
        "latent_q": latent.q_rank,
        "latent_kv": latent.kv_rank,
        "latent_rope": latent.rope,
        "value_dim": latent.value,
    }


def layer_arrays(config: DecoderConfig) -> tuple[Any, Any]:
    """Per layer the intermediate size of its MLP, and whether it has experts."""
    layers = range(config.num_layers)
    inner = (ctypes.c_int32 * config.num_layers)(*(config.inner_size(i) for i in layers))
    return inner, (ctypes.c_int32 * config.num_layers)(*(config.has_experts(i) for i in layers))


def experts_of(config: DecoderConfig, inner_of: Any, sparse: Any) -> native.Experts:
    experts = config.experts
    if experts is None:
        return native.Experts(inner_of=ctypes.addressof(inner_of))
    return native.Experts(
        count=experts.count,
        active=experts.active,
        inner=experts.inner,
        router=ROUTERS.index(experts.router),
        normalised=experts.normalised,
        groups=experts.groups,
        open_groups=experts.open_groups,
        group_best=experts.group_best,
        weighs_input=experts.weighs_input,
        shared_gate=experts.shared_gate,
        bias=experts.bias,
        least_sum=experts.least_sum,
        scale=experts.scale,
        jitter=experts.jitter,
        clamp=experts.clamp,
        alpha=experts.alpha,
        inner_of=ctypes.addressof(inner_of),
        sparse=ctypes.addressof(sparse),
    )


def _factor(value: float) -> float:
    """0 stands for no factor."""
    return 0.0 if value == 1.0 else value
