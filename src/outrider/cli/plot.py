"""`outrider plot`: pictures of result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import stdout
from outrider.errors import ConfigError, UnknownName
from outrider.options import option, read_names
from outrider.parameters import OUTPUT

EXAMPLE = "Example: outrider plot benchmarks/results/decode.json --out plots"

Results = Annotated[
    list[Path],
    typer.Argument(metavar="RESULT...", help="JSON files that `outrider bench --out` wrote."),
]
Out = Annotated[
    Path | None,
    option(
        OUTPUT, "Folder for the pictures.", "--out", "-o", metavar="FOLDER",
        show_default="beside the result",
    ),
]  # fmt: skip
Only = Annotated[
    str | None,
    option(OUTPUT, "These pictures; a wrong name lists all.", "--only",
                 metavar="NAME,...", show_default="all that the result allows"),
]  # fmt: skip
Formats = Annotated[str, option(OUTPUT, "png, svg or both.", "--formats", metavar="NAME,...")]


def plot(
    results: Results, out: Out = None, only: Only = None, formats: Formats = "png,svg"
) -> None:
    """Draw what a benchmark found: speedup, acceptance, time, latency."""
    from outrider.bench.report import read_result
    from outrider.plots.pictures import PICTURES, NothingToDraw
    from outrider.plots.style import SUFFIXES

    suffixes = [f".{name}" for name in read_names(formats)]
    if not suffixes or not set(suffixes) <= set(SUFFIXES):
        raise ConfigError(f"--formats must be png, svg or both, not {formats!r}")
    for path in results:
        record = read_result(path)
        known = PICTURES.get(record["kind"], {})
        if not known:
            raise ConfigError(f"{path}: nothing is drawn of a result of kind {record['kind']!r}")
        wanted = read_names(only) if only else list(known)
        for name in wanted:
            if name not in known:
                raise UnknownName(f"picture of {path.name}", name, known)
            for suffix in suffixes:
                picture = (out or path.parent) / f"{path.stem}-{name}{suffix}"
                try:
                    known[name](record["rows"], picture)
                except NothingToDraw as reason:
                    if only:
                        raise
                    stdout().print(f"{name}: {reason}", markup=False)
                    break
                stdout().print(f"{picture}", markup=False)
