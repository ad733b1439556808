"""The tuning constants of the policy: few, and each with its reason beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import outrider.policy

FOLDER = Path(outrider.policy.__file__).parent
MOST = 20  # only ever lower it
NOT_TUNING = {"FORMAT", "MAX_AGE_S"}  # of the file of measured costs


def constants() -> dict[str, tuple[str, str]]:
    """Name -> (file, comment beside it) of every number that has a name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, number = node.targets[0].id, node.value
                if name.isupper() and isinstance(number, ast.Constant):
                    line = text.splitlines()[node.lineno - 1]
                    found[name] = (path.name, line.partition("#")[2].strip())
    return {name: where for name, where in found.items() if name not in NOT_TUNING}


def test_there_are_few() -> None:
    assert len(constants()) <= MOST, sorted(constants())


def test_each_has_its_reason_beside_it() -> None:
    assert not [name for name, (_, reason) in constants().items() if len(reason.split()) < 3]


def test_pairs_of_constants_are_not_hidden_in_tuples() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                names = [name.id for name in node.targets[0].elts if isinstance(name, ast.Name)]
                assert not any(name.isupper() for name in names), names
