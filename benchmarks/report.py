"""Writes a result file: figures as JSON and markdown, with machine, versions and command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from outrider.bench import report as bench_report

RESULTS = Path(__file__).parent / "results"


def provenance() -> dict[str, str]:
    return bench_report.provenance() | {"command": " ".join(["python", *map(_anywhere, sys.argv)])}


def _anywhere(argument: str) -> str:
    """An argument without the folders of one machine."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    if path.is_relative_to(RESULTS.parents[1]):
        return str(path.relative_to(RESULTS.parents[1]))
    return str(Path("...", *path.parts[2:][-3:]))


def add_out(parser: argparse.ArgumentParser) -> None:
    """An option for benchmarks that run where results cannot be committed: `folder` of `write`."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=RESULTS,
        help="where the result files go; benchmarks/results if not given",
    )


def write(
    name: str,
    title: str,
    tables: dict[str, list[dict[str, Any]]],
    notes: str = "",
    folder: Path = RESULTS,
) -> None:
    """`tables`: heading -> rows with equal keys. Overwrites FOLDER/NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    about = provenance()
    data = {"title": title, "provenance": about, "tables": tables, "notes": notes}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = [f"# {title}", "", *([notes, ""] if notes else [])]
    for heading, rows in tables.items():
        columns = list(rows[0])
        lines += [
            f"## {heading}",
            "",
            "| " + " | ".join(columns) + " |",
            "|---" * len(columns) + "|",
        ]
        lines += ["| " + " | ".join(_cell(row[c]) for c in columns) + " |" for row in rows]
        lines.append("")
    lines += [f"- {key}: {value}" for key, value in about.items()]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
