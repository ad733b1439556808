"""LFM2: short convolutions, and attention in some layers."""

from __future__ import annotations

from outrider.model.families.description import ATTENTION, STATE, DecoderConfig, Layout
from outrider.model.families.mixers import ShortConvolution
from outrider.model.families.reader import FULL, Reader, family

_MODULES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mixer.in_proj": "conv.in_proj",
    "mixer.conv": "conv.conv",
    "mixer.out_proj": "conv.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


@family(
    "lfm2",
    "Lfm2ForCausalLM",
    vocab_size=65536,
    hidden_size=2560,
    intermediate_size=12288,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=128_000,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    conv_L_cache=3,
    block_multiple_of=256,
    block_ffn_dim_multiplier=1.0,
    block_auto_adjust_ff_dim=True,
)
def lfm2(read: Reader) -> DecoderConfig:
    return read.llama(
        intermediate_size=_intermediate_size(read),
        norm_eps=read.real("norm_eps"),
        tied=read.flag(read.one_of("tie_embedding", "tie_word_embeddings"), True),
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        mixer=ShortConvolution(
            channels=read.number("hidden_size"),
            width=read.number("conv_L_cache"),
            bias=read.flag("conv_bias"),
        ),
        mixing=mixing(read, "conv"),
        layout=Layout(final_norm="embedding_norm", modules=_MODULES),
    )


def mixing(read: Reader, state: str) -> tuple[str, ...]:
    """`layer_types` of attention and of layers called `state`."""
    count = read.number("num_hidden_layers")
    attentions = read.config.get("full_attn_idxs")
    types = read.config.get("layer_types") or [
        FULL if attentions is None or i in attentions else state for i in range(count)
    ]
    names = {FULL: ATTENTION, "attention": ATTENTION, state: STATE}
    if len(types) != count or set(types) - set(names):
        raise read.refuse(f"layer_types names other layers than attention and {state}")
    return tuple(names[kind] for kind in types)


def _intermediate_size(read: Reader) -> int:
    size = read.number(read.one_of("block_ff_dim", "intermediate_size"))
    if not read.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(read.real("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = read.number("block_multiple_of")
    return multiple * -(-size // multiple)
