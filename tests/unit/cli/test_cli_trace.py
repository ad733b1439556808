"""`--trace`: every token's origin, readable with colours, without them, and without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cli import trace
from outrider.events import StepEvent
from outrider.origins import Kind, judged

from .calling import Command


@pytest.fixture
def pair(pair: list[str]) -> list[str]:
    """Four drafts a step: whether they pay on this machine is another test's business."""
    return [*pair, "-k", "4"]


SPELLED = {1: "a", 2: " b", 3: "\n    c", 4: "d"}


def event(
    drafted: list[int], path: list[int], own: list[int], parents: list[int] | None = None
) -> StepEvent:
    return StepEvent(
        request_id="r",
        sample_index=0,
        step=1,
        tokens=[drafted[node] for node in path] + own,
        text="",
        finish_reason=None,
        draft_tokens=drafted,
        draft_parents=parents,
        path=path,
        source="draft-model" if drafted else "",
    )


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (event([], [], [4]), [Kind.TARGET]),
        (event([1, 2], [], [4]), [Kind.REJECTED, Kind.REJECTED, Kind.CORRECTION]),
        (event([1, 2], [0], [4]), [Kind.ACCEPTED, Kind.REJECTED, Kind.CORRECTION]),
        (event([1, 2], [0, 1], [4]), [Kind.ACCEPTED, Kind.ACCEPTED, Kind.BONUS]),
        (event([1, 2], [0], []), [Kind.ACCEPTED, Kind.UNUSED]),  # the output ended in the draft
        (event([1, 2], [1], [4], [-1, -1]), [Kind.ACCEPTED, Kind.REJECTED, Kind.BONUS]),
        (event([1, 2], [0], [4], [-1, 0]), [Kind.ACCEPTED, Kind.REJECTED, Kind.CORRECTION]),
    ],
)
def test_kinds(step: StepEvent, kinds: list[Kind]) -> None:
    assert [kind for kind, _ in judged(step)] == kinds


def render(*, color: str | None, no_color: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=color is not None,
        color_system=color,  # type: ignore[arg-type]
        no_color=no_color,
        soft_wrap=True,
    )
    step = event([1, 3, 2], [0, 1], [4])
    console.print(
        trace.running_text(step, SPELLED.__getitem__, marks=trace.needs_marks(console)), end=""
    )
    return out.getvalue()


def test_marks_where_no_style_can_be_shown() -> None:
    assert render(color=None) == "✓a✓⏎\n    c✗ b→d"


def test_shapes_remain_without_colour() -> None:
    text = render(color="standard", no_color=True)
    assert "\x1b[4ma\x1b[0m" in text  # underlined
    assert "\x1b[9m b\x1b[0m" in text  # struck through
    assert "\x1b[1md\x1b[0m" in text  # bold
    assert "\x1b[3" not in text.replace("\x1b[3m", "")  # no foreground colour


def test_colours() -> None:
    text = render(color="standard")
    assert "\x1b[4;32ma\x1b[0m" in text
    assert "\x1b[9;31m b\x1b[0m" in text
    assert "\x1b[1;33md\x1b[0m" in text


def test_invisible_characters() -> None:
    assert trace.visible("a\n\tb\x1b[") == "a⏎⇥b\\x1b["
    assert trace.cell(" x\n        y") == "·x⏎·×8y"


def test_trace_of_a_run(command: Command, pair: list[str]) -> None:
    args = ["generate", *pair, "-p", "hello", "-m", "30"]
    record = command(*args, "--json").record
    out = command(*args, "--trace").out
    for mark in "✓✗→":
        assert mark in out
    assert "accepted draft" in out  # the legend
    assert "from the target" in out  # the table
    assert out.count("draft-model") + out.count("plain") >= record["num_passes"]
    assert "if all before it held" in out  # acceptance by position
    assert "\x1b" not in out  # not a terminal


def test_trace_and_json(command: Command, pair: list[str]) -> None:
    ran = command("generate", *pair, "-p", "hello", "-m", "12", "--trace", "--json")
    assert ran.record["num_tokens"] == 12
    assert "from the target" in ran.out
