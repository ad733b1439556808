"""What docs/reference/drafters.md says of every layout, kept by the tests that measure it.

With OUTRIDER_RECORD in the environment the tests write `drafters.json`, and `make reference` makes
the table of it. Without, they check that the file has what they found.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "drafters.json"


def read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def keep(name: str, kind: str, part: str, found: object) -> None:
    """`part`: "torch", "float32", "int8" or "tree" for counts, "refused" for an error."""
    record = read()
    if isinstance(found, Counter):
        found = [found["same"], found["drafts"]]
    if os.environ.get("OUTRIDER_RECORD"):
        record[name] = record.get(name, {}) | {"kind": kind, part: found}
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
        return
    known = record.get(name, {})
    missing = "make it with OUTRIDER_RECORD=1 pytest tests/unit/proposers -k 'published or mtp'"
    assert known.get("kind") == kind, f"{RECORD.name} lacks {name}: {missing}; make reference"
    assert part in known, f"{RECORD.name} lacks {part} of {name}: {missing}; make reference"
    if part == "refused":
        assert known[part] == found
