"""What a model's mask asks for is compared with what our attention lets tokens see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from outrider.errors import ModelError
from outrider.model.transformers_model import TransformersModel
from tiny_models import SMALL, write


def test_a_mask_that_is_not_causal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hides a key from a far query, which no short check would notice."""
    folder = write(tmp_path, transformers.LlamaConfig(**SMALL))
    TransformersModel.load(folder)
    made = modeling_llama.create_causal_mask

    def hide(batch: int, head: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ~((query > 500) & (key == 3))

    monkeypatch.setattr(
        modeling_llama,
        "create_causal_mask",
        lambda **given: made(**given, and_mask_function=hide),
    )
    with pytest.raises(ModelError, match="a mask that is not causal"):
        TransformersModel.load(folder)
