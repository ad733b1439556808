"""Medusa as its authors write it (a pickle or safetensors without sizes) and as vLLM does."""

from __future__ import annotations

import re

import torch

from outrider.errors import ModelError
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.medusa_head import MedusaConfig, MedusaHeads


def read_medusa(fields: Fields, tensors: Tensors) -> MedusaHeads:
    tensors.rename("medusa_heads.", "")
    tensors.rename("medusa_head.", "")
    if any(re.fullmatch(r"\d+\.\d+\.(linear\.)?weight", name) for name in tensors):
        return _read_authors(fields, tensors)
    return _read_vllm(fields, tensors)


def _read_authors(fields: Fields, tensors: Tensors) -> MedusaHeads:
    """Tensors 0.0.linear.weight, ..., 0.L.weight; config.json is known to miscount the heads."""
    fields.ignore("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
    blocks = {tuple(map(int, found.groups())) for name in tensors
              if (found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))}  # fmt: skip
    num_heads = 1 + max(head for head, _ in blocks)
    num_layers = 1 + max(layer for _, layer in blocks)
    own = f"0.{num_layers}.weight" in tensors
    size = tensors.shape("0.0.linear.weight")[0]
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors.rename(f"{head}.{layer}.linear.", f"blocks.{head}.layers.{layer}.")
        if own:
            tensors.rename(f"{head}.{num_layers}.", f"lm_heads.{head}.")
    return MedusaHeads(
        MedusaConfig(
            hidden_size=size,
            # The heads share the target's output head where they store none: any vocabulary fits.
            vocab_size=tensors.shape("lm_heads.0.weight")[0] if own else 0,
            num_heads=num_heads,
            num_hidden_layers=num_layers,
            original_lm_head=not own,
            bias="blocks.0.layers.0.bias" in tensors,
        )
    )


def _read_vllm(fields: Fields, tensors: Tensors) -> MedusaHeads:
    vocab_size = fields.number("vocab_size")
    num_heads, num_layers = fields.number("num_heads"), fields.number("num_hidden_layers", 1)
    shared = fields.switch("original_lm_head")
    size = fields.number("truncated_vocab_size", vocab_size)
    bias = fields.switch("medusa_fc_bias")
    if bias != ("blocks.0.layers.0.bias" in tensors):
        raise ModelError(
            f"{fields.folder}: medusa_fc_bias is {bias}, but the tensors "
            f"{'lack' if bias else 'have'} biases"
        )
    fields.ignore("max_paths", "topk", "max_seq_len", "medusa_choices", "lm_head_bias")
    scale = float(fields.get("logit_scale", 1.0))
    one = shared and "lm_heads.0.weight" in tensors
    if shared and not one:  # our own older files: the target's
        tensors.drop("token_map")
        size = vocab_size
    elif size == vocab_size:
        tensors.drop("token_map")
    else:
        _cut(tensors, 1 if one else num_heads, size, vocab_size)
    return MedusaHeads(
        MedusaConfig(
            hidden_size=fields.number("hidden_size"),
            vocab_size=vocab_size,
            num_heads=num_heads,
            num_hidden_layers=num_layers,
            original_lm_head=shared and not one,
            one_lm_head=one,
            bias=bias,
            draft_vocab_size=size,
            logit_scale=scale,
        )
    )


def _cut(tensors: Tensors, num_lm_heads: int, size: int, vocab_size: int) -> None:
    """Output heads of few ids: `token_map` has the ids. The heads may be stored whole."""
    ids = tensors.get("token_map").to(torch.int64)
    if ids.shape != (size,) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelError(f"{tensors.folder}: token_map does not give {size} ids of {vocab_size}")
    if len(set(ids.tolist())) != size:
        raise ModelError(f"{tensors.folder}: token_map names a target id twice")
    for head in range(num_lm_heads):
        weight = tensors.get(f"lm_heads.{head}.weight")
        if len(weight) == vocab_size:
            tensors.replace(f"lm_heads.{head}.weight", weight[ids])
