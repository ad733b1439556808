"""How the checks of a proof are timed, shown and recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from outrider.cli.console import telling

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.prove.checks import Check, Tell

Timed = tuple["Check", float]
MARKS = {True: "[bold green]proven[/]", False: "[bold red]NOT PROVEN[/]", None: "[dim]not run[/]"}
MAX_TROUBLES = 10  # shown of one check


def timed(name: str, check: Callable[[Tell], Check]) -> Timed:
    """A finished check with its seconds."""
    started = perf_counter()
    with telling(name) as tell:
        found = check(tell)
    return found, perf_counter() - started


def show_checks(console: Console, results: Sequence[Timed]) -> None:
    """The table, then what each check found wrong."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("s", justify="right")
    for check, seconds in results:
        table.add_row(check.name, Text(check.found), MARKS[check.passed], f"{seconds:.1f}")
    console.print(table, soft_wrap=False)
    for check, _ in results:
        for trouble in check.troubles[:MAX_TROUBLES]:
            console.print(f"  {check.name}: {trouble}", style="red", markup=False)


def records(results: Sequence[Timed]) -> list[dict[str, Any]]:
    """The checks in the JSON object."""
    return [
        {
            "name": check.name,
            "passed": check.passed,
            "found": check.found,
            "seconds": seconds,
            **check.figures,
            "troubles": check.troubles,
        }
        for check, seconds in results
    ]
