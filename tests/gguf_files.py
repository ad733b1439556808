"""GGUF files for tests, written field by field: what the package `gguf` refuses to write, too."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from outrider.model.gguf.names import LAYER_MODULES, MODULES
from outrider.model.gguf.types import TYPES, TensorType

BY_NAME = {kind.name: kind for kind in TYPES.values()}
ALIGNMENT = 32


@dataclass(frozen=True)
class Stored:
    """A tensor's bytes; `shape` is row-major."""

    type: TensorType
    shape: tuple[int, ...]
    data: bytes


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(value: Any) -> bytes:
    """A metadata value, with its type before it."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return (
            struct.pack("<II", 4, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", 11, value)
        )
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, bytes):
        return struct.pack("<IIQ", 9, 0, len(value)) + value
    if not value or isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if isinstance(value[0], float):
        return struct.pack("<IIQ", 9, 6, len(value)) + np.array(value, "<f4").tobytes()
    return struct.pack("<IIQ", 9, 5, len(value)) + np.array(value, "<i4").tobytes()


def header(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    out += b"".join(text(key) + entry(value) for key, value in metadata.items())
    at = 0
    for name, tensor in tensors.items():
        out += text(name) + struct.pack("<I", len(tensor.shape))
        out += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape[::-1])
        out += struct.pack("<IQ", tensor.type.id, at)
        at += -(-len(tensor.data) // ALIGNMENT) * ALIGNMENT
    return out + bytes(-len(out) % ALIGNMENT)


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    data = b"".join(t.data + bytes(-len(t.data) % ALIGNMENT) for t in tensors.values())
    path.write_bytes(header(metadata, tensors) + data)
    return path


def plain(tensor: torch.Tensor, kind: str = "F32") -> Stored:
    """A tensor in an unquantised type."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    raw = tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return Stored(BY_NAME[kind], tuple(tensor.shape), raw)


def random_blocks(kind: str, shape: tuple[int, int], seed: int = 0, size: float = 1.0) -> Stored:
    """Random bytes as blocks of a type, their scales made small enough to be weights."""
    found = BY_NAME[kind]
    if found.values == 1:
        rng = torch.Generator().manual_seed(seed)
        return plain(torch.randn(shape, generator=rng) * size * shape[1] ** -0.5, kind)
    rng_np = np.random.default_rng(seed)
    count = shape[0] * shape[1] // found.values
    blocks = rng_np.integers(0, 256, (count, found.size), np.uint8)
    scale = size * shape[1] ** -0.5
    for at, spread in _SCALES[kind]:
        values = rng_np.uniform(0.5, 1.0, count) * scale * spread
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(np.log2(scale)) - rng_np.integers(1, 4, count)
    return Stored(found, shape, blocks.tobytes())


# Where half-precision scales lie in a block, and their sizes for weights of about 1.
_SCALES: dict[str, list[tuple[int, float]]] = {
    "Q4_0": [(0, 0.2)],
    "Q4_1": [(0, 0.2), (2, -1.5)],
    "Q5_0": [(0, 0.1)],
    "Q5_1": [(0, 0.1), (2, -1.5)],
    "Q8_0": [(0, 0.014)],
    "Q2_K": [(80, 0.1), (82, 0.1)],
    "Q3_K": [(108, 0.02)],
    "Q4_K": [(0, 0.006), (2, 0.04)],
    "Q5_K": [(0, 0.003), (2, 0.04)],
    "Q6_K": [(208, 0.0006)],
    "IQ4_NL": [(0, 0.014)],
    "IQ4_XS": [(0, 0.0006)],
    "MXFP4": [],
}

_FLAT_NAMES = {v: k for k, v in MODULES.items()}
_LAYER_NAMES = {v: k for k, v in LAYER_MODULES.items()}


def file_name_of(name: str) -> str:
    """A folder's tensor name in the spelling of GGUF."""
    module, _, kind = name.rpartition(".")
    if module in _FLAT_NAMES:
        return f"{_FLAT_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{kind}"


def from_folder(folder: Path, path: Path, kind: str = "F32", **metadata: Any) -> Path:
    """The same model and tokenizer as one file, unquantised."""
    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        for which, key in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if f".{which}_proj." in name and config["model_type"] == "llama":
                halves = tensor.reshape(config[key], 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[file_name_of(name)] = plain(tensor, kind if tensor.ndim > 1 else "F32")
    return write(path, metadata_of(config) | tokenizer_of(folder) | metadata, tensors)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    arch = config["model_type"]
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 1e4))),
    }
    if config.get("head_dim"):
        found[f"{arch}.attention.key_length"] = config["head_dim"]
    return found


def tokenizer_of(folder: Path) -> dict[str, Any]:
    """The folder's byte-level tokenizer as metadata; nothing if it has none."""
    if not (folder / "tokenizer.json").is_file():
        return {}
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    special = {token["id"] for token in content["added_tokens"] if token["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.token_type": [3 if id in special else 1 for id in sorted(vocab.values())],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_model(
    path: Path,
    kind: str,
    *,
    mixture: Mapping[str, str] | None = None,
    tied: bool = False,
    arch: str = "llama",
    hidden: int = 256,
    inner: int = 512,
    vocab: int = 96,
    **metadata: Any,
) -> Path:
    """Random blocks in the shape of a model with 2 layers and 4 heads over 2."""
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (hidden // 2, hidden),
        "attn_v": (hidden // 2, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    kinds = mixture or {}
    tensors: dict[str, Stored] = {
        "token_embd.weight": random_blocks(
            kinds.get("token_embd", kind), (vocab, hidden), 1, hidden**0.5
        ),
        "output_norm.weight": plain(torch.ones(hidden)),
    }
    if not tied:
        tensors["output.weight"] = random_blocks(kinds.get("output", kind), (vocab, hidden), 2)
    for layer in range(2):
        for seed, (name, shape) in enumerate(shapes.items(), 10 * layer + 3):
            weights = random_blocks(kinds.get(name, kind), shape, seed)
            tensors[f"blk.{layer}.{name}.weight"] = weights
            if arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                tensors[f"blk.{layer}.{name}.bias"] = plain(torch.linspace(-1, 1, shape[0]))
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = plain(torch.linspace(0.5, 1.5, hidden))
    config = {
        "model_type": arch,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
    }
    return write(path, metadata_of(config) | metadata, tensors)
