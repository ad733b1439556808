"""Result files: every figure as JSON, the main ones as markdown, with their provenance."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

Row = dict[str, Any]


def provenance() -> dict[str, str]:
    """Date, commit, command, machine and versions."""
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    if stolen := _stolen():
        about["stolen"] = stolen
    for name in ("outrider", "torch", "transformers", "numpy"):
        try:
            about[name] = version(name)
        except PackageNotFoundError:
            continue
    return about


def _processor_ticks() -> tuple[float, float] | None:
    """Processor time that the host took away from this machine, and all time (/proc/stat)."""
    try:
        ticks = [float(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (ticks[7], sum(ticks)) if len(ticks) == 8 else None


_STARTED = _processor_ticks()


def _stolen() -> str:
    """The share of the run so far; "" if unknown. Above 1 or 2 %, times mean little."""
    now = _processor_ticks()
    if _STARTED is None or now is None or now[1] <= _STARTED[1]:
        return ""
    share = (now[0] - _STARTED[0]) / (now[1] - _STARTED[1])
    return f"{share:.1%} of the processors' time, by others on the host"


def _commit() -> str:
    """The commit of the package's working tree; "" if installed. "+": with local changes."""

    def git(*command: str) -> str:
        try:
            return subprocess.run(
                ["git", *command],
                capture_output=True,
                text=True,
                cwd=Path(__file__).parent,
                check=False,
            ).stdout.strip()
        except OSError:
            return ""

    changed = git("status", "--short", str(Path(__file__).parents[1]))
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@dataclass(slots=True)
class Result:
    """One benchmark's outcome. `kind` names the form of its rows, for `outrider plot`."""

    kind: str
    title: str
    rows: list[Row]
    columns: Sequence[str]  # of the rows, that the markdown shows
    notes: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "title": self.title,
            "provenance": provenance(),
            "settings": self.settings,
            "notes": self.notes,
            "rows": self.rows,
        }

    def markdown(self) -> str:
        lines = [f"# {self.title}", "", *([self.notes, ""] if self.notes else [])]
        lines += table(self.rows, self.columns)
        lines += ["", *(f"- {key}: {value}" for key, value in self.settings.items())]
        lines += [f"- {key}: {value}" for key, value in provenance().items()]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> list[Path]:
        """PATH.json and PATH.md, without the suffix of `path`."""
        base = path.with_suffix("") if path.suffix in (".json", ".md") else path
        written = [base.with_name(base.name + suffix) for suffix in (".json", ".md")]
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            written[0].write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            written[1].write_text(self.markdown())
        except OSError as error:
            raise ConfigError(f"cannot write {base}: {error.strerror}") from None
        return written


def table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Lines of a markdown table; columns that no row has are left out."""
    shown = [c for c in columns if any(c in r for r in rows)]
    lines = [
        "| " + " | ".join(c.replace("_", " ") for c in shown) + " |",
        "|---" * len(shown) + "|",
    ]
    return lines + ["| " + " | ".join(cell(r, c) for c in shown) + " |" for r in rows]


def cell(row: Row, column: str) -> str:
    """A figure with its interval, if it has one."""
    value = row.get(column, "")
    if not isinstance(value, float):
        return "" if value is None else str(value)
    text = f"{value:.4g}" if value < 100 else f"{value:.0f}"
    if f"{column}_low" in row:
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        text = (
            f"{value:.3g} [{low:.3g}, {high:.3g}]"
            if value < 100
            else f"{text} [{low:.0f}, {high:.0f}]"
        )
    return text


def read_result(path: Path) -> dict[str, Any]:
    """A result file's object; raises ConfigError for anything else."""
    try:
        record = json.loads(path.read_text())
        if not isinstance(record["rows"], list) or not isinstance(record["kind"], str):
            raise KeyError
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} is no result of outrider bench: pass one of its JSON files"
        ) from None
    found: dict[str, Any] = record
    return found
