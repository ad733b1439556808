"""Ropes past the length that a model was first trained for, beside transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from family_models import FAMILY_CONFIGS
from outrider.engine.build import EngineConfig, build
from outrider.errors import ConfigError
from outrider.model import load_model
from outrider.model.driver import Driver
from outrider.model.load import Backend
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_tokenizer
from tiny_models import CONFIGS, SMALL, logits, reference, worst, write

LONGROPE = FAMILY_CONFIGS["phi3 longrope"]  # 64 positions with the short factors, 256 with the long
BACKENDS: tuple[Backend, ...] = ("torch", "auto", "transformers")
TEXT = [(7 * i + i * i) % SMALL["vocab_size"] for i in range(150)]


def in_pieces(folder: Path, backend: Backend, tokens: list[int], length: int) -> torch.Tensor:
    model = load_model(folder, backend=backend, max_length=length)
    assert model.spec.max_positions == length
    driver = Driver(model, num_blocks=20, block_size=16)
    got = []
    for piece in (tokens[:31], tokens[31:32], tokens[32:100], tokens[100:]):
        got.append(driver.forward({"a": piece}).logits["a"])
        driver.keep("a", range(len(piece)))
    return torch.cat(got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_longrope_past_its_original_length(backend: Backend, tmp_path: Path) -> None:
    folder = write(tmp_path, LONGROPE)
    got = in_pieces(folder, backend, TEXT, 256)
    # transformers takes the long factors for all positions of a text that is read at once.
    assert worst(got, logits(reference(folder), TEXT)) < 1e-4
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config["rope_scaling"]
    rope["short_factor"] = rope["long_factor"]
    (folder / "config.json").write_text(json.dumps(config))
    assert worst(got[:40], logits(reference(folder), TEXT[:40])) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_longrope_within_its_original_length(backend: Backend, tmp_path: Path) -> None:
    folder = write(tmp_path, LONGROPE)
    model = load_model(folder, backend=backend, max_length=64)
    assert model.spec.max_positions == 64
    got = Driver(model).forward({"a": TEXT[:60]}).logits["a"]
    assert worst(got, logits(reference(folder), TEXT[:60])) < 1e-4


def test_an_engine_takes_the_long_factors_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, LONGROPE)
    write_tiny_tokenizer(tmp_path / "tokenizer")
    shutil.copy(tmp_path / "tokenizer" / "tokenizer.json", tmp_path)
    engine = build(EngineConfig(model=str(tmp_path), proposer="ngram", max_model_len=200))
    assert "factors of long texts for all texts, because max_model_len is above 64" in caplog.text
    request = engine.add(TEXT, SamplingParams(max_tokens=20, ignore_eos=True))
    events = [event for report in engine.run([request]) for event in report.events]
    assert sum(len(event.tokens) for event in events) == 20
    with pytest.raises(ConfigError, match="at most 256"):
        build(EngineConfig(model=str(tmp_path), proposer="ngram", max_model_len=257))


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize(
    "name", ["llama yarn", "llama yarn mscale", "llama llama3", "llama linear"]
)
def test_other_ropes_past_their_original_length(
    name: str, backend: Backend, tmp_path: Path
) -> None:
    config = CONFIGS[name]
    folder = write(tmp_path, config)
    length = config.max_position_embeddings
    original = config.rope_parameters.get("original_max_position_embeddings", length // 2)
    tokens = TEXT[:length]
    assert len(tokens) > original
    got = in_pieces(folder, backend, tokens, length)
    assert worst(got, logits(reference(folder), tokens)) < 1e-4
