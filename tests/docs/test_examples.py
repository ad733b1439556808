"""The programs of examples/ and the notebook, run with quick settings."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT

EXAMPLES = ROOT / "examples"
QUICK: dict[str, list[str]] = {
    "batch_generation": ["--prompts", "3", "--max-tokens", "8"],
    "streaming": ["--max-tokens", "12"],
    "per_request_proposers": ["--max-tokens", "16"],
    "custom_proposer": ["--max-tokens", "16"],
    "exactness_in_ci": ["--prompts", "1"],
    "export_to_vllm": ["--out", "exported"],
    "train_draft": [
        *("corpus.txt", "--out", "trained", "--steps", "1"),
        *("--batch", "1", "--length", "32"),
    ],
}
PRINTS = {
    "batch_generation": "8 tokens",
    "streaming": "drafted tokens were accepted",
    "per_request_proposers": "5 requests, 1 text",
    "custom_proposer": "most-frequent",
    "exactness_in_ci": "3 outputs compared with plain decoding, 0 different",
    "export_to_vllm": "eagle3",
    "train_draft": "use it",
}


def main_of(name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[..., Any] = module.main
    return main


@pytest.mark.parametrize("name", QUICK)
def test_example(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = (ROOT / "src/outrider/theory/speedup.py").read_text(encoding="utf-8")
    (tmp_path / "corpus.txt").write_text(source, encoding="utf-8")
    assert not main_of(name)(QUICK[name])
    assert PRINTS[name] in capsys.readouterr().out


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    main_of("chat")(["--max-tokens", "6"], ["def add(a, b):", "def sub(a, b):"])
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_openai_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """Against a real server in this process."""
    from integration.server.live import Live
    from outrider.engine.build import EngineConfig

    with Live(EngineConfig(model="bundled", threads=1), proposers=("prediction",)) as server:
        main_of("openai_prediction")(["--url", server.url, "--max-tokens", "24"])
    assert "tokens of the prediction were accepted" in capsys.readouterr().out


def test_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "alpha_against_temperature.ipynb").read_text("utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            source = source.replace("NUM_TOKENS = 32", "NUM_TOKENS = 6")
            source = source.replace("[0.2, 0.6, 1.0, 1.4]", "[0.2, 1.4]")
            exec(compile(source, "notebook", "exec"), names)
    cold, hot = names["curves"]
    assert all(a > b for a, b in zip(cold, hot, strict=True))  # hotter: less is accepted
    ratio, coupled, greedy = hot
    assert ratio >= coupled
    assert ratio >= greedy
    import matplotlib.pyplot as plt

    plt.close("all")


def test_ten_of_them() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]
    assert len(programs) == 10
    for program in programs:
        assert f"]({program.name})" in listed
    tested = {*QUICK, "chat", "openai_prediction", "alpha_against_temperature"}
    assert {program.stem for program in programs} == tested
