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
from outrider.model.head_notes import acceptance_by_depth
from outrider.model.heads import load_head
from outrider.train.chats import Written, answers_of, write_chats
from outrider.train.config import DataError, OptimConfig, SessionConfig
from outrider.train.models import load_model
from outrider.train.plateau import Plateau
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


@pytest.fixture(scope="module")
def chat_target(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = shutil.copytree(target, tmp_path_factory.mktemp("chat") / "model")
    template = "{% for m in messages %}class {{ m.content }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return model


def test_a_chat_model_writes_chats_and_progress_is_shown(
    chat_target: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    outcome = session(
        "eagle3", chat_target, out, own_tokens=9000, num_steps=30, length=160,
        options={"draft_vocab_size": 150},
    )  # fmt: skip
    assert outcome.after["alpha"] > outcome.before["alpha"]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("the target writes: 0/")  # before the first token
    record = json.loads((out / "provenance.json").read_text())
    assert record["data"]["answer_tokens"] >= 9000
    assert len(record["data"]["chats"]) > 2
    assert outcome.report.checks
    assert outcome.expected["plain"] > 0
    assert outcome.expected["drafted"] > 0
    shares = acceptance_by_depth(out)
    assert shares == pytest.approx(outcome.after["alpha_by_depth"], abs=1e-4)
    assert acceptance_by_depth(out, greedy=True) is not None
    assert not (out / "own-text.pt").exists()
    assert load_head(out).kind == "eagle3"


def test_an_interrupted_run_keeps_what_the_target_wrote(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"

    def run() -> Outcome:
        return session("eagle3", chat_target, out, own_tokens=2000, length=160,
                       options={"draft_vocab_size": 150})  # fmt: skip

    with monkeypatch.context() as patched:
        patched.setattr("outrider.train.session.load_model", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run()
    written = Written.load(out / "own-text.pt")
    outcome = run()
    record = json.loads((out / "provenance.json").read_text())
    assert record["data"]["answer_tokens"] == written.num_answer_tokens
    assert outcome.report.num_steps == 8


def test_text_of_another_run_is_not_trained_on(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.session.load_model", lambda *_, **__: 1 / 0)
    written = []
    for length, seed in ((160, 0), (200, 0), (200, 1), (200, 1)):
        with pytest.raises(ZeroDivisionError):
            session("eagle3", chat_target, tmp_path, own_tokens=1500, length=length, seed=seed)
        written.append(Written.load(tmp_path / "own-text.pt").rows)
    assert [len(rows[0]) for rows in written] == [162, 202, 202, 202]
    assert not torch.equal(written[1], written[2])
    assert torch.equal(written[2], written[3])


def test_rows_of_chats_hold_prompts_and_the_beginnings_of_answers(chat_target: Path) -> None:
    written = write_chats(str(chat_target), 160, most_tokens=1500, most_s=None, seed=1)
    again = write_chats(str(chat_target), 160, most_tokens=1500, most_s=None, seed=1)
    assert torch.equal(written.rows, again.rows)
    first, end = written.rows[:, 0], written.rows[:, 1]
    assert bool((first > 0).all())
    assert bool((end - first >= 16).all())
    assert bool((end <= 160).all())
    assert len(answers_of(written.rows)) == int((end - first).sum()) == written.num_answer_tokens
    with pytest.raises(DataError, match="larger --length"):
        write_chats(str(chat_target), 20, most_tokens=100, most_s=None, seed=1)


def test_a_plateau_shortens_the_run_to_its_decay() -> None:
    lengths = iter([2.0, 2.3, 2.5, 2.5, 2.501, 2.5])
    plateau = Plateau(lambda: next(lengths))
    num_steps = 160
    for step in range(1, 161):
        num_steps = plateau.shortened(step, num_steps, 0.4)
        if step >= num_steps:
            break
    assert [check[0] for check in plateau.checks] == [10, 20, 30, 40, 50, 60]
    assert num_steps == 100  # of which the last 40 steps decay
    rising = iter(range(1, 100))
    plateau = Plateau(lambda: float(next(rising)))
    assert {plateau.shortened(step, 160, 0.4) for step in range(1, 161)} == {160}


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
