"""The registry of families, and the reader with which a family turns a config.json into parts."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.errors import ModelError
from outrider.model.families.description import (
    ACTIVATIONS,
    NO_ROPE,
    DecoderConfig,
    Layout,
    show,
)
from outrider.model.quantized.forms import METHODS
from outrider.model.rope import RopeConfig, read_rope, rope_parameters, with_long_factors

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

# Names in config.json -> ours.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


class UnsupportedByDecoder(ModelError):
    """A valid model that the compact decoders cannot run; transformers can."""


Describe = Callable[["Reader"], DecoderConfig]


@dataclass(frozen=True, slots=True)
class Family:
    """A model type: how its config.json becomes a description."""

    architecture: str  # what `architectures` names
    describe: Describe
    defaults: Mapping[str, Any]  # the value of an absent key


FAMILIES: dict[str, Family] = {}


def family(model_type: str, architecture: str, **defaults: Any) -> Callable[[Describe], Describe]:
    """Registers a function from a `Reader` to a `DecoderConfig` for a model type.

    `defaults` are the values of absent keys, as the configuration class of transformers has them.
    """

    def register(describe: Describe) -> Describe:
        FAMILIES[model_type] = Family(architecture, describe, defaults)
        return describe

    return register


def read_decoder_config(config: Mapping[str, Any], length: int | None = None) -> DecoderConfig:
    """`length`: of the longest text; a longrope that ends below it takes its long factors.

    Raises `UnsupportedByDecoder` for other architectures, `ModelError` for a broken config.
    """
    found = _read(config)
    if length is None or length <= found.max_positions:
        return found
    return _read(with_long_factors(config))


def _read(config: Mapping[str, Any]) -> DecoderConfig:
    if isinstance(config.get("text_config"), dict):
        return _read_text_part(config)
    model_type = str(config.get("model_type"))
    found = FAMILIES.get(model_type)
    if found is None:
        raise UnsupportedByDecoder(
            f"the compact decoder does not know the model type {model_type!r}; "
            "use backend 'transformers'"
        )
    _refuse_unusual(config, found)
    stated = dict(_present(config))
    known = ChainMap(stated, dict(found.defaults))
    described = found.describe(Reader(model_type, known, frozenset(stated)))
    if config.get("tensors_of_llama"):  # a GGUF file: under Llama's names, shifted and in halves
        return replace(described, layout=Layout(), norm_shift=0.0, rope_pairs=False)
    return described


# Classes with a vision part whose text part is one of our families, and where its tensors are.
_WITH_VISION = {
    "Gemma3ForConditionalGeneration": ("gemma3_text",),
    "Gemma3nForConditionalGeneration": ("gemma3n_text",),
    "Gemma4ForConditionalGeneration": ("gemma4_text",),
    "Llama4ForConditionalGeneration": ("llama4_text",),
    "Mistral3ForConditionalGeneration": ("mistral", "ministral3"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5_text",),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe_text",),
}


def _read_text_part(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of a model that also sees images; it reads and writes text alone."""
    architecture, *_ = config.get("architectures") or [""]
    if architecture not in _WITH_VISION:
        raise UnsupportedByDecoder(
            f"the compact decoder does not know the text part of a {architecture}; use a text model"
        )
    text = {"model_type": _WITH_VISION[architecture][0], **config["text_config"]}
    text.pop("architectures", None)
    if text["model_type"] not in _WITH_VISION[architecture]:
        raise UnsupportedByDecoder(
            f"the text part of this {architecture} is a {text['model_type']}; use a text model"
        )
    inherited = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
    text |= {key: config[key] for key in inherited if config.get(key) is not None}
    found = read_decoder_config(text)
    layout = replace(
        found.layout,
        trunks=("model.language_model.", "language_model.model."),
        heads=("lm_head", "language_model.lm_head"),
    )
    return replace(found, layout=layout)


