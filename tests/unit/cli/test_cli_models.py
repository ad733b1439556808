"""`outrider models` and `outrider pull`, with a hub on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

import gguf_files
from fake_hub import FakeHub, fake_hub
from outrider.testing import write_tiny_llama

from .calling import Command

__all__ = ["fake_hub"]


def test_a_model_is_pulled_once_and_listed(
    command: Command, fake_hub: FakeHub, target: Path
) -> None:
    fake_hub.add("owner/tiny", target)
    ran = command("pull", "owner/tiny")
    assert ran.code == 0, ran
    assert ran.out.endswith("outrider chat owner/tiny\n")
    num_downloads = len(fake_hub.downloads)
    fake_hub.close()
    assert command("generate", "owner/tiny", "-p", "hello", "-m", "2").code == 0
    assert len(fake_hub.downloads) == num_downloads
    listed = {item["name"]: item for item in command("models", "--json").record["models"]}
    assert listed["owner/tiny"]["place"] == "hub cache"
    assert listed["owner/tiny"]["context"] == 96
    assert {"bundled:eagle3", "bundled:medusa"} <= {*listed["bundled"]["drafters"]}
    assert "bundled:eagle3" not in listed["owner/tiny"]["drafters"]


def test_an_interrupted_download_goes_on(
    command: Command, fake_hub: FakeHub, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)  # written in pieces of this size
    fake_hub.add("owner/tiny", target)
    fake_hub.cut_after = 4096
    assert command("pull", "owner/tiny").code == 0
    assert fake_hub.ranges == [("model.safetensors", "bytes=4096-")]


def test_files_of_a_folder_are_listed(command: Command, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "folder")
    path = gguf_files.from_folder(model, tmp_path / "a.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    ran = command("models", str(tmp_path), "--json")
    named = {item["name"]: item for item in ran.record["models"]}
    assert named[str(path)]["format"] == "GGUF"
    assert str(tmp_path / "broken.gguf") not in named
    assert "bundled" in ran.err


def test_mistakes_are_one_line(command: Command, tmp_path: Path) -> None:
    assert "is no folder" in command("models", str(tmp_path / "x")).err
    ran = command("pull", "nothing")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
