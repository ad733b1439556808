"""`outrider export vllm`: folders that vLLM loads, and the command that serves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.export.vllm import export_vllm
from outrider.integrations.vllm.mapping import Wish, speculative_config
from outrider.llm import LLM
from outrider.model.bundled import bundled_path
from published import CASES


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


def drafts(folder: str) -> list[list[int]]:
    llm = LLM("bundled", draft_model=folder, num_draft_tokens=3)
    events = llm.stream("def add(a, b):", max_tokens=24)
    return [event.draft_tokens for event in events]


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_what_was_exported_drafts_the_same_here(name: str, tmp_path: Path) -> None:
    export_vllm(bundled_path(name), bundled_path(), tmp_path / name)
    expected = drafts(f"bundled:{name}")
    assert drafts(str(tmp_path / name)) == expected
    assert sum(map(len, expected)) > 12


def test_dflash_without_its_additions_drafts_here(tmp_path: Path) -> None:
    export_vllm(bundled_path("dflash"), bundled_path(), tmp_path / "dflash")
    assert sum(map(len, drafts(str(tmp_path / "dflash")))) > 12


@pytest.mark.parametrize(
    ("name", "layout"),
    [("eagle3", "speculators"), ("eagle3", "specforge"), ("dflash", "speculators")],
)
def test_other_layouts_draft_the_same_here(
    name: str, layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert run(app, ["export", layout, f"bundled:{name}", str(out), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["layout"], record["kind"], record["folder"]) == (layout, name, str(out))
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    if layout == "speculators":
        assert config["speculators_model_type"] in ("eagle3", "dspark")
        assert config["transformer_layer_config"]["vocab_size"] == 8192
        assert {"embed_tokens.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"} <= {
            *tensors
        }
    else:
        inner = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        assert [layer + 1 for layer in inner] == config["eagle_aux_hidden_state_layer_ids"]
    expected = drafts(f"bundled:{name}")
    assert drafts(str(out)) == expected
    assert sum(map(len, expected)) > 12


def test_a_layout_without_a_form_for_the_head_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["export", "speculators", "bundled:medusa", str(tmp_path / "m")]) == 2
    assert "has no medusa heads" in capsys.readouterr().err
    _, write = CASES["dflash_sinks"]
    write(tmp_path / "sinks")
    assert run(app, ["export", "speculators", str(tmp_path / "sinks"), str(tmp_path / "n")]) == 2
    assert "has no attention sinks" in capsys.readouterr().err
