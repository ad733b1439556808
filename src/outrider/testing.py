"""Tiny models for tests: real Hugging Face folders with random weights, written in milliseconds.

    folder = write_tiny_llama(tmp_path / "target")
    model = load_model(folder)

The weights make the next-token distribution far from uniform. A drafter that sometimes agrees with
its target is the same call with `num_layers=1` and the same seed.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.model.heads import (
    DFlashConfig,
    DFlashHead,
    Eagle3Config,
    Eagle3Head,
    Head,
    MedusaConfig,
    MedusaHeads,
)

__all__ = ["write_tiny_head", "write_tiny_llama", "write_tiny_tokenizer"]


def write_tiny_tokenizer(folder: Path, *, num_tokens: int = 64, eos: str = "<end>") -> Path:
    """Writes a byte-level tokenizer whose id 0 is `eos`; every id decodes to something.

    Characters ASCII 32..126 and newline come first, so 97 ids are enough for any plain English
    text; with fewer, encoding drops the characters without an id. With at least 257 ids every
    string can be encoded.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    of_byte = {byte: char for char, byte in _byte_of(alphabet).items()}
    printable = [10, *range(32, 127)]
    order = sorted(printable, key=_by_frequency) + [b for b in range(256) if b not in printable]
    pieces = [of_byte[byte] for byte in order]
    pieces += [a + b for a in pieces[:96] for b in pieces[:96]]  # pairs, never merged into
    vocab = {eos: 0} | {piece: i + 1 for i, piece in enumerate(pieces[: num_tokens - 1])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"eos_token": eos, "bos_token": eos})
    return folder


def write_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 64,
    num_tokens: int | None = None,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    intermediate_size: int = 48,
    max_positions: int = 512,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sharpness: float = 3.0,
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Writes a Llama with random weights and, unless `tokenizer` is False, a tokenizer.

    Returns `folder`. The noise of a tensor depends only on its name and `seed`: two models of one
    seed and width share their first layers. `num_tokens` below `vocab_size` makes a padded
    vocabulary. `sharpness` scales the final norm: larger values make distributions more peaked.
    Further keywords go to config.json as they are.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": str(dtype).removeprefix("torch."),
    }
    tensors = {name: _random(name, shape, seed) for name, shape in _llama_shapes(written).items()}
    tensors["model.norm.weight"] *= sharpness
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(folder / "config.json", written | config)
    if tokenizer:
        write_tiny_tokenizer(folder, num_tokens=num_tokens or vocab_size)
    return folder


def _llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama with this config.json, by name."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    embedding = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (heads, hidden),
            f"{at}self_attn.k_proj.weight": (kv_heads, hidden),
            f"{at}self_attn.v_proj.weight": (kv_heads, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, heads),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def write_tiny_head(
    folder: Path,
    kind: str,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    taps: tuple[int, ...] = (1, 2),
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes random "medusa", "eagle3" or "dflash" heads for a tiny Llama. Returns `folder`.

    Further keywords go to the head's config. EAGLE-3 knows the even ids only.
    """
    attention: dict[str, Any] = {
        "taps": taps,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    common: dict[str, Any] = {"hidden_size": hidden_size, "vocab_size": vocab_size}
    head: Head
    if kind == "medusa":
        head = MedusaHeads(MedusaConfig(**common | config))
    elif kind == "eagle3":
        eagle = common | attention | {"draft_vocab_size": vocab_size // 2} | config
        head = Eagle3Head(Eagle3Config(**eagle))
    elif kind == "dflash":
        block = {"mask_token_id": 1, "num_hidden_layers": 2, "markov_rank": 4, "confidence": True}
        head = DFlashHead(DFlashConfig(**common | attention | block | config))
    else:
        raise ValueError(f"no heads of kind {kind!r}")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if kind == "eagle3":
                name = name.replace("layers.0.", "midlayer.")
            if parameter.ndim > 1:
                parameter.copy_(_random(name, tuple(parameter.shape), seed))
    if isinstance(head, Eagle3Head):
        head.set_target_ids(torch.arange(head.config.draft_vocab_size) * 2)
    head.save(folder, dtype=torch.float32)
    return folder


def _random(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape)
    key = zlib.crc32(f"{seed} {name}".encode())
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(key))
    return noise.mul_(shape[-1] ** -0.5)


def _byte_of(alphabet: list[str]) -> dict[str, int]:
    """The byte-level convention: printable bytes stand for themselves, the rest from 256 up."""
    itself = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in itself}
    others = [byte for byte in range(256) if byte not in set(itself)]
    table |= {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(alphabet)
    return table


def _by_frequency(byte: int) -> int:
    """Lower-case letters and the space first, so that tiny vocabularies can still spell."""
    common = b" etaoinshrdlucmfwygpbvkqxjz\n.,"
    return common.index(byte) if byte in common else 256 + byte


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
