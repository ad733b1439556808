"""The public surface: every name resolves, nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", outrider.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(outrider, name).__name__ == name


def test_names_are_listed_and_unknown_ones_fail() -> None:
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="nonsense"):
        outrider.nonsense  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import outrider, sys; sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False)
    assert run.returncode == 0


def test_importing_llm_loads_few_modules_and_no_gpu_code() -> None:
    code = "from outrider import LLM; import sys; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "src", check=True, capture_output=True, text=True
    )
    ours = [name for name in run.stdout.split() if name.split(".")[0] == "outrider"]
    assert len(ours) <= 55, sorted(ours)
    assert not [name for name in ours if "cuda" in name]


def test_versions_agree() -> None:
    assert f'version = "{outrider.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_nothing_in_the_package_executes_what_it_loads() -> None:
    """Models are untrusted input: no pickle, no eval, no remote code."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                assert not {a.name for a in node.names} & {"pickle", "dill", "marshal"}, where
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in {"pickle", "dill", "marshal"}, where
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                options = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert called not in {"eval", "exec"}, where
                assert called != "torch.load" or options.get("weights_only") == "True", where
                assert options.get("trust_remote_code") in {None, "False"}, where
