"""`outrider.json` in a drafter's folder: what was measured of it. Other programs ignore the file.

    {"acceptance_by_depth": [0.74, 0.72, 0.70, 0.69], "agreement_by_depth": [...]}

`acceptance_by_depth[i]` is how often draft i + 1 is accepted at temperature 1 if all before it
were; `agreement_by_depth` is the same at temperature 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "outrider.json"


def write_notes(folder: Path, notes: Mapping[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")


def acceptance_by_depth(folder: Path, *, greedy: bool = False) -> list[float] | None:
    """The measured acceptance of a drafter; None where the folder has none that can be read."""
    try:
        notes = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found = notes["agreement_by_depth" if greedy else "acceptance_by_depth"]
        shares = [float(share) for share in found]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return shares if shares and all(0 <= share <= 1 for share in shares) else None
