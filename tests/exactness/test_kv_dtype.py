"""Keys and values in int8: another target, and the same tokens with drafts as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from exactness.same_tokens import assert_same, run
from family_models import FAMILY_CONFIGS
from native_models import random_tokens
from outrider import native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from tiny_models import write

Backend = Literal["native", "torch"]
BACKENDS: list[Backend] = ["torch", "native"] if native.available() else ["torch"]
PROMPTS = [random_tokens(19, 64, seed) * seed for seed in (1, 2, 3)]
PARAMS = (
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=48, ignore_eos=True),
)
DRAFTS: dict[str, tuple[int, dict[str, Any]]] = {
    "suffix": (4, {}),
    "draft-model": (3, {}),
    "draft-tree": (8, {}),
    "early-exit": (3, {}),
    "lookahead": (6, {"kv_tokens": 320}),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_change_no_token(backend: Backend, tmp_path: Path) -> None:
    target, draft = (
        write_tiny_llama(tmp_path / name, num_layers=n, max_positions=128)
        for name, n in (("target", 3), ("draft", 1))
    )

    def engine(proposer: str, k: int, **options: Any) -> Engine:
        return build(
            EngineConfig(
                model=str(target),
                draft_model=str(draft),
                proposer=proposer,
                num_draft_tokens=k,
                backend=backend,
                block_size=8,
                kv_dtype="int8",
                **options,
            )
        )

    plain = engine("ngram", 0)
    for params in PARAMS:
        expected = run(plain, PROMPTS, params)
        for proposer, (k, options) in DRAFTS.items():
            drafting = engine(proposer, k, **options)
            for _ in range(2):  # the second time from cached prefixes
                results = run(drafting, PROMPTS, params)
                assert_same(
                    drafting, results, expected, params, proposer, bitwise=backend == "native"
                )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("family", "most"),
    # In latent attention, parts of a key of different sizes share a scale.
    [("gemma2", 0.02), ("gpt_oss", 0.02), ("deepseek_v2 lite", 0.05), ("granite4", 0.05)],
)
def test_rounding_is_small_and_memory_a_quarter(
    family: str, most: float, backend: Backend, tmp_path: Path
) -> None:
    folder = write(tmp_path / family.replace(" ", "-"), FAMILY_CONFIGS[family])
    tokens = random_tokens(60, 64, 1)
    exact, ours = (load_model(folder, backend=backend, kv_dtype=kind) for kind in ("auto", "int8"))
    expected, got = (Driver(m, seed=2).forward({"a": tokens}).logits["a"] for m in (exact, ours))
    error = (got - expected).pow(2).mean().sqrt() / expected.std()
    assert 0 < error < most
    assert ours.spec.kv_bytes_per_token < 0.65 * exact.spec.kv_bytes_per_token  # narrow heads


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_is_not_hidden(backend: Backend, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "target", num_layers=2, max_positions=128)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][3] = torch.inf
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder, backend=backend, kv_dtype="int8")
    logits = Driver(model).forward({"a": [1, 3, 1]}).logits["a"]
    assert torch.isnan(logits[1:]).all(dim=1).all()


def test_other_backends_refuse(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "target", num_layers=1, max_positions=128)
    with pytest.raises(ConfigError, match="choose kv_dtype 'auto'"):
        load_model(folder, backend="transformers", kv_dtype="int8")