def _present(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says; a null stays only where it means something: no window, say."""
    meaningful = {"sliding_window", "q_lora_rank"}
    if config.get("model_type") == "olmo_hybrid":  # without a theta, it does not rotate
        meaningful.add("rope_theta")
    meaningful |= {"attn_logit_softcapping", "final_logit_softcapping"}
    return {k: v for k, v in config.items() if v is not None or k in meaningful}


def stored_dtype(config: Mapping[str, Any]) -> str:
    """The type the weights are stored in, as config.json says; float32 if it does not."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(dtype).removeprefix("torch.")


def _refuse_unusual(config: Mapping[str, Any], found: Family) -> None:
    architectures = config.get("architectures") or [found.architecture]
    if found.architecture.lower() not in {str(name).lower() for name in architectures}:
        raise UnsupportedByDecoder(
            f"the folder holds a {architectures[0]}, not a {found.architecture}; "
            "use a causal language model"
        )
    quantisation = config.get("quantization_config")
    if quantisation and str(quantisation.get("quant_method")) not in METHODS:
        raise UnsupportedByDecoder(
            f"the checkpoint is quantised by {quantisation.get('quant_method')!r}, not "
            f"{', '.join(METHODS)}; use backend 'transformers'"
        )


class Reader:
    """A config.json with the defaults of its family."""

    def __init__(
        self, model_type: str, config: Mapping[str, Any], stated: frozenset[str] = frozenset()
    ) -> None:
        """`stated`: the keys that the config has itself."""
        self.model_type = model_type
        self.config = config
        self.stated = stated

    def one_of(self, *keys: str) -> str:
        """The first key that the config states; the first of all if it states none."""
        return next((key for key in keys if key in self.stated), keys[0])

    def refuse(self, what: str) -> UnsupportedByDecoder:
        """The error to raise where the compact decoders cannot follow the config."""
        return UnsupportedByDecoder(f"{what}; use backend 'transformers'")

    def number(self, key: str, default: int | None = None) -> int:
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"config.json has {key} = {show(value)}; it must be a positive integer"
            )
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"config.json has {key} = {show(value)}; it must be a number")
        return float(value)

    def cap(self, key: str) -> float | None:
        """A soft cap; None if the config has none."""
        return None if self.config.get(key) is None else self.real(key)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.config.get(key, default))

    def activation(self, key: str = "hidden_act") -> str:
        name = self.config.get(key, "silu")
        if name not in _ACTIVATIONS:
            raise self.refuse(f"{key} {show(name)} is not one of {', '.join(ACTIVATIONS)}")
        return _ACTIVATIONS[name]

    def layer_types(self, default: list[str] | None = None) -> list[str]:
        """Per layer "sliding_attention" or "full_attention"."""
        num_layers = self.number("num_hidden_layers")
        types = self.config.get("layer_types") or default or [FULL] * num_layers
        if len(types) != num_layers or set(types) - {SLIDING, FULL}:
            raise self.refuse("layer_types names other layers than full and sliding attention")
        return list(types)

    def every(self, period: int) -> list[str]:
        """The last of `period` layers sees everything, the others a window."""
        count = self.number("num_hidden_layers")
        return [SLIDING if (i + 1) % period else FULL for i in range(count)]

    def windows(self, types: list[str]) -> tuple[int | None, ...]:
        window = self.config.get("sliding_window")
        if window is None:
            return (None,) * len(types)
        size = self.number("sliding_window")
        return tuple(size if kind == SLIDING else None for kind in types)

    def no_rope(self, rotates: list[bool]) -> tuple[int, ...]:
        """`layer_ropes` of a model with one rope that some layers leave out."""
        return () if all(rotates) else tuple(0 if yes else NO_ROPE for yes in rotates)

    def rotary_dim(self, head_dim: int, key: str = "partial_rotary_factor") -> int | None:
        """The leading dimensions that rotate; None: all."""
        found = rope_parameters(self.config)
        part = float(found.get("partial_rotary_factor") or self.config.get(key) or 1.0)
        rotated = int(head_dim * part)
        if rotated % 2 or not 2 <= rotated <= head_dim:
            raise self.refuse(f"{rotated} of {head_dim} dimensions of a head rotate")
        return None if rotated == head_dim else rotated

    def rope(self, params: Mapping[str, Any] | None = None, *, partial: bool = True) -> RopeConfig:
        try:
            positions = self.number("max_position_embeddings")
            return read_rope(self.config, positions, params=params, partial=partial)
        except ModelError as error:
            raise self.refuse(str(error)) from error

    def llama(self, **parts: Any) -> DecoderConfig:
        """A Llama of the config's sizes, with `parts` in place of its own."""
        hidden_size, num_heads = self.number("hidden_size"), self.number("num_attention_heads")
        num_kv_heads = parts.get("num_kv_heads") or self.number("num_key_value_heads", num_heads)
        head_dim = parts.get("head_dim") or self.number("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads or head_dim % 2:
            raise ModelError(
                f"config.json has {num_heads} heads over {num_kv_heads} key/value heads of "
                f"{head_dim}; heads must divide evenly and be of even size"
            )
        num_layers = self.number("num_hidden_layers")
        base = DecoderConfig(
            family=self.model_type,
            vocab_size=self.number("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=parts.pop("intermediate_size", 0) or self.number("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=self.real("rms_norm_eps", 1e-6),
            max_positions=self.number("max_position_embeddings"),
            rope=parts.pop("rope", None) or self.rope(partial="rotary_dim" in parts),
            tied=self.flag("tie_word_embeddings"),
            qkv_bias=self.flag("attention_bias"),
            o_bias=self.flag("attention_bias"),
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=False,
            windows=(None,) * num_layers,
            dtype=stored_dtype(self.config),
            activation=self.activation(),
        )
        built = replace(base, **parts)
        longest = [built.max_positions]
        longest += [r.original_positions for r in built.ropes if r.ends_early]
        return replace(built, max_positions=min(longest))
