"""`--trace`: every token with its origin, first as running text, then step by step.

Colour is never the only carrier: on a terminal each kind also has its own shape (underlined, bold,
italic, struck through), and where no styles can be shown each token begins with its mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider.origins import Kind, Spelling, judged

if TYPE_CHECKING:
    from outrider.events import StepEvent


def visible(text: str) -> str:
    """Text with its control characters made visible: ⏎ newline, ⇥ tab, escapes for the rest."""
    table = {"\n": "⏎", "\t": "⇥", "\r": "␍"}
    return "".join(table.get(c) or (c if c.isprintable() else f"\\x{ord(c):02x}") for c in text)


def cell(text: str) -> str:
    """The same for a table, where spaces count too: · each, and long runs as a number."""
    return re.sub(r" {4,}", lambda run: f"·×{len(run[0])}", visible(text)).replace(" ", "·")


def running_text(event: StepEvent, spell: Spelling, *, marks: bool) -> Text:
    """One step as a part of the output; with `marks` if the console shows no styles."""
    return styled([(kind, spell(token)) for kind, token in judged(event)], marks=marks)


def styled(tokens: Iterable[tuple[Kind, str]], *, marks: bool) -> Text:
    """Verified tokens in order, each in the style of its kind."""
    line = Text()
    for kind, spelled in tokens:
        text = visible(spelled)
        if kind not in (Kind.REJECTED, Kind.UNUSED):
            text = text.replace("⏎", "⏎\n")
        line.append((kind.mark if marks else "") + text, style=kind.style)
    return line


def needs_marks(console: Console) -> bool:
    """Whether the console shows no styles at all; NO_COLOR alone keeps bold and underline."""
    return console.color_system is None


def step_table(events: Sequence[StepEvent], spell: Spelling) -> Table:
    """One row per step: the draft, how many of its tokens were accepted, the target's own token."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("step", "source", "drafted", "accepted"):
        table.add_column(name, justify="left" if name == "source" else "right")
    table.add_column("draft", overflow="fold")
    table.add_column("from the target", overflow="fold", no_wrap=True)
    for event in events:
        draft, own = Text(), Text()
        for kind, token in judged(event):
            text = cell(spell(token))
            if kind in (Kind.ACCEPTED, Kind.REJECTED, Kind.UNUSED):
                draft.append(kind.mark).append(text, style=kind.style).append(" ")
            else:
                name = kind.name.lower() if kind is not Kind.TARGET else "plain"
                own.append(kind.mark).append(text, style=kind.style).append(f" {name}", "dim")
        counts = (str(len(event.draft_tokens)), str(len(event.path)))
        table.add_row(str(event.step), event.source or "–", *counts, draft, own)
    return table


def legend(events: Sequence[StepEvent]) -> Text:
    """What the marks and styles mean, for those that occur."""
    names = {
        Kind.ACCEPTED: "accepted draft",
        Kind.REJECTED: "rejected draft",
        Kind.CORRECTION: "correction by the target",
        Kind.BONUS: "bonus after a full accept",
        Kind.UNUSED: "drafted past the end",
    }
    line = Text()
    seen = {kind for event in events for kind, _ in judged(event)}
    for kind, name in names.items():
        if kind not in seen:
            continue
        line.append(kind.mark).append(name, style=kind.style).append("  ")
    return line.append("⏎ newline  · space", style="dim")


def position_table(conditional: Sequence[float], unconditional: Sequence[float]) -> Table:
    """How often draft position i was accepted: given that it was verified, and of all drafts."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("position", justify="right")
    table.add_column("if all before it held", justify="right")
    table.add_column("of all drafts", justify="right")
    table.add_column("")
    for i, (given, of_all) in enumerate(zip(conditional, unconditional, strict=True), start=1):
        table.add_row(str(i), f"{given:.2f}", f"{of_all:.2f}", "█" * round(20 * of_all))
    return table
