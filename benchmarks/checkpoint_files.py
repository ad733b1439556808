"""Writes GGUF files of common shapes with random blocks: speed does not depend on values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Kind = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tied: bool
    family: str = "llama"  # of llama.cpp
    head_dim: int = 0  # 0: an even split
    window: int = 0

    @property
    def dim(self) -> int:
        return self.head_dim or self.hidden // self.heads


SHAPES = {
    "8B": Shape(4096, 32, 32, 8, 14336, 128256, tied=False),  # Llama-3.1-8B
    "Llama-3.2-1B": Shape(2048, 16, 32, 8, 8192, 128256, tied=True),
    "Qwen2.5-1.5B": Shape(1536, 28, 12, 2, 8960, 151936, tied=True, family="qwen2"),
    "Qwen3-1.7B": Shape(2048, 28, 16, 8, 6144, 151936, tied=True, family="qwen3", head_dim=128),
    "Gemma-3-1B": Shape(
        1152, 26, 4, 1, 6912, 262144, tied=True, family="gemma3", head_dim=256, window=512
    ),
    "OLMo-2-1B": Shape(2048, 16, 16, 16, 8192, 100352, tied=False, family="olmo2"),
    "StableLM-2-1.6B": Shape(2048, 24, 32, 32, 5632, 100352, tied=False, family="stablelm"),
}
SHAPES["1B"] = SHAPES["Llama-3.2-1B"]
# Where half-precision scales lie in a block, and a size that keeps weights small.
SCALES: dict[str, list[tuple[int, float]]] = {
    "Q4_0": [(0, 0.2)],
    "Q4_1": [(0, 0.2), (2, -1.5)],
    "Q8_0": [(0, 0.014)],
    "Q4_K": [(0, 0.006), (2, 0.04)],
    "Q6_K": [(208, 0.0006)],
}


def _more_bits(layer: int, layers: int) -> bool:
    """The layers whose values and outputs of MLPs Q4_K_M stores with six bits."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors_of(shape: Shape, quantisation: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of every tensor."""
    mixed = quantisation == "Q4_K_M"
    usual = "Q4_K" if mixed else quantisation
    hidden, q, kv = shape.hidden, shape.dim * shape.heads, shape.dim * shape.kv_heads
    yield "token_embd.weight", (shape.vocab, hidden), "Q6_K" if mixed and shape.tied else usual
    for layer in range(shape.layers):
        fine = "Q6_K" if mixed and _more_bits(layer, shape.layers) else usual
        for name, size, kind in (
            ("attn_q", (q, hidden), usual),
            ("attn_k", (kv, hidden), usual),
            ("attn_v", (kv, hidden), fine),
            ("attn_output", (hidden, q), usual),
            ("ffn_gate", (shape.inner, hidden), usual),
            ("ffn_up", (shape.inner, hidden), usual),
            ("ffn_down", (hidden, shape.inner), fine),
        ):
            yield f"blk.{layer}.{name}.weight", size, kind
        for name, width in _vectors(shape).items():
            yield f"blk.{layer}.{name}", (width,), "F32"
    yield "output_norm.weight", (hidden,), "F32"
    if shape.family == "stablelm":
        yield "output_norm.bias", (hidden,), "F32"
    if not shape.tied:
        yield "output.weight", (shape.vocab, hidden), "Q6_K" if mixed else usual


def _vectors(shape: Shape) -> dict[str, int]:
    """Norms and biases of a layer."""
    hidden, dim, family = shape.hidden, shape.dim, shape.family
    q, kv = dim * shape.heads, dim * shape.kv_heads
    before = dict.fromkeys(("attn_norm.weight", "ffn_norm.weight"), hidden)
    after = dict.fromkeys(("post_attention_norm.weight", "post_ffw_norm.weight"), hidden)
    heads = dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), dim)
    biases = {"attn_q.bias": q, "attn_k.bias": kv, "attn_v.bias": kv}
    found = {
        "qwen2": before | biases,
        "qwen3": before | heads,
        "gemma3": before | heads | after,
        "olmo2": after | {"attn_q_norm.weight": q, "attn_k_norm.weight": kv},
        "stablelm": before | biases | dict.fromkeys(("attn_norm.bias", "ffn_norm.bias"), hidden),
    }
    return found.get(family, before)


def random_tensor(size: tuple[int, ...], kind: str, seed: int) -> npt.NDArray[Any]:
    """Blocks whose scales make weights of about 1 / sqrt(width)."""
    if kind == "F32":
        return np.ones(size, np.float32)
    values, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
    count = size[0] * size[1] // values
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 256, (min(count, 1 << 16), width), np.uint8)
    for at, spread in SCALES[kind]:
        scales = rng.uniform(0.5, 1, len(some)) * spread * size[1] ** -0.5
        some[:, at : at + 2] = scales.astype("<f2").view(np.uint8).reshape(-1, 2)
    return np.resize(some, (size[0], size[1] // values * width))


def write(path: Path, shape: Shape, quantisation: str, tokenizer: Path) -> Path:
    """A file of this shape with the tokenizer of another file, padded."""
    if path.exists():
        return path
    writer = gguf.GGUFWriter(str(path.with_suffix(".new")), shape.family)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    if shape.family == "stablelm":
        writer.add_layer_norm_eps(1e-5)
        writer.add_rope_dimension_count(shape.dim // 4)
        writer.add_parallel_residual(False)
    else:
        writer.add_rope_dimension_count(shape.dim)
    writer.add_key_length(shape.dim)
    writer.add_value_length(shape.dim)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, tokenizer, shape.vocab)
    found = list(tensors_of(shape, quantisation))
    for name, size, kind in found:
        values, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
        num_bytes = int(np.prod(size)) // values * width
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        stored = size if kind == "F32" else (*size[:-1], size[-1] // values * width)
        writer.add_tensor_info(name, stored, dtype, num_bytes, Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for seed, (_, size, kind) in enumerate(found):
        writer.write_tensor_data(random_tensor(size, kind, seed))
    writer.close()
    path.with_suffix(".new").rename(path)
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab: int) -> None:
    from outrider.model.gguf.container import read_container

    known = read_container(source).metadata
    tokens = list(known["tokenizer.ggml.tokens"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(str(known["tokenizer.ggml.pre"]))
    writer.add_token_list(tokens + [f"<pad{i}>" for i in range(len(tokens), vocab)])
    kinds = [int(kind) for kind in known["tokenizer.ggml.token_type"]]
    writer.add_token_types(kinds + [5] * (vocab - len(tokens)))
    writer.add_token_merges(list(known["tokenizer.ggml.merges"]))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
