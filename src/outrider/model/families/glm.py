"""GLM-4: half of each head rotates, neighbours together; gate and up are one tensor."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import Reader, family

_GLM = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


@family("glm", "GlmForCausalLM", **_GLM)
def glm(read: Reader) -> DecoderConfig:
    return read.llama(
        o_bias=False,
        mlp_bias=False,
        rope_pairs=True,
        rotary_dim=read.rotary_dim(read.number("head_dim")),
        layout=Layout(fused_gate_up="mlp.gate_up_proj"),
    )


@family("glm4", "Glm4ForCausalLM", **_GLM)
def glm4(read: Reader) -> DecoderConfig:
    """The same, with norms after attention and MLP, too."""
    config = glm(read)
    modules = {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
    return replace(config, norm_after=True, layout=replace(config.layout, modules=modules))
