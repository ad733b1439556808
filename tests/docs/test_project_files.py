"""The files around the code parse, agree on the version, and name commands that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / "CITATION.cff",
    ROOT / "mkdocs.yml",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_yaml_parses(path: Path) -> None:
    assert isinstance(load(path), dict)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_that_exist(path: Path) -> None:
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for job in load(path)["jobs"].values():
        assert job["timeout-minutes"]
        matrix = job.get("strategy", {}).get("matrix", {})
        assert set(matrix.get("target", [])) <= set(targets)
        for step in job["steps"]:
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in targets


def test_workflows_test_every_declared_python() -> None:
    tested = load(ROOT / ".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]
    declared = re.findall(r"Python :: (3\.\d+)", json.dumps(PROJECT["project"]["classifiers"]))
    assert tested["python"] == declared
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"


def test_one_version() -> None:
    version = PROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert load(ROOT / "CITATION.cff")["version"] == version
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)
    for name in re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE):
        assert f"\n[{name}]: {PROJECT['project']['urls']['Repository']}" in changelog


@pytest.mark.parametrize(
    ("native", "tag"), [("auto", r"py3-none-(?!any)\w+"), ("off", "py3-none-any")]
)
def test_wheels_fit_every_python(native: str, tag: str, tmp_path: Path) -> None:
    """The library does not use Python's C interface; without it a wheel fits every platform."""
    pytest.importorskip("setuptools")
    code = (
        "import runpy, setuptools; found = {}; setuptools.setup = found.update;"
        "made = runpy.run_path('setup.py');"
        "from setuptools.dist import Distribution;"
        f"wheel = made['Wheel'](Distribution(found)); wheel.dist_dir = {str(tmp_path)!r};"
        "wheel.finalize_options(); print('-'.join(wheel.get_tag()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=os.environ | {"OUTRIDER_NATIVE": native},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.fullmatch(tag, done.stdout.strip())


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/decisions").glob("[0-9]*.md")), ids=lambda page: page.stem
)
def test_decision_records(page: Path) -> None:
    """One page each, with the four headings, its number in the title, and in the index."""
    lines = page.read_text(encoding="utf-8").splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings[0].startswith(f"# {page.name[:3]}. ")
    assert headings[1:] == ["## Context", "## Decision", "## Evidence", "## Consequence"]
    assert len(lines) <= 60
    assert f"({page.name})" in (page.parent / "index.md").read_text(encoding="utf-8")
