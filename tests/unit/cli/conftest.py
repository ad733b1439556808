"""The command line in this process, on models written in milliseconds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.testing import write_tiny_llama

from .calling import Command, Ran


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """`command("generate", ..., stdin="text")`: what the shell would see."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("OUTRIDER_DEBUG", raising=False)

    def call(*args: str, stdin: str = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = run(app, args)
        return Ran(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("cli") / "target", vocab_size=128, max_positions=96
    )


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shares the target's first layer: right now and then."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("cli") / "draft", vocab_size=128, num_layers=1, max_positions=96
    )


@pytest.fixture
def pair(target: Path, draft: Path) -> list[str]:
    """The arguments that name both models."""
    return [str(target), "--draft-model", str(draft)]
