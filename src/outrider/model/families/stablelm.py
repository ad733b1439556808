"""Decoders with rope whose norms subtract the mean: StableLM, StarCoder 2, GPT-NeoX, Nemotron."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import SLIDING, Reader, family


def _head_dim(read: Reader) -> int:
    return read.number("hidden_size") // read.number("num_attention_heads")


@family(
    "stablelm",
    "StableLmForCausalLM",
    max_position_embeddings=4096,
    num_key_value_heads=32,
    layer_norm_eps=1e-5,
    partial_rotary_factor=0.25,
)
def stablelm(read: Reader) -> DecoderConfig:
    parallel = read.flag("use_parallel_residual")
    return read.llama(
        qkv_bias=read.flag("use_qkv_bias"),
        o_bias=False,
        mlp_bias=False,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_eps"),
        parallel=parallel,
        one_norm=parallel,
        qk_norm=read.flag("qk_layernorm"),
        qk_layer_norm=True,
        qk_span="heads",
        rotary_dim=read.rotary_dim(_head_dim(read)),
        layout=Layout(head_norms="self_attn.*_layernorm.norms"),
    )


@family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    max_position_embeddings=4096,
    num_key_value_heads=2,
    hidden_act="gelu_pytorch_tanh",
    norm_epsilon=1e-5,
    use_bias=True,
    tie_word_embeddings=True,
)
def starcoder2(read: Reader) -> DecoderConfig:
    biased = read.flag("use_bias")
    return read.llama(
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("norm_epsilon"),
        gated=False,
        windows=read.windows([SLIDING] * read.number("num_hidden_layers")),
        layout=Layout(modules={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    )


@family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    max_position_embeddings=2048,
    hidden_act="gelu",
    layer_norm_eps=1e-5,
    use_parallel_residual=True,
    attention_bias=True,
    rotary_pct=0.25,
)
def gpt_neox(read: Reader) -> DecoderConfig:
    theta = {"rope_theta": read.real("rotary_emb_base", 10_000.0)}
    given = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    return read.llama(
        num_kv_heads=read.number("num_attention_heads"),
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_eps"),
        parallel=read.flag("use_parallel_residual"),
        gated=False,
        rope=read.rope({**theta, **given}),
        rotary_dim=read.rotary_dim(_head_dim(read), "rotary_pct"),
        layout=Layout(
            trunks=("gpt_neox.",),
            heads=("embed_out",),
            embedding="embed_in",
            final_norm="final_layer_norm",
            modules={
                "self_attn.o_proj": "attention.dense",
                "mlp.up_proj": "mlp.dense_h_to_4h",
                "mlp.down_proj": "mlp.dense_4h_to_h",
            },
            fused_qkv="attention.query_key_value",
            fused_groups=read.number("num_attention_heads"),
        ),
    )


@family(
    "gpt_neox_japanese",
    "GPTNeoXJapaneseForCausalLM",
    max_position_embeddings=2048,
    intermediate_multiple_size=4,
    hidden_act="gelu",
    layer_norm_eps=1e-5,
    tie_word_embeddings=True,
)
def gpt_neox_japanese(read: Reader) -> DecoderConfig:
    """GPT-NeoX one after the other, without biases but that of the last attention."""
    widened = {"intermediate_size": read.number("intermediate_multiple_size")}
    widened["intermediate_size"] *= read.number("hidden_size")
    sized = Reader(read.model_type, ChainMap(widened, dict(read.config)), read.stated)
    found = gpt_neox(sized)
    modules = {**found.layout.modules, "self_attn.o_proj.bias": "attention.dense_bias"}
    trunks = ("gpt_neox_japanese.",)
    return replace(
        found,
        qkv_bias=False,
        o_bias=False,
        last_o_bias=True,
        mlp_bias=False,
        parallel=False,
        layout=replace(found.layout, trunks=trunks, modules=modules),
    )


@family(
    "nemotron",
    "NemotronForCausalLM",
    max_position_embeddings=4096,
    hidden_act="relu2",
    norm_eps=1e-5,
    partial_rotary_factor=0.5,
)
def nemotron(read: Reader) -> DecoderConfig:
    head_dim = read.number("head_dim", _head_dim(read))
    return read.llama(
        layer_norm=True,
        norm_bias=True,
        norm_shift=1.0,
        norm_eps=read.real("norm_eps"),
        gated=False,
        rotary_dim=read.rotary_dim(head_dim),
    )
