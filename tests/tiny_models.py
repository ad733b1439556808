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


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


# Every family of the compact decoders, with every switch on and off.
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama tied": transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama biased": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama one key head": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 1}),
    "llama all key heads": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "llama wide heads": transformers.LlamaConfig(**SMALL, head_dim=16),
    "llama theta": transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
    ),
    "llama linear": transformers.LlamaConfig(**SMALL, **_rope(rope_type="linear", factor=2.0)),
    "llama dynamic": transformers.LlamaConfig(**SMALL, **_rope(rope_type="dynamic", factor=2.0)),
    "llama llama3": transformers.LlamaConfig(
        **SMALL,
        **_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama yarn": transformers.LlamaConfig(
        **SMALL, **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    ),
    "llama yarn mscale": transformers.LlamaConfig(
        **SMALL,
        **_rope(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral window": transformers.MistralConfig(**SMALL, sliding_window=7),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2 window": transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=16),
    "qwen3 biased": transformers.Qwen3Config(**SMALL, head_dim=8, attention_bias=True),
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
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.randn_like(buffer) * 0.3)
            if "layer_scalar" in name:
                buffer.add_(torch.randn_like(buffer) * 0.3)
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
