"""A context that ends before the configured length says why; the doctor prices experts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers

from family_models import FAMILY_CONFIGS
from outrider.doctor.checks import examine
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.errors import RequestError
from outrider.testing import write_tiny_tokenizer
from tiny_models import SMALL, write


def engine_of(config: transformers.PretrainedConfig, folder: Path, backend: str) -> Engine:
    write(folder, config)
    write_tiny_tokenizer(folder / "tokenizer")
    shutil.copy(folder / "tokenizer" / "tokenizer.json", folder)
    return build(
        EngineConfig(model=str(folder), proposer="ngram", backend=backend)  # type: ignore[arg-type]
    )


LONGROPE = FAMILY_CONFIGS["phi3 longrope"]
MASKED = transformers.PhimoeConfig(**SMALL, num_local_experts=3, sliding_window=30)


@pytest.mark.parametrize(
    ("config", "backend", "limit", "why"),
    [
        (LONGROPE, "torch", 64, "longrope"),
        (LONGROPE, "auto", 64, "longrope"),
        (LONGROPE, "transformers", 64, "longrope"),
        (MASKED, "transformers", 30, "in its mask only"),
    ],
)
def test_a_prompt_past_a_shortened_context_says_why(
    config: transformers.PretrainedConfig, backend: str, limit: int, why: str, tmp_path: Path
) -> None:
    engine = engine_of(config, tmp_path, backend)
    assert engine.target.spec.max_positions == limit
    with pytest.raises(RequestError, match=f"context length is {limit} tokens .*{why}"):
        engine.check_prompt([1] * limit)
    [found] = [f for f in examine(engine, None, device="cpu", dtype="auto") if f.what == "context"]
    assert why in found.text


def test_a_whole_context_has_no_reason(tmp_path: Path) -> None:
    engine = engine_of(transformers.LlamaConfig(**SMALL), tmp_path, "torch")
    with pytest.raises(RequestError, match="context length is 128 tokens, and"):
        engine.check_prompt([1] * 128)


@pytest.mark.parametrize(("count", "advice"), [(2, "little more"), (64, "short drafts")])
def test_the_doctor_says_beforehand_what_experts_cost(
    count: int, advice: str, tmp_path: Path
) -> None:
    config = transformers.MixtralConfig(**SMALL, num_local_experts=count, num_experts_per_tok=2)
    engine = engine_of(config, tmp_path, "torch")
    [found] = [f for f in examine(engine, None, device="cpu", dtype="auto") if f.what == "experts"]
    assert found.text.startswith(f"2 of {count} for each token")
    assert advice in found.text
