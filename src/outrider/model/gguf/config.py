"""GGUF metadata -> the content of a config.json, which `families.read_decoder_config` reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider.errors import ModelError
from outrider.model.gguf.architectures import ARCHITECTURES, Architecture
from outrider.model.gguf.container import Container
from outrider.model.gguf.metadata import Metadata

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


def architecture_of(container: Container) -> Architecture:
    name = str(container.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{container.path} holds a model of the architecture {name!r}; of GGUF files we run "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


def read_gguf_config(container: Container) -> dict[str, Any]:
    """What the config.json of the same model says. Raises `ModelError` of one line."""
    architecture, tensors = architecture_of(container), container.tensors
    m = Metadata(container)
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise m.missing("the tensor token_embd.weight")
    for key in ("attention.value_length", "rope.dimension_count"):
        if m.number(key, m.head_dim) != m.head_dim and not (
            architecture.partial and key.startswith("rope")
        ):
            raise ModelError(
                f"{container.path} has {m.architecture}.{key} = {m.get(key)} for heads "
                f"of {m.head_dim}; use a model where the two are equal"
            )
    rms = m.real("attention.layer_norm_rms_epsilon", 1e-5)
    eps = m.real("attention.layer_norm_epsilon", rms)
    model_type = architecture.model_type
    common: dict[str, Any] = {
        "model_type": model_type,
        "tensors_of_llama": True,  # see `read_decoder_config`
        "vocab_size": embedding.shape[0],
        "hidden_size": m.hidden,
        "intermediate_size": m.number("feed_forward_length", m.get("expert_feed_forward_length")),
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "rms_norm_eps": rms,
        **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon"), eps),
        "max_position_embeddings": m.number("context_length"),
        "rope_parameters": m.rope(),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": end_ids(container),
        "dtype": _dtype(container),
        "attention_bias": m.holds("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"),
        "mlp_bias": m.holds("blk.0.ffn_up.bias"),
    }
    return common | architecture.describe(m)


def sampling(container: Container) -> dict[str, Any]:
    """The sampling parameters in the metadata, in the spelling of generation_config.json."""
    spelled = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    keys = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
    found = {key: container.metadata.get(f"general.sampling.{key}") for key in keys}
    return {spelled.get(key, key): value for key, value in found.items() if value is not None}


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


def _dtype(container: Container) -> str:
    """The type of the matrices; anything quantised counts as float32, which loses nothing."""
    kinds = {t.type.name for t in container.tensors.values() if len(t.shape) >= 2}
    return {"BF16": "bfloat16", "F16": "float16"}.get("".join(kinds), "float32")
