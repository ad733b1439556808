"""Contexts of several ranges of positions: the native attention beside torch's.

`tests/native_bits` compares their bits between rows, threads and trees.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from family_models import FAMILY_CONFIGS
from native_models import needs_native, random_tokens
from outrider.model import load_model
from outrider.model.driver import Driver
from tiny_models import CONFIGS, worst, write

pytestmark = needs_native
LENGTH = 1100  # a range is 1024


def longer(name: str) -> Any:
    """A tiny model with room for the text, and with windows that begin inside a range."""
    config = copy.deepcopy((CONFIGS | FAMILY_CONFIGS)[name])
    config.max_position_embeddings = LENGTH
    for window in ("sliding_window", "attention_chunk_size"):
        if getattr(config, window, None):
            setattr(config, window, 700)
    return config


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral window", "gpt_oss", "gemma2", "bloom", "deepseek_v3", "llama4"]
)
def test_agrees_with_torch_past_the_first_range(name: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path, longer(name))
    tokens = random_tokens(LENGTH, 64)
    found = []
    for backend in ("torch", "native"):
        model = load_model(folder, backend=backend, kv_dtype=kv_dtype)
        driver = Driver(model, num_blocks=LENGTH // 16 + 1, block_size=16, seed=1)
        found.append(driver.forward({"a": tokens}).logits["a"])
    # A last bit of a key can decide how it is rounded.
    assert worst(*found) < (1e-4 if kv_dtype == "auto" else 0.02)
