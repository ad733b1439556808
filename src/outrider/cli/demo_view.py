"""What `outrider demo` shows: both texts growing side by side, and one row per finished race."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.cli.race import Outcome, Pair, Racer, Totals
from outrider.cli.report import printable
from outrider.origins import Kind, Spelling, judged
from outrider.statistics import SpeculationStats

FRAME_S = 1 / 15  # between two drawings
TABLE_LINES = 12  # of the table beside its rows, the panes' borders and the verdict
SIDE_BY_SIDE_COLUMNS = 76  # narrower terminals get one pane above the other


class View(Protocol):
    def begin(self, title: str, prompt: str, pair: Pair) -> None: ...

    def watch(self) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self, totals: Totals | None) -> None: ...


class Stage:
    """Two panes and the table below them: keeps the state and renders it; the caller draws it."""

    def __init__(self, console: Console, spell: Spelling, num_rounds: int) -> None:
        self._console = console
        self._pair: Pair | None = None
        self._spell = spell
        self._num_rounds = num_rounds
        self._title, self._prompt = "", ""
        self._outcomes: list[Outcome] = []
        self._totals: Totals | None = None

    def begin(self, title: str, prompt: str, pair: Pair) -> None:
        self._title, self._prompt, self._pair = title, prompt, pair

    def watch(self) -> None:
        pass

    def finished(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def close(self, totals: Totals | None) -> None:
        self._totals = totals

    def frame(self) -> RenderableType:
        assert self._pair is not None, "no race has begun"
        table = outcome_table(self._outcomes, self._totals)
        rows = max(6, min(18, self._console.height - self._num_rounds - TABLE_LINES))
        width = self._console.width
        if width >= SIDE_BY_SIDE_COLUMNS:
            panes = Table.grid(expand=True, padding=0)
            panes.add_column(ratio=1)
            panes.add_column(ratio=1)
            panes.add_row(*(self._pane(lane, width // 2 - 4, rows) for lane in self._pair))
            return Group(panes, "", table)
        return Group(*(self._pane(lane, width - 4, rows // 2) for lane in self._pair), "", table)

    def _pane(self, lane: Racer, width: int, rows: int) -> Panel:
        text = Text()
        text.append(printable(self._prompt), style="dim")
        text.append_text(self._written(lane))
        lines = text.wrap(self._console, width, no_wrap=False)[-rows:]
        done = "[green]done[/green] · " if lane.is_finished else ""
        figures = (
            f"{done}[bold]{lane.tokens_per_s:.0f}[/bold] tok/s · {lane.stats.num_tokens} tokens · "
            f"{len(lane.events)} passes"
        )
        num_draft_tokens = lane.speculation.num_draft_tokens
        drafts = f", K={num_draft_tokens}" if num_draft_tokens else ""
        return Panel(
            Text("\n").join(lines),
            title=f"[bold]{lane.name}[/bold]{drafts} · {self._title}",
            subtitle=figures,
            height=rows + 2,
            border_style="cyan" if num_draft_tokens else "dim",
        )

    def _written(self, lane: Racer) -> Text:
        """The lane's confirmed tokens; the drafted ones among them in green."""
        text = Text()
        for event in lane.events:
            if lane.speculation.num_draft_tokens == 0:
                text.append(printable(event.text))
                continue
            for kind, token in judged(event):
                if kind not in (Kind.REJECTED, Kind.UNUSED):
                    style = "green" if kind is Kind.ACCEPTED else "none"
                    text.append(printable(self._spell(token)), style=style)
        return text


class LiveView(Stage):
    """The live display, redrawn between steps, never during one; its last picture stays."""

    _live: Live | None = None
    _drawn = 0.0

    def begin(self, title: str, prompt: str, pair: Pair) -> None:
        super().begin(title, prompt, pair)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()

    def watch(self) -> None:
        if perf_counter() - self._drawn > FRAME_S:
            self._draw()

    def finished(self, outcome: Outcome) -> None:
        super().finished(outcome)
        self._draw()

    def close(self, totals: Totals | None) -> None:
        super().close(totals)
        if self._live is not None:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        assert self._live is not None
        self._live.update(self.frame(), refresh=True)
        self._drawn = perf_counter()


class PlainView:
    """The same in lines, for files and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._outcomes: list[Outcome] = []

    def begin(self, title: str, prompt: str, pair: Pair) -> None:
        self._console.print(f"── {title} ──")
        self._console.print(Text(printable(prompt)), end="")

    def watch(self) -> None:
        pass

    def finished(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._console.print(Text(printable(outcome.speculative.text)))

    def close(self, totals: Totals | None) -> None:
        self._console.print(outcome_table(self._outcomes, totals))


def outcome_table(outcomes: Sequence[Outcome], totals: Totals | None) -> Table:
    """tokens/s of both, and what speculation did; the last row is everything together."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        collapse_padding=True,
        show_footer=totals is not None,
    )
    footer = ["all"] + [""] * 7
    if totals is not None:
        footer[2:] = [
            f"{totals.plain_tokens_per_s:.0f}",
            f"{totals.tokens_per_s:.0f}",
            f"{totals.speedup:.2f}×",
            length(totals.stats),
            f"{totals.stats.tokens_per_pass:.2f}",
            identical(outcomes),
        ]
    names = (
        "prompt",
        "T",
        "plain\ntok/s",
        "speculative\ntok/s",
        "speedup",
        "acceptance\nlength",
        "tokens\nper pass",
        "outputs\nidentical",
    )
    for name, foot in zip(names, footer, strict=True):
        justify = "left" if name == "prompt" else "right"
        table.add_column(
            name,
            Text(foot, "bold"),
            justify=justify,  # type: ignore[arg-type]
            overflow="fold",
        )
    for o in outcomes:
        stats = o.speculative.stats
        table.add_row(
            o.title,
            f"{o.temperature:g}",
            f"{len(o.plain.tokens) / o.plain_s:.0f}",
            f"{o.num_tokens / o.speculative_s:.0f}",
            f"{o.speedup:.2f}×",
            length(stats),
            f"{stats.tokens_per_pass:.2f}",
            identical([o]),
        )
    return table


def identical(outcomes: Sequence[Outcome]) -> str:
    return "yes" if all(o.first_difference is None for o in outcomes) else "NO"


def length(stats: SpeculationStats) -> str:
    return f"{stats.acceptance_length:.2f}" if stats.num_proposals else "no drafts"
