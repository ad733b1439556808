"""Whole runs on a tiny target: from files to a folder that loads, with figures before and after."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider import LLM
from outrider.errors import ModelError, VocabularyMismatch
from outrider.events import StepReport
from outrider.export.vllm import export_vllm
from outrider.model.heads import load_head
from outrider.train.config import DataError, OptimConfig, SessionConfig
from outrider.train.models import load_model
from outrider.train.session import Outcome, passes_per_step, run_session
from tiny_training import TEXT, write_trained_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trained_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path


def session(kind: str, target: Path, out: Path, **more: Any) -> Outcome:
    settings: dict[str, Any] = {"num_steps": 8, "length": 64, "rows_per_step": 4, "log_every": 2}
    optim = OptimConfig(learning_rate=5e-3, warmup_steps=2)
    return run_session(
        SessionConfig(kind=kind, target=str(target), out=out, optim=optim, **settings | more)
    )


def test_a_draft_is_written_with_its_provenance(target: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    outcome = session("draft", target, out, data=(text,), num_steps=20, options={"num_layers": 1})
    assert outcome.after["alpha"] > outcome.before["alpha"]
    record = json.loads((out / "provenance.json").read_text())
    assert record["results"]["after"] == outcome.after
    assert len(record["data"]["files"][0]["sha256"]) == 64
    assert record["run"]["curve"][-1]["step"] == 20
    assert not (out / "checkpoint.pt").exists()
    assert load_model(out).config.num_hidden_layers == 1
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_chat_model_writes_chats_and_progress_is_shown(
    target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(target, tmp_path / "model")
    template = "{% for m in messages %}class {{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    outcome = session("eagle3", model, tmp_path / "head", own_tokens=600, num_steps=2)
    assert outcome.after["num_positions"] > 0
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("the target writes: 0/")  # before the first token
    assert any("s left" in line for line in lines)


def test_a_wide_vocabulary_takes_more_passes_a_step_on_a_cpu(tmp_path: Path) -> None:
    config = SessionConfig(kind="eagle3", out=tmp_path, own_tokens=1, rows_per_step=16)
    assert passes_per_step(config, 8192, on_gpu=False) == 1
    assert passes_per_step(config, 49152, on_gpu=False) == 4
    assert passes_per_step(config, 49152, on_gpu=True) == 1


def test_fine_tuning_starts_where_the_drafter_was(target: Path, text: Path, tmp_path: Path) -> None:
    first = session("draft", target, tmp_path / "a", data=(text,), num_steps=20)
    more = session("draft", target, tmp_path / "b", data=(text,), start=str(tmp_path / "a"))
    assert more.before["alpha"] == pytest.approx(first.after["alpha"], abs=5e-3)  # bf16 on disk


def test_the_targets_own_text_needs_no_files(target: Path, tmp_path: Path) -> None:
    outcome = session("medusa", target, tmp_path / "m", own_tokens=2000, num_steps=4)
    assert outcome.report.num_steps == 4
    assert load_head(tmp_path / "m").kind == "medusa"


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_exports_carry_what_vllm_expects(
    kind: str, target: Path, text: Path, tmp_path: Path
) -> None:
    options = {"dflash": {"markov_rank": 4, "confidence": True}}.get(kind, {})
    session(kind, target, tmp_path / "head", data=(text,), num_steps=2, options=options)
    served = export_vllm(tmp_path / "head", target, tmp_path / "vllm")
    assert served["method"] == kind
    tensors = load_file(tmp_path / "vllm" / "model.safetensors")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    ours = load_file(tmp_path / "head" / "model.safetensors")
    for name in set(tensors) & set(ours):
        assert torch.equal(tensors[name], ours[name])
    if kind == "medusa":
        assert config["model_type"] == "medusa"
        assert {"blocks.0.layers.0.weight", "lm_heads.0.weight"} <= set(tensors)
    elif kind == "eagle3":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert tensors["fc.weight"].shape == (64, 3 * 64)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * 64
        assert tensors["d2t"].dtype == torch.int64
    else:
        assert config["architectures"] == ["DFlashDraftModel"]
        assert not [name for name in tensors if name.startswith(("markov", "confidence"))]
        assert load_head(tmp_path / "vllm").kind == "dflash"


@pytest.mark.parametrize("kind", ["draft", "eagle3", "dflash"])
def test_exported_drafters_propose_the_same(
    kind: str, target: Path, text: Path, tmp_path: Path
) -> None:
    """Trained, written, exported, loaded again: token for token the same drafts."""
    session(kind, target, tmp_path / "ours", data=(text,), num_steps=4)
    export_vllm(tmp_path / "ours", target, tmp_path / "theirs")

    def drafts(folder: str) -> list[list[int]]:
        llm = LLM(str(target), draft_model=str(tmp_path / folder), num_draft_tokens=3)
        reports: list[StepReport] = []
        llm.engine.observers.append(reports.append)
        llm.generate("def add(", max_tokens=24, temperature=1.0, seed=3)
        return [event.draft_tokens for report in reports for event in report.events]

    assert any(drafts("ours"))
    assert drafts("ours") == drafts("theirs")


def test_mistakes_are_found_before_any_training(target: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training data"):
        session("draft", target, tmp_path / "x")
    short = tmp_path / "short.txt"
    short.write_text("def f(x):")
    with pytest.raises(DataError, match="too little text"):
        session("draft", target, tmp_path / "x", data=(short,))
    with pytest.raises(VocabularyMismatch, match="train a new draft"):
        session("draft", target, tmp_path / "x", data=(text,), start="bundled:draft")
    with pytest.raises(ModelError, match="no drafting head"):
        session("eagle3", target, tmp_path / "x", data=(text,), start=str(target))
    assert not (tmp_path / "x").exists()
