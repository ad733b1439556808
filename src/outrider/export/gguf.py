"""EAGLE-3 heads as a GGUF file, as llama.cpp's converter writes them and llama.cpp loads them.

The form is that of the paper: one layer, three taps, no biases. `outrider.model.dialects.gguf`
reads it back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.dialects.folder import Tensors
from outrider.model.dialects.gguf import ARCHITECTURE, STORED
from outrider.model.eagle_head import Eagle3Head
from outrider.model.gguf.files import is_gguf
from outrider.model.head_base import Head
from outrider.model.heads import load_head
from outrider.model.weights import read_config

if TYPE_CHECKING:
    from gguf import GGUFWriter

_TOKENIZER = "tokenizer."


def export_gguf(drafter: Path, target: Path, out: Path) -> Head:
    """Writes the EAGLE-3 head in `drafter` to the file `out` and returns the head.

    A target that is a GGUF file gives the tokenizer, which llama.cpp compares with the target's.
    Raises ConfigError for a head that llama.cpp has no form for.
    """
    if out.exists():
        raise ConfigError(f"{out} exists: give a new file")
    head = load_head(drafter, num_layers=int(read_config(target)["num_hidden_layers"]))
    reason = _obstacle(head)
    if reason or not isinstance(head, Eagle3Head):
        raise ConfigError(f"{drafter} {reason}, for which llama.cpp's eagle3 files have no form")
    from gguf import GGUFWriter

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial")
    writer = GGUFWriter(str(partial), ARCHITECTURE)
    _add_shape(writer, head)
    _add_tokenizer(writer, target, head.vocab_size)
    dtype = Tensors(drafter).dtype
    for name, tensor in _tensors(head):
        _add_tensor(writer, name, tensor, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, out)
    return head


def _obstacle(head: Head) -> str:
    """What llama.cpp's graph of an EAGLE-3 head does not compute; "": nothing."""
    if not isinstance(head, Eagle3Head) or head.kind != "eagle3":
        return f"holds {head.kind} heads"
    config = head.config
    found = {
        f"has {config.num_hidden_layers} layers": config.num_hidden_layers > 1,
        f"reads {len(config.taps)} taps": len(config.taps) != 3,
        "reads the last state": config.reads_last_state,
        "has norms of queries and keys": config.qk_norm,
        "has biases": config.attention_bias or config.output_bias or config.fc_bias,
        "has a norm for each tap": config.num_fc_norms > 0,
        "feeds back what its norm gives": config.norm_output,
        "has sliding windows": any(config.windows),
        "scales its logits": config.logit_scale != 1.0,
        "scales its rope's waves": config.rope.attention_factor != 1.0,
    }
    return next((reason for reason, is_so in found.items() if is_so), "")


def _add_shape(writer: GGUFWriter, head: Eagle3Head) -> None:
    config, rope = head.config, head.config.rope
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(config.taps))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", head.target_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", config.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", config.input_norm)


def _add_tokenizer(writer: GGUFWriter, target: Path, vocab_size: int) -> None:
    """The target's, where it is a GGUF file; else none, and the draft's ids are the target's."""
    if not is_gguf(target):
        writer.add_tokenizer_model("none")
        return
    from outrider.model.gguf.container import open_gguf

    known = open_gguf(target).metadata
    if len(known["tokenizer.ggml.tokens"]) != vocab_size:
        raise ConfigError(f"{target} has another vocabulary than the head's {vocab_size} ids")
    for key, value in known.items():
        if key.startswith(_TOKENIZER):
            _add_value(writer, key, value)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif len(value):
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))


def _tensors(head: Eagle3Head) -> Iterator[tuple[str, Tensor]]:
    config = head.config
    for name, tensor in head.state_dict().items():
        if name == "d2t":
            if config.draft_vocab_size != config.vocab_size:
                yield "d2t", head.target_ids
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _in_pairs(tensor, config.head_dim)
        yield STORED[name], tensor
    plain = config.rope.theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    factors = plain / config.rope.frequencies(config.head_dim)
    if config.rope.kind != "default":
        yield "rope_freqs.weight", factors


def _in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """The two numbers of a rotating pair beside each other, which are half a head apart here."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[-1])
    return halves.transpose(1, 2).reshape(rows.shape)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Vectors are stored in float32, matrices as precisely as they were."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if not tensor.is_floating_point():
        writer.add_tensor(name, tensor.numpy().astype(np.int64))
    elif tensor.dim() == 2 and dtype == torch.bfloat16:
        kind = GGMLQuantizationType.BF16
        writer.add_tensor(name, quantize(tensor.float().contiguous().numpy(), kind), raw_dtype=kind)
    elif tensor.dim() == 2 and dtype == torch.float16:
        writer.add_tensor(name, tensor.half().contiguous().numpy())
    else:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
