"""Rules about the tree as a whole. What breaks one today is in ledger.json, which only shrinks."""

from __future__ import annotations

import ast

import pytest

from architecture import scan

LEDGER = scan.read()
GOALS = {
    "modules of the first import": 55,
    "private names in tests": 10,
    "uses of private names in tests": 20,
    "uses of Engine.parts in tests": 0,
}
RULES = {
    "edges upwards": "a module imports one of a higher line of scan.ORDER: move the code down",
    "import cycles": "modules import each other, counting imports inside functions",
    "long files": f"a file has over {scan.MAX_FILE_LINES} lines",
    "long functions": f"a function has over {scan.MAX_FUNCTION_LINES} lines",
    "spelled proposers": "a proposer's name belongs in registry.py and in its own file only",
    "private modules in tests": "test a public module instead",
}
UPDATE = "run `python -m architecture.scan` with PYTHONPATH=src:tests"


@pytest.mark.parametrize("name", RULES)
def test_rule(name: str) -> None:
    found, known = set(scan.LISTS[name]()), set(LEDGER[name])
    assert not found - known, f"{RULES[name]}: {sorted(found - known)}"
    assert not known - found, f"mended, so {UPDATE}: {sorted(known - found)}"


@pytest.mark.parametrize("name", GOALS)
def test_count(name: str) -> None:
    """Below its goal a number may vary; above it, it may only fall."""
    found, known, goal = scan.counts()[name], LEDGER["counts"][name], GOALS[name]
    assert found <= max(known, goal), f"{name}: {found}, at most {max(known, goal)} allowed"
    assert found == known or found <= goal, f"{name} fell from {known} to {found}: {UPDATE}"


def test_the_first_import_loads_nothing_of_the_gpu() -> None:
    loaded = scan.first_import()
    assert "outrider.llm" in loaded
    assert not [name for name in loaded if name.startswith("outrider.cuda")]


def test_imports_inside_functions_count_and_those_of_types_do_not() -> None:
    code = """
if TYPE_CHECKING:
    from outrider.llm import LLM
from outrider import native
def f():
    import outrider.kv.cache
"""
    assert list(scan.imports(ast.parse(code))) == [("", "native"), ("kv.cache", "")]
