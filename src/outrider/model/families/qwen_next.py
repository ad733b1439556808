"""Qwen3-Next and Qwen 3.5: the gated delta rule, with gated attention in every fourth layer."""

from __future__ import annotations

from typing import Any

from outrider.model.families.description import (
    ATTENTION,
    STATE,
    DecoderConfig,
    ExpertLayout,
    Experts,
    Layout,
)
from outrider.model.families.mixers import GatedDelta
from outrider.model.families.reader import FULL, LINEAR, Reader, family

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MIXER = ("conv", "norm", "out_proj", "A_log", "dt_bias")
_SPLIT = ("qkv", "z", "b", "a")
_PRODUCTS = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _next(read: Reader, products: tuple[str, ...], **parts: Any) -> DecoderConfig:
    if read.activation() != "silu":
        raise read.refuse("hidden_act of the convolution is not silu")
    count, period = read.number("num_hidden_layers"), read.number("full_attention_interval")
    default = [LINEAR if (i + 1) % period else FULL for i in range(count)]
    types = read.config.get("layer_types") or default
    if len(types) != count or set(types) - {LINEAR, FULL}:
        raise read.refuse("layer_types names other layers than full and linear attention")
    modules = {f"mixer.{name}": f"linear_attn.{name}" for name in _MIXER + _PRODUCTS}
    return read.llama(
        mlp_bias=False,
        norm_shift=1.0,
        qk_norm=True,
        rotary_dim=read.rotary_dim(read.number("head_dim")),
        attention_gate=True,
        mixer=GatedDelta(
            key_heads=read.number("linear_num_key_heads"),
            value_heads=read.number("linear_num_value_heads"),
            key_dim=read.number("linear_key_head_dim"),
            value_dim=read.number("linear_value_head_dim"),
            width=read.number("linear_conv_kernel_dim"),
            products=products,
        ),
        mixing=tuple(STATE if kind == LINEAR else ATTENTION for kind in types),
        layout=Layout(
            modules=modules | {"mixer.conv": "linear_attn.conv1d"},
            experts=ExpertLayout(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
        ),
        **parts,
    )


def _experts(read: Reader, layers: tuple[bool, ...], *, normalised: bool) -> Experts:
    return Experts(
        count=read.number("num_experts"),
        active=read.number("num_experts_per_tok"),
        inner=read.number("moe_intermediate_size"),
        layers=layers,
        normalised=normalised,
        shared=read.number("shared_expert_intermediate_size"),
        shared_gate=True,
    )


@family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    num_key_value_heads=2,
    decoder_sparse_step=1,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts_per_tok=10,
    num_experts=512,
    norm_topk_prob=True,
    **_COMMON,
)
def qwen3_next(read: Reader) -> DecoderConfig:
    dense = read.config.get("mlp_only_layers") or []
    period = read.number("decoder_sparse_step")
    layers = tuple(
        i not in dense and (i + 1) % period == 0 for i in range(read.number("num_hidden_layers"))
    )
    experts = None
    if read.config.get("num_experts"):
        experts = _experts(read, layers, normalised=read.flag("norm_topk_prob"))
    return _next(read, ("qkvz", "ba"), experts=experts)


@family("qwen3_5_text", "Qwen3_5ForCausalLM", num_key_value_heads=4, **_COMMON)
def qwen3_5(read: Reader) -> DecoderConfig:
    return _next(read, _SPLIT)


@family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    num_key_value_heads=2,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    num_experts_per_tok=8,
    num_experts=256,
    **_COMMON,
)
def qwen3_5_moe(read: Reader) -> DecoderConfig:
    layers = (True,) * read.number("num_hidden_layers")
    experts = _experts(read, layers, normalised=True)
    return _next(read, _SPLIT, intermediate_size=experts.inner, experts=experts)
