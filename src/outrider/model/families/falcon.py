"""Falcon, BLOOM and MPT: one fused product, no gate; BLOOM and MPT have slopes instead of rope."""

from __future__ import annotations

import math

from outrider.model.families.description import NO_ROPE, DecoderConfig, Layout
from outrider.model.families.gpt import renamed
from outrider.model.families.reader import Reader, family
from outrider.model.rope import RopeConfig

_FUSED = "self_attention.query_key_value"
_MODULES = {
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


@family(
    "falcon",
    "FalconForCausalLM",
    max_position_embeddings=2048,
    layer_norm_epsilon=1e-5,
    activation="gelu",
    multi_query=True,
    parallel_attn=True,
    tie_word_embeddings=True,
)
def falcon(read: Reader) -> DecoderConfig:
    """The "new architecture" has groups of heads, and a norm each for attention and MLP."""
    if read.flag("alibi"):
        raise read.refuse("alibi is set, which transformers rounds to bfloat16")
    heads, new = read.number("num_attention_heads"), read.flag("new_decoder_architecture")
    one_key = read.flag("multi_query") and not new
    kv_heads = read.number("num_kv_heads", heads) if new else 1 if one_key else heads
    parallel = read.flag("parallel_attn")
    norms = int(read.config.get("num_ln_in_parallel_attn") or (2 if new else 1))
    if (new and not parallel) or (norms == 2 and not new):
        raise read.refuse("its blocks are arranged in another way")
    two = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
    biased = read.flag("bias")
    return read.llama(
        intermediate_size=read.number("ffn_hidden_size", 4 * read.number("hidden_size")),
        num_kv_heads=kv_heads,
        activation=read.activation("activation"),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_epsilon"),
        parallel=parallel,
        one_norm=parallel and norms == 1,
        gated=False,
        layout=Layout(
            trunks=("transformer.",),
            layers="h.",
            embedding="word_embeddings",
            final_norm="ln_f",
            modules=_MODULES | (two if norms == 2 else {}),
            fused_qkv=_FUSED,
            fused_groups=kv_heads,
        ),
    )


def _slopes(heads: int) -> tuple[float, ...]:
    """Powers of 2 ** (-8 / n) for n heads, n a power of two; then those between for the others."""
    n = 2 ** math.floor(math.log2(heads))
    near = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    between = [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (heads - n), 2)]
    return (*near, *between)


def _slopes_in_turns(heads: int) -> tuple[float, ...]:
    """The same of the next power of two: every second one, then the others."""
    n = 2 ** math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == heads else [*slopes[1::2], *slopes[::2]][:heads])


@family(
    "bloom",
    "BloomForCausalLM",
    seq_length=2048,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)
def bloom(read: Reader) -> DecoderConfig:
    names = {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
    }
    read = renamed(read, names)
    if read.flag("apply_residual_connection_post_layernorm"):
        raise read.refuse("apply_residual_connection_post_layernorm is set")
    heads = read.number("num_attention_heads")
    return read.llama(
        intermediate_size=4 * read.number("hidden_size"),
        num_kv_heads=heads,
        activation="gelu_tanh",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_epsilon"),
        gated=False,
        embedding_norm=True,
        slopes=_slopes(heads),
        rope=RopeConfig(),
        layer_ropes=(NO_ROPE,) * read.number("num_hidden_layers"),
        layout=Layout(
            trunks=("transformer.", ""),
            layers="h.",
            embedding="word_embeddings",
            embedding_norm="word_embeddings_layernorm",
            final_norm="ln_f",
            modules=_MODULES,
            fused_qkv=_FUSED,
            fused_groups=heads,
        ),
    )


@family(
    "mpt",
    "MptForCausalLM",
    max_seq_len=2048,
    layer_norm_epsilon=1e-5,
    expansion_ratio=4,
    tie_word_embeddings=True,
)
def mpt(read: Reader) -> DecoderConfig:
    names = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    }
    read = renamed(read, names)
    attention = read.config.get("attn_config") or {}
    unusual = ("clip_qkv", "qk_ln", "prefix_lm")
    if any(attention.get(name) for name in unusual) or read.number("expansion_ratio") != 4:
        raise read.refuse(f"one of {', '.join(unusual)} or another expansion_ratio is set")
    if attention.get("alibi") is False or attention.get("alibi_bias_max", 8) != 8:
        raise read.refuse("it has positions other than alibi of 8")
    heads = read.number("num_attention_heads")
    return read.llama(
        intermediate_size=4 * read.number("hidden_size"),
        num_kv_heads=heads,
        attention_scale=attention.get("softmax_scale"),
        activation="gelu",
        layer_norm=True,
        norm_eps=read.real("layer_norm_epsilon"),
        gated=False,
        slopes=_slopes_in_turns(heads),
        rope=RopeConfig(),
        layer_ropes=(NO_ROPE,) * read.number("num_hidden_layers"),
        layout=Layout(
            trunks=("transformer.",),
            layers="blocks.",
            embedding="wte",
            final_norm="norm_f",
            modules={
                "input_layernorm": "norm_1",
                "post_attention_layernorm": "norm_2",
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "ffn.up_proj",
                "mlp.down_proj": "ffn.down_proj",
            },
            fused_qkv="attn.Wqkv",
        ),
    )
