"""Where the command line prints: results on stdout, everything about them on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from outrider.options import option
from outrider.parameters import OUTPUT

Json = Annotated[
    bool, option(OUTPUT, "Print one JSON object as the last line of stdout.", "--json")
]


def stdout() -> Console:
    """Results. Plain text when it is not a terminal; NO_COLOR is respected by rich."""
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner on stderr during slow work; nothing if stderr is not a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(f"[dim]{what} …[/dim]"):
        yield


@contextmanager
def telling(name: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is running now; nothing without a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status(f"[dim]{name} …[/dim]") as status:
        yield lambda what: status.update(f"[dim]{name}: {what} …[/dim]")


def print_json(record: Mapping[str, object]) -> None:
    """One JSON object on one line: the last line of stdout, in every command that has --json."""
    typer.echo(json.dumps(record, ensure_ascii=False, allow_nan=False))
