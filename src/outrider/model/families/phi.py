"""Phi: small models with a partly rotated head; from the third on with fused products."""

from __future__ import annotations

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import SLIDING, Reader, family
from outrider.model.rope import rope_parameters


@family(
    "phi",
    "PhiForCausalLM",
    max_position_embeddings=2048,
    hidden_act="gelu_new",
    layer_norm_eps=1e-5,
    partial_rotary_factor=0.5,
)
def phi(read: Reader) -> DecoderConfig:
    """Attention and MLP read the same norm, and every product has a bias, the head included."""
    if read.flag("qk_layernorm"):
        raise read.refuse("qk_layernorm has a bias")
    return read.llama(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_eps"),
        parallel=True,
        one_norm=True,
        gated=False,
        rotary_dim=read.rotary_dim(
            read.number("hidden_size") // read.number("num_attention_heads")
        ),
        layout=Layout(
            final_norm="final_layernorm",
            modules={
                "self_attn.o_proj": "self_attn.dense",
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
            },
        ),
    )


@family(
    "phi3",
    "Phi3ForCausalLM",
    max_position_embeddings=4096,
    original_max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
def phi3(read: Reader) -> DecoderConfig:
    head_dim = read.number("hidden_size") // read.number("num_attention_heads")
    given = dict(rope_parameters(read.config))
    kind = given.get("rope_type") or given.get("type")
    if kind in ("su", "yarn"):  # early names of longrope
        given["rope_type"] = "longrope"
    types = read.layer_types([SLIDING] * read.number("num_hidden_layers"))
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=read.windows(types),
        rope=read.rope(given),
        rotary_dim=read.rotary_dim(head_dim),
        layout=Layout(fused_qkv="self_attn.qkv_proj", fused_gate_up="mlp.gate_up_proj"),
    )
