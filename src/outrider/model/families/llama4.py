"""Llama 4 and Ministral 3: queries grow with their position; Llama 4 also has chunks."""

from __future__ import annotations

from outrider.model.families.description import (
    DecoderConfig,
    ExpertLayout,
    Experts,
    Growth,
    Layout,
)
from outrider.model.families.reader import FULL, SLIDING, Reader, family
from outrider.model.rope import rope_parameters

_CHUNKED = "chunked_attention"
_FEED_FORWARD = {f"mlp.{name}_proj": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}


@family(
    "llama4_text",
    "Llama4ForCausalLM",
    max_position_embeddings=131072,
    hidden_size=5120,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    intermediate_size=8192,
    intermediate_size_mlp=16384,
    num_local_experts=16,
    num_experts_per_tok=1,
    interleave_moe_layer_step=1,
    no_rope_layer_interval=4,
    use_qk_norm=True,
    attention_chunk_size=8192,
    attn_temperature_tuning=True,
    floor_scale=8192,
    attn_scale=0.1,
)
def llama4(read: Reader) -> DecoderConfig:
    """Some layers do not rotate and see everything; the others see a chunk of positions."""
    count, period = read.number("num_hidden_layers"), read.number("no_rope_layer_interval")
    listed = read.config.get("no_rope_layers") or [(i + 1) % period for i in range(count)]
    rotates = [bool(value) for value in listed]
    types = read.config.get("layer_types") or [_CHUNKED if yes else FULL for yes in rotates]
    if len(rotates) != count or len(types) != count or set(types) - {_CHUNKED, FULL}:
        raise read.refuse("no_rope_layers or layer_types does not fit the layers")
    chunk = read.config.get("attention_chunk_size")
    grows = read.flag("attn_temperature_tuning")
    return read.llama(
        intermediate_size=read.number("intermediate_size_mlp"),
        mlp_bias=False,
        rope_pairs=True,
        layer_ropes=read.no_rope(rotates),
        chunks=tuple(chunk if kind == _CHUNKED else None for kind in types),
        qk_norm=read.flag("use_qk_norm"),
        qk_unit=read.flag("use_qk_norm"),
        qk_norm_late=read.flag("use_qk_norm"),
        growth=Growth(
            factor=read.real("attn_scale"),
            every=read.number("floor_scale"),
            first=1,
            everywhere=False,
        )
        if grows
        else None,
        experts=_experts(read, count),
        layout=Layout(
            modules=_FEED_FORWARD,
            experts=ExpertLayout(
                router="feed_forward.router",
                all_gate_up="feed_forward.experts.gate_up_proj",
                all_down="feed_forward.experts.down_proj",
                transposed=True,
                shared="feed_forward.shared_expert",
            ),
        ),
    )


def _experts(read: Reader, num_layers: int) -> Experts:
    """Every token also passes the shared expert, an MLP of the size of the others."""
    step = read.number("interleave_moe_layer_step")
    sparse = read.config.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, num_layers, step)
    inner = read.number("intermediate_size")
    return Experts(
        count=read.number("num_local_experts"),
        active=read.number("num_experts_per_tok"),
        inner=inner,
        layers=tuple(i in sparse for i in range(num_layers)),
        router="sigmoid_of_chosen",
        weighs_input=True,
        shared=inner,
    )


@family(
    "ministral3",
    "Ministral3ForCausalLM",
    max_position_embeddings=262144,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_parameters={
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)
def ministral3(read: Reader) -> DecoderConfig:
    given = rope_parameters(read.config)
    factor = float(given.get("llama_4_scaling_beta") or 0.0)
    every = given.get("original_max_position_embeddings")
    if factor and not isinstance(every, int):
        raise read.refuse("llama_4_scaling_beta without original_max_position_embeddings")
    types = [SLIDING] * read.number("num_hidden_layers")
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=read.windows(types) if read.config.get("sliding_window") else (None,) * len(types),
        growth=Growth(factor=factor, every=int(every)) if factor and every else None,
    )
