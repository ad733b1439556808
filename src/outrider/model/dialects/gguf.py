"""EAGLE-3 heads in a GGUF file, as llama.cpp's converter writes them (architecture `eagle3`).

The file names the taps (layers whose input is read), stores the rows of queries and keys with the
two numbers of a rotating pair beside each other, and has target ids in `d2t` where others have
differences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.gguf.container import Container, TensorInfo, open_gguf

ARCHITECTURE = "eagle3"
_GLOBAL = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "d2t": "d2t",
    "d2t.weight": "d2t",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "hidden_norm": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Of a head of one layer, by our name.
STORED = {
    **{ours: stored for stored, ours in reversed(_GLOBAL.items())},
    **{
        f"layers.0.{module}.weight": f"blk.0.{stored}.weight"
        for stored, module in reversed(_LAYER.items())
    },
}
_ROPE_FACTORS = ("rope_freqs.weight", "blk.0.rope_freqs.weight")


def is_gguf_head(path: Path) -> bool:
    """Whether a GGUF file holds a head instead of a model."""
    return bool(open_gguf(path).metadata.get("general.architecture") == ARCHITECTURE)


def head_config(path: Path) -> dict[str, Any]:
    """What the config.json of the same head says. Raises ModelError for what is missing."""
    file = open_gguf(path)
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    taps = _get(file, "target_layers", _get(file, "extract_layers"))
    if taps is None:
        raise ModelError(f"{path} lacks the metadata entry eagle3.target_layers; convert it anew")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "vocab_size": _vocab_size(file),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": _number(file, "attention.key_length", hidden // heads),
        "intermediate_size": _number(file, "feed_forward_length"),
        "max_position_embeddings": _number(file, "context_length", 2048),
        "rms_norm_eps": float(_get(file, "attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_parameters": _rope(file),
        "eagle_aux_hidden_state_layer_ids": [int(tap) for tap in taps],
        "target_hidden_size": _number(file, "target_hidden_size", hidden),
        "norm_before_residual": bool(_get(file, "norm_before_residual", False)),
        "norm_output": bool(_get(file, "norm_output", False)),
    }


def head_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors under the names of a folder, dequantised."""
    file = open_gguf(path)
    config = head_config(path)
    found: dict[str, Tensor] = {}
    for name, info in file.tensors.items():
        block, _, rest = name.partition(".")
        index, _, suffix = rest.partition(".")
        module = _LAYER.get(suffix.removesuffix(".weight"))
        if name in _ROPE_FACTORS:
            continue
        tensor = _read(file, info)
        if suffix in ("attn_q.weight", "attn_k.weight"):
            tensor = _in_halves(tensor, config["head_dim"])
        if block == "blk" and module is not None:
            found[f"layers.{index}.{module}.weight"] = tensor
        else:
            found[_GLOBAL.get(name, name)] = tensor
    if "d2t" in found:
        found["d2t"] = _differences(found["d2t"])
    return found


def _differences(ids: Tensor) -> Tensor:
    """Target ids less the draft ids; early converters stored these already, which repeat."""
    is_ids = len(torch.unique(ids)) == len(ids)
    return ids - torch.arange(len(ids)) if is_ids else ids


def _in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of heads whose dimension i rotates with i + D / 2; stored are i and i + 1."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _read(file: Container, info: TensorInfo) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    blocks = file.raw(info)
    if info.type.name == "I64":
        return torch.from_numpy(blocks.view("<i8").astype(np.int64)).reshape(info.shape)
    values = dequantize(np.array(blocks), GGMLQuantizationType(info.type.id))
    return torch.from_numpy(np.array(values, np.float32)).reshape(info.shape)


def _vocab_size(file: Container) -> int:
    """The target's."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    for name in ("token_embd.weight", "output.weight"):
        info = file.tensors.get(name)
        if info is not None and (name != "output.weight" or "d2t" not in file.tensors):
            return info.shape[0]
    return _number(file, "vocab_size")


def _rope(file: Container) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(_get(file, "rope.freq_base", 10_000.0)),
    }
    scaling = str(_get(file, "rope.scaling.type", "none"))
    if scaling != "none":
        raise ModelError(f"{file.path} has the rope scaling {scaling!r}, which is not supported")
    factors = next((file.tensors[name] for name in _ROPE_FACTORS if name in file.tensors), None)
    if factors is None:
        return rope
    values: list[float] = _read(file, factors).flatten().tolist()
    return rope | {"rope_type": "factors", "factors": values}


def _get(file: Container, key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"{ARCHITECTURE}.{key}", default)
    return value.tolist() if isinstance(value, np.ndarray) else value


def _number(file: Container, key: str, default: int | None = None) -> int:
    value = _get(file, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{file.path} has {ARCHITECTURE}.{key} = {str(value)[:40]}; it must be positive"
        )
    return value
