"""The tables of docs/reference/drafters.md: published layouts that draft right, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_RECORD = Path(__file__).parents[2] / "tests" / "drafters.json"


def _record() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_RECORD.read_text())
    return found


def _share(counts: Sequence[int] | None) -> str:
    if counts is None:
        return "torch"
    same, drafts = counts
    return "all" if same == drafts else f"{100 * same / drafts:.1f} %"


def loaded() -> list[list[str]]:
    """Layout, proposer, drafts compared, and how many are equal in torch, float32 and int8."""
    rows = []
    for name, found in _record().items():
        if "refused" in found:
            continue
        row = [name.replace("_", " "), f"`{found['kind']}`", str(found["torch"][1])]
        row += [_share(found["torch"]), _share(found.get("float32"))]
        rows.append([*row, "" if found["kind"] == "mtp" else _share(found.get("int8"))])
    return sorted(rows, key=lambda row: (row[1], row[0]))


def refused() -> list[list[str]]:
    return [
        [name.replace("_", " "), found["refused"]]
        for name, found in _record().items()
        if "refused" in found
    ]
