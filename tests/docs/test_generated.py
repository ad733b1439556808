"""What is generated is up to date, and the help of every command is complete."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from outrider.cli.app import app

from .pages import ROOT

TOOLS = ROOT / "docs" / "tools"


def tool(name: str) -> ModuleType:
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)


def test_reference_pages_and_tables() -> None:
    """The flags and fields are frozen: change them on purpose, then run `make reference`."""
    for page, text in tool("reference").wanted().items():
        assert page.read_text(encoding="utf-8") == text, (
            f"{page.relative_to(ROOT)} is out of date: run `make reference`"
        )


def test_a_changed_page_is_noticed() -> None:
    reference = tool("reference")
    page = ROOT / "README.md"
    text = page.read_text(encoding="utf-8")
    changed = text.replace("tokens per second", "apples").replace("| engine |", "| motor |")
    assert changed != text
    assert reference.fill(changed, reference.PARTS["README.md"]) != changed


def test_every_result_file_is_a_claims() -> None:
    """A result that no page refers to is deleted; a page refers to results that exist."""
    claims = tool("claims")
    assert claims.unused() == [], "refer to these result files, or delete them"
    page = (
        "Not this. The speed of a pass is\n[measured](benchmarks/results/peers.md). See [b](c.md)."
    )
    assert list(claims.claims(page)) == [("peers", "The speed of a pass is measured.")]


def test_drawings(tmp_path: Path) -> None:
    drawings = tool("drawings")
    drawings.draw_all(tmp_path)
    for drawing in tmp_path.glob("*.svg"):
        assert (drawings.FOLDER / drawing.name).read_bytes() == drawing.read_bytes(), (
            f"{drawing.name} is out of date: run `make reference`"
        )


def test_figures() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pinned = re.search(r"^matplotlib==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    if matplotlib.__version__ != pinned.group(1):
        pytest.skip("another matplotlib draws other files")
    assert tool("figures").stale() == [], "run `make reference`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


# --- the command line -----------------------------------------------------------------------------


def all_commands() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(path: str, command: Any) -> None:
        for name, child in getattr(command, "commands", {}).items():
            visit(f"{path} {name}".strip(), child)
        if path:
            found[path] = command

    visit("", typer.main.get_command(app))
    return found


COMMANDS = all_commands()


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_complete(path: str) -> None:
    """One line that says what for, an example that works, groups of explained options."""
    command = COMMANDS[path]
    purpose = (command.help or "").strip().split("\n\n")[0]
    assert purpose.endswith(".")
    assert len(" ".join(purpose.split())) <= 110, "one line"
    example = (command.epilog or "").removeprefix("Example: ")
    assert example.startswith(f"outrider {path}"), "an example"
    options = [param for param in command.params if param.param_type_name == "option"]
    for option in options:
        assert option.help, f"{option.opts}: what for?"
        panel = getattr(option, "rich_help_panel", None)
        assert panel or option.name == "help", f"{option.opts}: in which group?"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """The shell's question is answered without loading torch."""
    words = {"bash": ("COMP_WORDS", "outrider ge"), "zsh": ("_TYPER_COMPLETE_ARGS", "outrider ge")}
    name, value = words.get(shell, ("_TYPER_COMPLETE_ARGS", "outrider ge"))
    environment = {"_OUTRIDER_COMPLETE": f"complete_{shell}", name: value, "COMP_CWORD": "1"}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", "from outrider.cli import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "generate" in done.stdout, done.stderr


def test_completed_names_are_the_known_ones() -> None:
    """They are declared where the shell asks, because the classes themselves would load torch."""
    from outrider.config import BUNDLED, EngineConfig
    from outrider.model.bundled import find_folder
    from outrider.parameters import params
    from outrider.verifiers import VERIFIERS

    assert params(EngineConfig)["verifier"].choices == tuple(VERIFIERS)
    assert all(find_folder(name).is_dir() for name in BUNDLED)
