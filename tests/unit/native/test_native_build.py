"""Building: a machine without a compiler is told so once, and nothing is half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider import native
from outrider.native import build


def test_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    target = tmp_path / "library.so"
    monkeypatch.setattr("sys.argv", ["build", "--output", str(target)])
    assert build.main() == 1
    assert "no C++ compiler" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "library.so"
    target.write_text("the old one")
    os.utime(target, (0, 0))
    for compiler in ("false", str(tmp_path / "missing")):
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setattr("sys.argv", ["build", "--output", str(target)])
        assert build.main() == 1
        assert "not built" in capsys.readouterr().err
    assert target.read_text() == "the old one"


def test_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "library.so"
    assert not build.is_current(target)
    target.write_text("")
    assert build.is_current(target)
    monkeypatch.setattr("sys.argv", ["build", "--output", str(target)])
    monkeypatch.setenv("CXX", "false")
    assert build.main() == 0  # nothing to do, so nothing fails
    os.utime(target, (0, 0))
    assert not build.is_current(target)


def test_every_source_is_compiled() -> None:
    assert set(build.SOURCES) == {path.name for path in build.HERE.glob("*.cpp")}


def test_a_machine_with_a_compiler_has_the_kernels() -> None:
    # Tests of the native engine are skipped without it: a build that broke must not pass so.
    try:
        build.find_compiler()
    except build.BuildError:
        pytest.skip("no compiler here")
    assert native.available(), native.why_unavailable()
