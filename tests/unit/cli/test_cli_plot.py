"""Pictures of a result in which nothing was drafted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .calling import Command

pytest.importorskip("matplotlib")
SHARES = {"draft_share": 0.1, "verify_share": 0.8, "other_share": 0.1}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [
        {"contender": name, "workload": "code", "speedup": 1.0, "accepted_lengths": [], **SHARES}
        for name in ("plain", "draft-model K=auto")
    ]
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"kind": "decode", "rows": rows}), encoding="utf-8")
    return file


def test_what_can_be_drawn_is_drawn(command: Command, result: Path) -> None:
    ran = command("plot", str(result), "--formats", "svg")
    assert ran.code == 0, ran.err
    assert (result.parent / "mine-speedup.svg").exists()
    assert (result.parent / "mine-time.svg").exists()
    assert not (result.parent / "mine-positions.svg").exists()
    assert "positions: no drafts in this result" in ran.out


def test_asking_for_it_is_a_mistake(command: Command, result: Path) -> None:
    ran = command("plot", str(result), "--only", "positions")
    assert ran.code == 2
    assert "measure with a fixed -k" in ran.err
