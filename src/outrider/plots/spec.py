"""Pictures of `outrider bench spec` and of learning from traffic, narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.plots.style import COLOURS, INK, figure, legend

Row = dict[str, Any]
WIDTH = 4.8  # inches: text of 10 points has 10 pixels on a phone
MEANS = ("six categories", "all eight")
LEAST_JUDGED = 12  # drafts: a share of fewer says nothing
PLAIN = "plain"


def _at(rows: Sequence[Row], temperature: float) -> list[Row]:
    return [row for row in rows if row["temperature"] == temperature]


def _drafters(rows: Sequence[Row]) -> list[str]:
    """Our contenders that draft, in the order of the file."""
    names = dict.fromkeys(row["contender"] for row in rows)
    return [name for name in names if name != PLAIN and ":" not in name]


def speed_by_category(rows: Sequence[Row], temperature: float, path: Path) -> None:
    """Tokens per second of every contender, peers included, category by category."""
    found = _at(rows, temperature)
    kinds = [kind for kind in dict.fromkeys(row["workload"] for row in found) if kind not in MEANS]
    kinds += [MEANS[-1]]
    names = list(dict.fromkeys(row["contender"] for row in found))
    peers = [name for name in names if ":" in name]
    title = f"Tokens per second, temperature {temperature:g}"
    with figure(path, title, width=WIDTH, height=0.42 * len(kinds) + 2.2) as axes:
        for name, colour in zip(names, (INK, *COLOURS), strict=False):
            speeds = {row["workload"]: row["tokens_per_s"] for row in found
                      if row["contender"] == name}  # fmt: skip
            places = [index for index, kind in enumerate(kinds) if kind in speeds]
            mark = "D" if name in peers else "o"
            label = name.removesuffix(" K=auto")
            values = [speeds[kinds[place]] for place in places]
            axes.plot(values, places, mark, color=colour, label=label)
        axes.axhline(len(kinds) - 1.5, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(kinds)), [_short(kind) for kind in kinds])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        legend(axes, columns=2)


def _short(kind: str) -> str:
    return "mean" if kind == MEANS[-1] else kind


def acceptance_by_position(rows: Sequence[Row], temperature: float, path: Path) -> None:
    """How often draft i is accepted if all before it were: all categories together."""
    found = [row for row in _at(rows, temperature) if row.get("accepted_lengths")]
    title = f"Acceptance by position, temperature {temperature:g}"
    with figure(path, title, width=WIDTH, height=3.6) as axes:
        for name, colour in zip(_drafters(found), COLOURS, strict=False):
            mine = [row for row in found if row["contender"] == name]
            shares = _by_position(mine)
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=colour,
                      label=name.removesuffix(" K=auto"))  # fmt: skip
        axes.set_xlabel("position in the draft")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("accepted, if all before were")
        axes.set_ylim(0, 1)
        legend(axes)


def _by_position(rows: Sequence[Row]) -> list[float]:
    """The mean over categories that judged enough drafts at this position."""
    shares: list[float] = []
    for place in range(max(len(row["conditional_acceptance"]) for row in rows)):
        known = [
            row["conditional_acceptance"][place]
            for row in rows
            if len(row["conditional_acceptance"]) > place
            and sum(row["accepted_lengths"][place:]) >= LEAST_JUDGED
        ]
        if 2 * len(known) < len(rows):
            break
        shares.append(sum(known) / len(known))
    return shares


def learning(blocks: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Acceptance length of a head that learns from traffic and of one that does not."""
    with figure(path, "Acceptance on new traffic", width=WIDTH, height=3.8) as axes:
        places = [row["block"] for row in blocks]
        for name, colour, mark in (("fixed", INK, "o--"), ("learnt", COLOURS[0], "o-")):
            values = [row[f"acceptance length, {name}"] for row in blocks]
            axes.plot(places, values, mark, color=colour, label=f"{name} head")
        previous = None
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.12 * (high - low))
        for row in blocks:
            if row["traffic"] != previous:
                if previous is not None:
                    axes.axvline(row["block"] - 0.5, color=INK, linewidth=1)
                axes.annotate(
                    row["traffic"], (row["block"] - 0.1, 0.94), color=INK,
                    xycoords=("data", "axes fraction"),
                )  # fmt: skip
                previous = row["traffic"]
        axes.set_xlabel("block of requests")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("tokens per step")
        legend(axes)
