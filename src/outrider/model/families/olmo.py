"""OLMo, and Exaone 4, which shares with OLMo 2 that norms follow attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import SLIDING, Reader, family
from outrider.model.rope import rope_parameters

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
