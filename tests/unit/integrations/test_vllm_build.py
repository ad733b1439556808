"""Which builds of vLLM may sample while they draft."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.integrations.vllm.build import Build, examine, no_sampling, refuse_rule

GPU = Build("0.32.0", is_cpu=False, has_triton=False)
CPU = Build("0.32.0+cpu", is_cpu=True, has_triton=False)


def write(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    file.chmod(0o755)
    return file


def install_vllm(folder: Path, version: str) -> None:
    """As far as package metadata are concerned."""
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


@pytest.mark.parametrize(("version", "is_cpu"), [("0.32.0", False), ("0.32.0+cpu", True)])
def test_the_interpreter_of_the_script_is_asked(
    version: str, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_vllm(tmp_path, version)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    program = write(tmp_path / "vllm", f"#!{sys.executable}")
    build = examine(program)
    assert build is not None
    assert (build.version, build.is_cpu) == (version, is_cpu)


@pytest.mark.parametrize(
    "python", [None, "exit 1", "echo", "echo '{}'", "echo '[1]'", "echo nonsense"]
)
def test_what_is_no_vllm_is_not_known(python: str | None, tmp_path: Path) -> None:
    program = write(tmp_path / "vllm", "#!/bin/sh")
    if python is not None:
        write(tmp_path / "python", "#!/bin/sh", python)
    assert examine(program) is None
    assert examine(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("build", "may"),
    [
        (GPU, True),
        (Build("0.32.0+cpu", is_cpu=True, has_triton=True), True),
        (CPU, False),
        (Build("0.99.0+cpu", is_cpu=True, has_triton=False), False),
        (None, False),
    ],
)
def test_who_may_sample(build: Build | None, may: bool) -> None:
    why_not = no_sampling(build)
    assert (why_not is None) is may
    assert why_not is None or ("temperature 0" in why_not and "\n" not in why_not)


def test_the_block_rule_needs_triton() -> None:
    with pytest.raises(ConfigError, match="no block rule"):
        refuse_rule(CPU, "block")
    refuse_rule(GPU, "block")
    refuse_rule(CPU, "token")
