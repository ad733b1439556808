"""Pictures of a result that lacks what some of them show."""

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


def test_shares_of_time_that_were_not_measured_are_not_drawn(
    command: Command, result: Path
) -> None:
    record = json.loads(result.read_text(encoding="utf-8"))
    for row in record["rows"]:
        for share in SHARES:
            del row[share]
    result.write_text(json.dumps(record), encoding="utf-8")
    ran = command("plot", str(result), "--formats", "svg")
    assert ran.code == 0, ran.err
    assert "time: no shares of time in this result" in ran.out
    assert not (result.parent / "mine-time.svg").exists()
