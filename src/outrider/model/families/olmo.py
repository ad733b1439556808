"""OLMo, and Exaone 4, which shares with OLMo 2 that norms follow attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import ATTENTION, NO_ROPE, STATE, DecoderConfig, Layout
from outrider.model.families.mixers import GatedDelta
from outrider.model.families.reader import FULL, LINEAR, SLIDING, Reader, family
from outrider.model.rope import RopeConfig, rope_parameters

_OUT_NORMS = Layout(
    modules={
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
)


@family("olmo", "OlmoForCausalLM", max_position_embeddings=2048)
def olmo(read: Reader) -> DecoderConfig:
    """Norms without weights."""
    if read.config.get("clip_qkv"):
        raise read.refuse("clip_qkv limits the values of queries, keys and values")
    return read.llama(mlp_bias=False, layer_norm=True, norm_weight=False, norm_eps=1e-5)


@family("olmo2", "Olmo2ForCausalLM", max_position_embeddings=2048, rms_norm_eps=1e-5)
def olmo2(read: Reader) -> DecoderConfig:
    """Queries and keys are normalised over all heads together."""
    return read.llama(
        mlp_bias=False,
        qk_norm=True,
        qk_span="row",
        norm_before=False,
        norm_after=True,
        layout=_OUT_NORMS,
    )


@family(
    "olmo3",
    "Olmo3ForCausalLM",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    sliding_window=4096,
)
def olmo3(read: Reader) -> DecoderConfig:
    """OLMo 2 with windows in three of four layers, whose rope is never scaled."""
    types = read.layer_types(read.every(4))
    given = rope_parameters(read.config)
    whole = given.get("full_attention") or (given if "rope_type" in given else {})
    return replace(
        olmo2(read),
        windows=read.windows(types),
        rope=read.rope(whole),
        other_ropes=(read.rope(given.get("sliding_attention") or {}),),
        layer_ropes=tuple(1 if kind == SLIDING else 0 for kind in types),
    )


_DELTA = {
    "mixer.conv": "conv1d",
    "mixer.norm": "o_norm",
    "mixer.out_proj": "o_proj",
    "mixer.A_log": "A_log",
    "mixer.dt_bias": "dt_bias",
    **{f"mixer.in_proj_{part}": f"{part}_proj" for part in "qkvba"},
    "mixer.in_proj_z": "g_proj",
}


@family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    max_position_embeddings=65536,
    linear_conv_kernel_dim=4,
    linear_allow_neg_eigval=True,
)
def olmo_hybrid(read: Reader) -> DecoderConfig:
    """OLMo 2 in every fourth layer, the gated delta rule with norms before it in the others."""
    if read.activation() != "silu":
        raise read.refuse("hidden_act of the convolution is not silu")
    count, heads = read.number("num_hidden_layers"), read.number("num_attention_heads")
    default = [LINEAR if i % 4 != 3 else FULL for i in range(count)]
    default[-1] = default[-1] if FULL in default else FULL
    types = read.config.get("layer_types") or default
    if len(types) != count or set(types) - {LINEAR, FULL}:
        raise read.refuse("layer_types names other layers than full and linear attention")
    key_heads = read.number("linear_num_key_heads", heads)
    key_dim = read.number("linear_key_head_dim", int(0.75 * read.number("hidden_size") / key_heads))
    attends = tuple(kind == FULL for kind in types)
    theta = rope_parameters(read.config).get("rope_theta", read.config.get("rope_theta", 10_000.0))
    return read.llama(
        mlp_bias=False,
        qk_norm=True,
        qk_span="row",
        norms_out=attends,
        rope=None if theta else RopeConfig(),
        layer_ropes=() if theta else (NO_ROPE,) * count,
        mixing=tuple(ATTENTION if yes else STATE for yes in attends),
        mixer=GatedDelta(
            key_heads=key_heads,
            value_heads=read.number("linear_num_value_heads", heads),
            key_dim=key_dim,
            value_dim=read.number("linear_value_head_dim", 2 * key_dim),
            width=read.number("linear_conv_kernel_dim"),
            products=tuple("qkvzba"),
            most_strength=2.0 if read.flag("linear_allow_neg_eigval") else 1.0,
            norm_eps=1e-5,
        ),
        layout=Layout(
            modules={k: f"linear_attn.{v}" for k, v in _DELTA.items()} | dict(_OUT_NORMS.modules),
            # As published, and as transformers writes it.
            others={
                "input_layernorm": "attention_layer_norm",
                "post_attention_layernorm": "feedforward_layer_norm",
            },
            split_convolution=tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
        ),
    )


@family(
    "exaone4",
    "Exaone4ForCausalLM",
    max_position_embeddings=2048,
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    sliding_window=4096,
    sliding_window_pattern=4,
)
def exaone4(read: Reader) -> DecoderConfig:
    """In a model with windows, only layers with a window rotate."""
    types = ["full_attention"] * read.number("num_hidden_layers")
    ropes: tuple[int, ...] = ()
    if read.config.get("sliding_window") is not None:
        pattern = read.config["sliding_window_pattern"]
        types = read.layer_types(read.every(pattern) if isinstance(pattern, int) else None)
        ropes = read.no_rope([kind == SLIDING for kind in types])
    return read.llama(
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=True,
        norm_before=False,
        norm_after=True,
        windows=read.windows(types),
        layer_ropes=ropes,
        layout=_OUT_NORMS,
    )
