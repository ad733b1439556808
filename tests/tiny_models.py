"""Tiny random models of any family, and transformers' own forward to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write(folder: Path, config: Any, *, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Random weights for `config`, wide enough that biases, norms and windows all matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "embed" not in name and "wte" not in name:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def reference(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers runs it, in eager attention: the plainest there is."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[n, V] float32 of one plain pass without a cache."""
    result: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return result


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Node indices from the root of the tree down to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a.detach() - b.detach()).abs().max())
