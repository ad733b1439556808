"""MiniMax-Text-01: lightning attention beside softmax attention, experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import ATTENTION, STATE, DecoderConfig, Layout
from outrider.model.families.experts import mixtral
from outrider.model.families.mixers import FixedDecay
from outrider.model.families.reader import FULL, LINEAR, Reader, family

_ADDED = {FULL: "full_attn_beta_factor", LINEAR: "linear_attn_beta_factor"}
_STAYS = {FULL: "full_attn_alpha_factor", LINEAR: "linear_attn_alpha_factor"}
_MODULES = {
    "mixer.in_proj_qkv": "self_attn.qkv_proj",
    "mixer.in_proj_z": "self_attn.output_gate",
    "mixer.norm": "self_attn.norm",
    "mixer.out_proj": "self_attn.out_proj",
}


@family(
    "minimax",
    "MiniMaxForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    num_experts_per_tok=2,
    num_local_experts=8,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
def minimax(read: Reader) -> DecoderConfig:
    """Norms replace the residual. Factors of what is added multiply output products and experts."""
    if read.activation() != "silu":
        raise read.refuse("hidden_act of lightning attention is not silu")
    count = read.number("num_hidden_layers")
    types = read.config.get("layer_types") or [LINEAR if i % 2 else FULL for i in range(count)]
    if len(types) != count or set(types) - {LINEAR, FULL}:
        raise read.refuse("layer_types names other layers than full and linear attention")
    stays = {kind: read.real(name, 1.0) for kind, name in _STAYS.items()}
    added = {kind: read.real(name, 1.0) for kind, name in _ADDED.items()}
    mlp = read.real("mlp_alpha_factor", 1.0)
    if min(*stays.values(), mlp) <= 0:
        raise read.refuse("a factor of the residual is not positive")
    found = mixtral(read)
    assert found.experts is not None
    if read.config.get("rotary_dim", found.head_dim) != found.head_dim:
        raise read.refuse("rotary_dim is a part of a head, where transformers rotates all of it")
    return replace(
        found,
        experts=replace(found.experts, scale=read.real("mlp_beta_factor", 1.0)),
        norm_stays=tuple((stays[kind], mlp) for kind in types),
        mixing=tuple(STATE if kind == LINEAR else ATTENTION for kind in types),
        mixer=FixedDecay(
            heads=found.num_heads, head_dim=found.head_dim, num_layers=count, norm_eps=1e-6
        ),
        layout=Layout(
            modules=_MODULES,
            experts=found.layout.experts,
            scales={
                "self_attn.o_proj.weight": added[FULL],
                "mixer.out_proj.weight": added[LINEAR],
            },
        ),
    )
