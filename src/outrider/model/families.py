"""config.json -> `DecoderConfig`: the description of a Llama-shaped model for the compact decoders.

Llama, Mistral, Qwen2 and Qwen3 are one architecture with a few switches: biases, a norm on
queries and keys, sliding windows. A model that needs more than these switches is refused here, by
`UnsupportedByDecoder`, instead of being computed almost correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import ModelError
from outrider.model.rope import RopeConfig, read_rope


class UnsupportedByDecoder(ModelError):
    """A valid model that the compact decoders cannot run; transformers can."""


@dataclass(frozen=True, slots=True)
class Family:
    """The switches of one model type: fixed values, or the config keys that set them."""

    architecture: str
    qkv_bias: bool | str = False  # a string names the config key
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    windows: str = "none"  # none | always | by layer
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the value of an absent key


_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        windows="always",
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="by layer", defaults=_QWEN_DEFAULTS),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="by layer",
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A Llama-shaped decoder, with every default resolved."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: how many positions a token sees, its own included
    dtype: str  # as stored: "float32", "float16", "bfloat16"

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads


def read_decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Raises `UnsupportedByDecoder` for other architectures, `ModelError` for a broken config."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise UnsupportedByDecoder(
            f"the compact decoder runs {', '.join(FAMILIES)}, not {model_type!r}; "
            "use backend 'transformers'"
        )
    _refuse_unusual(config, family)

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = family.defaults.get(key, default) if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json has {key} = {value!r}; it must be a positive integer")
        return value

    hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
    num_kv_heads = number("num_key_value_heads", num_heads)
    head_dim = number("head_dim", hidden_size // num_heads)
    num_layers, max_positions = number("num_hidden_layers"), number("max_position_embeddings")
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"config.json has {num_heads} heads over {num_kv_heads} key/value heads of {head_dim}; "
            "heads must divide evenly and be of even size"
        )
    try:
        rope = read_rope(config, max_positions)
    except ModelError as error:
        raise UnsupportedByDecoder(f"{error}; use backend 'transformers'") from error
    return DecoderConfig(
        family=str(model_type),
        vocab_size=number("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=number("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=max_positions,
        rope=rope,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=_switch(config, family, family.qkv_bias),
        o_bias=_switch(config, family, family.o_bias),
        mlp_bias=_switch(config, family, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, num_layers),
        dtype=stored_dtype(config),
    )


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The type the weights are stored in, as config.json says; float32 if it does not."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(dtype).removeprefix("torch.")


def _switch(config: Mapping[str, Any], family: Family, value: bool | str) -> bool:
    """A fixed value, or the value of a config key."""
    if isinstance(value, bool):
        return value
    return bool(config.get(value, family.defaults.get(value, False)))


def _refuse_unusual(config: Mapping[str, Any], family: Family) -> None:
    architectures = config.get("architectures") or [family.architecture]
    if family.architecture not in architectures:
        raise UnsupportedByDecoder(
            f"the folder holds a {architectures[0]}, not a {family.architecture}; "
            "use a causal language model"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedByDecoder(
            f"hidden_act {config['hidden_act']!r} is not silu; use backend 'transformers'"
        )
    if config.get("quantization_config"):
        raise UnsupportedByDecoder("the checkpoint is quantized; use backend 'transformers'")


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", family.defaults.get("sliding_window"))
    if family.windows == "always":
        return (window,) * num_layers
    if family.windows == "none" or not config.get("use_sliding_window") or window is None:
        return (None,) * num_layers
    first = int(config.get("max_window_layers", 28))
    types = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise UnsupportedByDecoder(
            "layer_types names other layers than full and sliding attention; "
            "use backend 'transformers'"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
