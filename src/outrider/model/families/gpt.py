"""GPT and its relatives: learned positions, or GPT-J's rope beside a parallel MLP."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outrider.model.families.description import NO_ROPE, DecoderConfig, Layout, show
from outrider.model.families.reader import Reader, family
from outrider.model.rope import RopeConfig

_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_GPTJ = {
    "n_positions": 2048,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "rotary_dim": 64,
}
_GPT2 = {"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}


def renamed(read: Reader, names: Mapping[str, str] = MappingProxyType(_NAMES)) -> Reader:
    """The reader under the names that all other families use."""
    ours = {new: read.config[old] for new, old in names.items() if old in read.config}
    return Reader(read.model_type, ChainMap(ours, dict(read.config)), read.stated)


@family("gpt2", "GPT2LMHeadModel", activation_function="gelu_new", **_GPT2)
@family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    activation_function="gelu_pytorch_tanh",
    multi_query=True,
    **_GPT2,
)
def gpt2(read: Reader) -> DecoderConfig:
    read = renamed(read)
    if not read.flag("scale_attn_weights", True) or read.flag("scale_attn_by_inverse_layer_idx"):
        raise read.refuse("its attention scores are scaled in another way")
    if read.flag("add_cross_attention"):
        raise read.refuse("it has cross-attention")
    big, num_layers = read.model_type == "gpt_bigcode", read.number("num_hidden_layers")
    many = big and read.flag("multi_query")
    return read.llama(
        intermediate_size=read.number("n_inner", 4 * read.number("hidden_size")),
        num_kv_heads=1 if many else read.number("num_attention_heads"),
        activation=read.activation("activation_function"),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_epsilon"),
        gated=False,
        rope=RopeConfig(),
        layer_ropes=(NO_ROPE,) * num_layers,
        position_rows=read.number("max_position_embeddings"),
        layout=Layout(
            trunks=("transformer.", ""),
            layers="h.",
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            modules={
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                "self_attn.o_proj": "attn.c_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            fused_qkv="attn.c_attn",
            fused_groups=read.number("num_attention_heads") if big and not many else 1,
            transposed=not big,
        ),
    )


# Its "gelu" is what others call "gelu_new".
_AFN = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


@family(
    "openai-gpt",
    "OpenAIGPTLMHeadModel",
    n_positions=512,
    layer_norm_epsilon=1e-5,
    afn="gelu",
    tie_word_embeddings=True,
)
def openai_gpt(read: Reader) -> DecoderConfig:
    """Norms follow attention and MLP, and replace the residual: the one at the end of a layer is
    described as the beginning of the next layer, or as the norm before the head.
    """
    read = renamed(read)
    if read.config["afn"] not in _AFN:
        raise read.refuse(f"afn {show(read.config['afn'])} is not one of {', '.join(_AFN)}")
    known = ChainMap({"hidden_act": _AFN[read.config["afn"]]}, dict(read.config))
    count = read.number("num_hidden_layers")
    return _with_positions(
        Reader(read.model_type, known, read.stated),
        intermediate_size=4 * read.number("hidden_size"),
        norm_eps=read.real("layer_norm_epsilon"),
        qkv_bias=True,
        position_rows=read.number("max_position_embeddings"),
        norm_stays=((0.0, 1.0), *((1.0, 1.0),) * (count - 1)),
        layout=Layout(
            trunks=("transformer.", ""),
            layers="h.",
            embedding="tokens_embed",
            positions="positions_embed",
            final_norm=f"h.{count - 1}.ln_2",
            in_layer_before=("input_layernorm",),
            modules={
                "input_layernorm": "ln_2",
                "post_attention_layernorm": "ln_1",
                "self_attn.o_proj": "attn.c_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
            fused_qkv="attn.c_attn",
            transposed=True,
        ),
    )


@family("gptj", "GPTJForCausalLM", **_GPTJ)
@family("codegen", "CodeGenForCausalLM", **_GPTJ)
def gptj(read: Reader) -> DecoderConfig:
    """Attention and MLP read the same norm. CodeGen fuses its heads in four groups."""
    read = renamed(read)
    rotated, head_dim = (
        read.number("rotary_dim"),
        read.number("hidden_size") // read.number("num_attention_heads"),
    )
    if rotated % 2 or rotated > head_dim:
        raise read.refuse(f"{rotated} of {head_dim} dimensions of a head rotate")
    fused = read.model_type == "codegen"
    if fused and read.number("num_attention_heads") % 4:
        raise read.refuse("its heads do not make four equal groups")
    return read.llama(
        intermediate_size=read.number("n_inner", 4 * read.number("hidden_size")),
        num_kv_heads=read.number("num_attention_heads"),
        activation=read.activation("activation_function"),
        mlp_bias=True,
        head_bias=True,
        layer_norm=True,
        norm_bias=True,
        norm_eps=read.real("layer_norm_epsilon"),
        parallel=True,
        one_norm=True,
        gated=False,
        rope=RopeConfig(original_positions=read.number("max_position_embeddings")),
        rotary_dim=None if rotated == head_dim else rotated,
        rope_pairs=True,
        layout=Layout(
            trunks=("transformer.",),
            layers="h.",
            embedding="wte",
            final_norm="ln_f",
            modules={
                "input_layernorm": "ln_1",
                **{f"self_attn.{which}_proj": f"attn.{which}_proj" for which in "qkv"},
                "self_attn.o_proj": "attn.out_proj",
                "mlp.up_proj": "mlp.fc_in",
                "mlp.down_proj": "mlp.fc_out",
            },
            fused_qkv="attn.qkv_proj" if fused else None,
            fused_groups=4,
            fused_order="qvk",
        ),
    )


@family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    vocab_size=50257,
    hidden_size=2048,
    num_layers=24,
    num_heads=16,
    max_position_embeddings=2048,
    activation_function="gelu_new",
    window_size=256,
    layer_norm_epsilon=1e-5,
    tie_word_embeddings=True,
)
def gpt_neo(read: Reader) -> DecoderConfig:
    """Scores are not scaled; every other layer sees a window."""
    read = renamed(read, {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"})
    given = read.config.get("attention_types") or [[["global", "local"], 12]]
    kinds = [kind for names, times in given for _ in range(times) for kind in names]
    count, window = read.number("num_hidden_layers"), read.number("window_size")
    if len(kinds) != count or set(kinds) - {"global", "local"}:
        raise read.refuse("attention_types does not name every layer")
    return _with_positions(
        read,
        intermediate_size=read.number("intermediate_size", 4 * read.number("hidden_size")),
        activation=read.activation("activation_function"),
        norm_eps=read.real("layer_norm_epsilon"),
        qkv_bias=False,
        attention_scale=1.0,
        windows=tuple(window if kind == "local" else None for kind in kinds),
        position_rows=read.number("max_position_embeddings"),
        layout=Layout(
            trunks=("transformer.",),
            layers="h.",
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            modules={
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                **{f"self_attn.{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
                "self_attn.o_proj": "attn.attention.out_proj",
                "mlp.up_proj": "mlp.c_fc",
                "mlp.down_proj": "mlp.c_proj",
            },
        ),
    )


def _with_positions(read: Reader, **parts: Any) -> DecoderConfig:
    """Norms with mean and bias, an MLP without gate, biases, and a table of positions."""
    return read.llama(
        num_kv_heads=read.number("num_attention_heads"),
        o_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        gated=False,
        rope=RopeConfig(),
        layer_ropes=(NO_ROPE,) * read.number("num_hidden_layers"),
        **parts,
    )


_BART = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}


@family(
    "biogpt",
    "BioGptForCausalLM",
    vocab_size=42384,
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
    hidden_act="gelu",
    max_position_embeddings=1024,
    scale_embedding=True,
    tie_word_embeddings=True,
)
def biogpt(read: Reader) -> DecoderConfig:
    """Position 0 is row 2 of the table."""
    hidden = read.number("hidden_size")
    return _with_positions(
        read,
        embedding_scale=hidden**0.5 if read.flag("scale_embedding") else 1.0,
        norm_eps=1e-5,
        qkv_bias=True,
        position_rows=read.number("max_position_embeddings") + 2,
        position_offset=2,
        layout=Layout(
            trunks=("biogpt.",),
            heads=("output_projection",),
            final_norm="layer_norm",
            modules=_BART,
        ),
    )


@family(
    "xglm",
    "XGLMForCausalLM",
    vocab_size=256008,
    d_model=1024,
    ffn_dim=4096,
    num_layers=24,
    attention_heads=16,
    activation_function="gelu",
    max_position_embeddings=2048,
    scale_embedding=True,
    tie_word_embeddings=True,
    pad_token_id=1,
)
def xglm(read: Reader) -> DecoderConfig:
    """Positions are sines and cosines; position 0 is row 2 of their table."""
    names = {"hidden_size": "d_model", "intermediate_size": "ffn_dim"}
    names |= {"num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"}
    read = renamed(read, names)
    hidden = read.number("hidden_size")
    if int(read.config.get("pad_token_id") or 0) > 1 or hidden % 2:
        raise read.refuse("a row of its table of positions is 0")
    if read.flag("add_cross_attention"):
        raise read.refuse("it has cross-attention")
    return _with_positions(
        read,
        activation=read.activation("activation_function"),
        embedding_scale=hidden**0.5 if read.flag("scale_embedding") else 1.0,
        norm_eps=1e-5,
        qkv_bias=True,
        position_rows=read.number("max_position_embeddings") + 2,
        position_offset=2,
        sinusoids=True,
        layout=Layout(final_norm="layer_norm", modules=_BART),
    )


@family(
    "opt",
    "OPTForCausalLM",
    max_position_embeddings=2048,
    activation_function="relu",
    do_layer_norm_before=True,
    enable_bias=True,
    layer_norm_elementwise_affine=True,
    tie_word_embeddings=True,
)
def opt(read: Reader) -> DecoderConfig:
    """Position 0 is row 2 of the table."""
    width = read.config.get("word_embed_proj_dim", read.number("hidden_size"))
    if width != read.number("hidden_size") or not read.flag("do_layer_norm_before"):
        raise read.refuse("it projects its embeddings or normalises after each block")
    if not read.flag("layer_norm_elementwise_affine") or read.flag("_remove_final_layer_norm"):
        raise read.refuse("it lacks weights of norms")
    biased, num_layers = read.flag("enable_bias"), read.number("num_hidden_layers")
    return read.llama(
        intermediate_size=read.number("ffn_dim"),
        num_kv_heads=read.number("num_attention_heads"),
        activation=read.activation("activation_function"),
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=biased,
        layer_norm=True,
        norm_bias=True,
        norm_eps=1e-5,
        gated=False,
        rope=RopeConfig(),
        layer_ropes=(NO_ROPE,) * num_layers,
        position_rows=read.number("max_position_embeddings") + 2,
        position_offset=2,
        layout=Layout(
            trunks=("model.decoder.",),
            final_norm="final_layer_norm",
            modules=_BART,
        ),
    )
