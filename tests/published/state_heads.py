"""Heads on the target's last state: Medusa and MLP speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from published.cases import (
    H,
    Json,
    Reference,
    Tensors,
    V,
    W,
    case,
    prefixed,
    rand,
    write,
)
from published.references import Medusa, Mlp


def _medusa(num_layers: int, *, heads: bool = True, bias: bool = True, rows: int = V) -> Tensors:
    found = {}
    for h in range(4):
        for i in range(num_layers):
            found[f"{h}.{i}.linear.weight"] = rand(f"{h}.{i}", H, H)
            if bias:
                found[f"{h}.{i}.linear.bias"] = 0.3 * rand(f"{h}.{i}.bias", H)
        if heads:
            found[f"{h}.{num_layers}.weight"] = rand(f"{h} head", rows, H)
    return found


def _vllm_names(tensors: Tensors, num_layers: int) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        head, index, rest = name.split(".", 2)
        if int(index) == num_layers:
            found[f"lm_heads.{head}.weight"] = tensor
        else:
            found[f"blocks.{head}.layers.{index}.{rest.removeprefix('linear.')}"] = tensor
    return found


AUTHORS = {"base_model_name_or_path": "owner/base", "medusa_num_heads": 2, "medusa_num_layers": 1,
           "transformers_version": "4.31.0"}  # fmt: skip


@case("medusa")
def medusa_authors(folder: Path) -> Reference:
    write(folder, AUTHORS, _medusa(1), file="medusa_lm_head.pt")
    return Medusa(_medusa(1))


@case("medusa")
def medusa_safetensors(folder: Path) -> Reference:
    write(folder, AUTHORS, _medusa(2), file="medusa_lm_head.safetensors")
    return Medusa(_medusa(2), 2)


@case("medusa")
def medusa_legacy_trainer(folder: Path) -> Reference:
    w = _medusa(1, heads=False)
    write(folder, AUTHORS | {"version": "2"}, w, file="medusa_lm_head.pt")
    return Medusa(w)


def _vllm_medusa(**more: Any) -> Json:
    return {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": H,
            "vocab_size": V, "num_heads": 4, "num_hidden_layers": 1, "truncated_vocab_size": V,
            "max_paths": 64, "topk": 10} | more  # fmt: skip


@case("medusa")
def medusa_vllm(folder: Path) -> Reference:
    w = _medusa(1, bias=False)
    write(folder, _vllm_medusa(), _vllm_names(w, 1))
    return Medusa(w)


@case("medusa")
def medusa_vllm_bias_and_prefix(folder: Path) -> Reference:
    w = _medusa(2)
    config = _vllm_medusa(medusa_fc_bias=True, num_hidden_layers=2, logit_scale=2.0)
    write(folder, config, prefixed("medusa_heads.", _vllm_names(w, 2)))
    return Medusa(w, 2, scale=2.0)


@case("medusa")
def medusa_vllm_one_output_head(folder: Path) -> Reference:
    w = _medusa(1, bias=False)
    stored = _vllm_names(w, 1)
    for h in range(1, 4):
        del stored[f"lm_heads.{h}.weight"]
    write(folder, _vllm_medusa(original_lm_head=True), stored)
    return Medusa(w | {f"{h}.1.weight": w["0.1.weight"] for h in range(4)})


@case("medusa")
def medusa_vllm_token_map(folder: Path) -> Reference:
    w = _medusa(1, bias=False)
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(2))[:W]
    write(folder, _vllm_medusa(truncated_vocab_size=W), _vllm_names(w, 1) | {"token_map": ids})
    return Medusa({n: t[ids] if n.endswith("1.weight") else t for n, t in w.items()}, ids=ids)


def _mlp(inner: int, steps: int, *, tied: bool = False) -> Tensors:
    found: Tensors = {}
    for i in range(1 if tied else steps):
        found |= {f"emb.{i}.weight": rand(f"emb{i}", V, inner) * 4,
                  f"ln.{i}.weight": rand(f"ln{i}", inner),
                  f"ln.{i}.bias": 0.3 * rand(f"lnb{i}", inner),
                  f"head.{i}.weight": rand(f"head{i}", V, inner)}  # fmt: skip
    for i in range(2 if tied else steps):
        found[f"proj.{i}.weight"] = rand(f"proj{i}", inner, inner if i else H)
    return found


def _mlp_config(**more: Any) -> Json:
    return {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
            "emb_dim": H, "inner_dim": 20, "n_predict": 4, "vocab_size": V, "n_candidates": 5,
            "top_k_tokens_per_head": [5, 4, 3, 1], "torch_dtype": "float32"} | more  # fmt: skip


@case("mlp")
def mlp_ibm(folder: Path) -> Reference:
    w = _mlp(20, 4)
    write(folder, _mlp_config(), prefixed("speculator.", w))
    return Mlp(w, 20, 4)


@case("mlp")
def mlp_scaled_and_tied(folder: Path) -> Reference:
    w = _mlp(H, 4, tied=True)
    config = _mlp_config(inner_dim=0, tie_weights=True, scale_input=True)
    write(folder, config, prefixed("speculator.", w))
    return Mlp(w, H, 4, tied=True, scaled=True)
