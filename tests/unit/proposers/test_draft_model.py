"""The draft model's weights: int8 if native kernels run it, else the engine's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from outrider import LLM
from outrider.errors import ModelError
from outrider.model.transformers_model import TransformersModel
from outrider.testing import write_tiny_llama, write_tiny_tokenizer
from tiny_models import write


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """A target for native kernels and a drafter for transformers only."""
    target = write_tiny_llama(tmp_path / "target")
    config = transformers.PersimmonConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    drafter = write_tiny_tokenizer(write(tmp_path / "drafter", config))
    return str(target), str(drafter)


def test_a_drafter_without_native_kernels_loads(folders: tuple[str, str]) -> None:
    target, drafter = folders
    plain = LLM(target, proposer=None).generate("the", max_tokens=12)
    llm = LLM(target, draft_model=drafter, proposer="draft-model", num_draft_tokens=2)
    assert llm.generate("the", max_tokens=12).tokens == plain.tokens
    model = getattr(llm.engine.proposers["draft-model"], "model", None)
    assert isinstance(model, TransformersModel)


def test_a_dtype_of_the_users_own_is_not_replaced(folders: tuple[str, str]) -> None:
    target, drafter = folders
    with pytest.raises(ModelError, match="int8"):
        LLM(
            target,
            draft_model=drafter,
            proposer="draft-model",
            proposer_options={"draft-model": {"dtype": "int8"}},
        )
