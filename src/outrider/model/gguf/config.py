"""GGUF metadata -> the content of a config.json, which `families.read_decoder_config` reads.

Three architectures are of the shape that the compact decoders run: llama (Mistral's models carry
this name, too), qwen2 and qwen3. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.model.gguf.container import Container

ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Texts that end a turn or a text, if a control token is spelled so.
_ENDS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eot|>",
    "<end_of_turn>",
    "</s>",
    "<|end_of_turn|>",
    "<EOT>",
    "<|END_OF_TURN_TOKEN|>",
}
_CONTROL, _UNUSED = 3, 5

# Suffix in a GGUF file -> suffix in a folder.
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
}
GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FREQS = "rope_freqs.weight"


def names_of(container: Container) -> dict[str, str]:
    """Name in a folder -> name in the file; `ModelError` for a tensor that has no place."""
    found = {}
    for name in container.tensors:
        block, _, rest = name.partition(".")
        index, _, suffix = rest.partition(".")
        if name in GLOBAL_TENSORS:
            found[GLOBAL_TENSORS[name]] = name
        elif block == "blk" and index.isdigit() and suffix in LAYER_TENSORS:
            found[f"model.layers.{int(index)}.{LAYER_TENSORS[suffix]}"] = name
        elif name != _ROPE_FREQS and suffix != "attn_rot_embd.weight":
            raise ModelError(
                f"{container.path} has the tensor {name}, which a Llama-shaped model does not; "
                "use another model"
            )
    return found


def read_gguf_config(container: Container) -> dict[str, Any]:
    """What the config.json of the same model says. Raises `ModelError` of one line."""
    return _Reader(container).config()


def end_ids(container: Container) -> list[int]:
    """Ids that end a text: those the metadata names, and control tokens spelled like an end."""
    metadata = container.metadata
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    found = [int(id) for id in ids if isinstance(id, int)]
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == len(tokens):
        found += [int(i) for i in np.flatnonzero(kinds == _CONTROL) if tokens[i] in _ENDS]
    return list(dict.fromkeys(found))


def num_used(container: Container) -> int:
    """Ids below this mean something: padding at the end of the vocabulary does not."""
    tokens, kinds = (
        container.metadata.get(f"tokenizer.ggml.{k}") for k in ("tokens", "token_type")
    )
    if not isinstance(tokens, list):
        return 0
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        return len(tokens)
    return int(np.flatnonzero(kinds != _UNUSED).max(initial=-1)) + 1


class _Reader:
    def __init__(self, container: Container) -> None:
        self._container = container
        self._metadata: Mapping[str, Any] = container.metadata
        self._arch = str(self._metadata.get("general.architecture"))
        if self._arch not in ARCHITECTURES:
            raise ModelError(
                f"{container.path} holds a model of the architecture {self._arch!r}; of GGUF files "
                f"we run {', '.join(ARCHITECTURES)}"
            )

    def config(self) -> dict[str, Any]:
        tensors = self._container.tensors
        embedding = tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise self._missing("the tensor token_embd.weight")
        if self._get("expert_count", 0):
            raise ModelError(
                f"{self._container.path} is a mixture of experts; use a model without experts"
            )
        layers = self._number("block_count")
        if layers > len(tensors):
            raise self._missing(f"tensors for {layers} layers")
        heads = self._number("attention.head_count")
        hidden = self._number("embedding_length")
        head_dim = self._number("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._number(key, head_dim) != head_dim:
                raise ModelError(
                    f"{self._container.path} has {self._arch}.{key} = {self._get(key)} for heads "
                    f"of {head_dim}; use a model where the two are equal"
                )
        biased = {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
        return {
            "model_type": self._arch,
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._get("attention.layer_norm_rms_epsilon", 1e-5)),
            "max_position_embeddings": self._number("context_length"),
            "rope_parameters": self._rope(head_dim),
            "tie_word_embeddings": "output.weight" not in tensors,
            "eos_token_id": end_ids(self._container),
            "dtype": self._dtype(),
            **(biased if self._arch != "qwen2" else {}),
        }

    def _missing(self, what: str) -> ModelError:
        return ModelError(f"{self._container.path} lacks {what}; download the file again")

    def _get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._arch}.{key}", default)

    def _number(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if value is None:
            raise self._missing(f"the metadata entry {self._arch}.{key}")
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = int(value[0])  # one per layer
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
            raise ModelError(
                f"{self._container.path} has {self._arch}.{key} = {str(value)[:80]!r}; "
                "it must be a positive integer"
            )
        return value

    def _rope(self, head_dim: int) -> dict[str, Any]:
        theta = float(self._get("rope.freq_base", 10_000.0))
        kind = str(self._get("rope.scaling.type", "none"))
        factor = float(self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0)))
        plain: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
        if _ROPE_FREQS in self._container.tensors:
            return plain | {"rope_type": "factors", "factors": self._factors(head_dim)}
        if kind == "none" or factor in (0.0, 1.0):
            return plain
        if kind == "linear":
            return plain | {"rope_type": "linear", "factor": factor}
        if kind != "yarn":
            raise ModelError(
                f"{self._container.path} has the rope scaling {kind!r}, not none, linear or yarn; "
                "use another model"
            )
        scaled = plain | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._number(
                "rope.scaling.original_context_length", self._number("context_length")
            ),
            "beta_fast": float(self._get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(self._get("rope.scaling.yarn_beta_slow", 1.0)),
        }
        attention = self._get("rope.scaling.attn_factor")
        if attention is not None:
            scaled["attention_factor"] = float(attention) * float(1 + 0.1 * np.log(factor))
        return scaled

    def _factors(self, head_dim: int) -> list[float]:
        tensor = self._container.tensors[_ROPE_FREQS]
        if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
            raise ModelError(
                f"{self._container.path} has a {_ROPE_FREQS} of {tensor.type.name} "
                f"{list(tensor.shape)}, not F32 [{head_dim // 2}]; download the file again"
            )
        found = [float(value) for value in self._container.raw(tensor).view("<f4").ravel()]
        if not all(0 < value < 1e9 for value in found):
            raise ModelError(f"{self._container.path} has a damaged {_ROPE_FREQS}; download again")
        return found

    def _dtype(self) -> str:
        """The type of the matrices; anything quantised counts as float32, which loses nothing."""
        kinds = {t.type.name for t in self._container.tensors.values() if len(t.shape) == 2}
        return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")
