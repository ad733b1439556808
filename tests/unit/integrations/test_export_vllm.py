"""`outrider export vllm`: folders that vLLM loads, and the command that serves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from outrider.cli.app import app
from outrider.cli.border import run
from outrider.integrations.vllm.mapping import Wish, speculative_config


@pytest.mark.parametrize("name", ["draft", "medusa", "eagle3", "dflash"])
def test_the_bundled_drafters_export(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert run(app, ["export", "vllm", f"bundled:{name}", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    config = record["speculative_config"]
    assert config["model"] == str(out)
    # What the export says and what `serve --backend vllm` would build are the same drafter.
    built = speculative_config(Wish(draft_model=str(out)))
    assert built == config
    assert json.dumps(built) in record["command"]
    tensors = load_file(out / "model.safetensors")
    assert not [tensor for tensor in tensors if tensor.startswith(("markov", "confidence"))]
    if name == "medusa":
        assert tensors["lm_heads.0.weight"].shape == (8192, 512)
    if name == "draft":
        assert (out / "tokenizer.json").exists()


def test_the_command_is_printed_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["export", "vllm", "bundled:eagle3", str(tmp_path / "e")]) == 0
    text = capsys.readouterr().out
    assert '"method": "eagle3"' in text
    assert "vllm serve" in text
    assert "--speculative-config" in text


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert run(app, ["export", "vllm", "bundled:eagle3", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_draft_of_another_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from outrider.testing import write_tiny_llama

    other = write_tiny_llama(tmp_path / "other", vocab_size=64)
    assert run(app, ["export", "vllm", str(other), str(tmp_path / "out")]) == 2
    assert "one size" in capsys.readouterr().err
