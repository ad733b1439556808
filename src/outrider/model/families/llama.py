"""Llama, and families that differ in biases, windows, norms of heads or missing rope."""

from __future__ import annotations

from dataclasses import replace

from outrider.model.families.description import DecoderConfig, Layout
from outrider.model.families.reader import FULL, SLIDING, Reader, family
from outrider.model.rope import rope_parameters


@family("llama", "LlamaForCausalLM", max_position_embeddings=2048)
@family(
    "arcee",
    "ArceeForCausalLM",
    max_position_embeddings=4096,
    hidden_act="relu2",
    rms_norm_eps=1e-5,
)
def llama(read: Reader) -> DecoderConfig:
    return read.llama(gated=read.model_type != "arcee")


@family(
    "mistral",
    "MistralForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    sliding_window=4096,
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
)
def mistral(read: Reader) -> DecoderConfig:
    types = [SLIDING] * read.number("num_hidden_layers")
    return read.llama(qkv_bias=False, o_bias=False, mlp_bias=False, windows=read.windows(types))


@family(
    "ministral",
    "MinistralForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    sliding_window=4096,
)
def ministral(read: Reader) -> DecoderConfig:
    types = read.layer_types([SLIDING] * read.number("num_hidden_layers"))
    return read.llama(qkv_bias=False, o_bias=False, mlp_bias=False, windows=read.windows(types))


_QWEN = {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}


def qwen_windows(read: Reader) -> tuple[int | None, ...]:
    count = read.number("num_hidden_layers")
    if not read.flag("use_sliding_window"):
        return (None,) * count
    first = int(read.config.get("max_window_layers", 28))
    types = read.layer_types([SLIDING if i >= first else FULL for i in range(count)])
    return read.windows(types)


@family("mimo", "MiMoForCausalLM", **_QWEN)
@family("qwen2", "Qwen2ForCausalLM", **_QWEN)
def qwen2(read: Reader) -> DecoderConfig:
    windows = qwen_windows(read)
    return read.llama(qkv_bias=True, o_bias=False, mlp_bias=False, windows=windows)


@family("qwen3", "Qwen3ForCausalLM", head_dim=128, **_QWEN)
def qwen3(read: Reader) -> DecoderConfig:
    return read.llama(mlp_bias=False, qk_norm=True, windows=qwen_windows(read))


@family(
    "seed_oss",
    "SeedOssForCausalLM",
    max_position_embeddings=524288,
    head_dim=128,
    num_key_value_heads=8,
    attention_bias=True,
)
def seed_oss(read: Reader) -> DecoderConfig:
    return read.llama(o_bias=read.flag("attention_out_bias"))


@family(
    "smollm3",
    "SmolLM3ForCausalLM",
    max_position_embeddings=32768,
    num_key_value_heads=4,
    rope_theta=2_000_000.0,
    no_rope_layer_interval=4,
    tie_word_embeddings=True,
)
def smollm3(read: Reader) -> DecoderConfig:
    """Every fourth layer has no rope; windows, if any, stand in these layers."""
    count, period = read.number("num_hidden_layers"), read.number("no_rope_layer_interval")
    listed = read.config.get("no_rope_layers") or [(i + 1) % period for i in range(count)]
    rotates = [bool(value) for value in listed]
    if len(rotates) != count:
        raise read.refuse("no_rope_layers does not name every layer")
    windowed = read.flag("use_sliding_window")
    types = read.layer_types([FULL if yes or not windowed else SLIDING for yes in rotates])
    return read.llama(
        layer_ropes=read.no_rope(rotates),
        windows=read.windows(types) if windowed else (None,) * count,
    )


@family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
)
def hunyuan(read: Reader) -> DecoderConfig:
    """Heads are normalised after the rotation. A fixed `alpha` stretches the base of the rope."""
    config = read.llama(
        mlp_bias=False,
        qk_norm=True,
        qk_norm_late=True,
        layout=Layout(
            modules={
                "self_attn.q_norm": "self_attn.query_layernorm",
                "self_attn.k_norm": "self_attn.key_layernorm",
            }
        ),
    )
    alpha = rope_parameters(read.config).get("alpha")
    if not alpha or config.rope.kind != "dynamic":
        return config
    base = config.rope.theta * float(alpha) ** (config.head_dim / (config.head_dim - 2))
    return replace(config, rope=replace(config.rope, kind="default", theta=base))


@family(
    "cwm",
    "CwmForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    sliding_window=8192,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
)
def cwm(read: Reader) -> DecoderConfig:
    """Every fourth layer, the first included, sees everything."""
    count = read.number("num_hidden_layers")
    types = read.layer_types([SLIDING if i % 4 else FULL for i in range(count)])
    return read.llama(qkv_bias=False, o_bias=False, windows=read.windows(types))


@family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    max_position_embeddings=131072,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
)
def ernie(read: Reader) -> DecoderConfig:
    biased = read.flag("use_bias")
    return read.llama(qkv_bias=biased, o_bias=biased, mlp_bias=biased, rope_pairs=True)


@family(
    "helium",
    "HeliumForCausalLM",
    max_position_embeddings=4096,
    num_key_value_heads=20,
    head_dim=128,
    rms_norm_eps=1e-8,
    rope_theta=100_000.0,
)
def helium(read: Reader) -> DecoderConfig:
    return read.llama(o_bias=False, rope_pairs=True)
