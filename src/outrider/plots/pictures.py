"""Every picture, by name: the results it needs and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.plots.style import COLOURS, INK, figure, legend, plain_line

Row = dict[str, Any]
Draw = Callable[[list[Row], Path], None]
PLAIN = "plain"
LEAST_JUDGED = 12  # drafts: a share of fewer says nothing


def _contenders(rows: Sequence[Row]) -> list[str]:
    return [c for c in dict.fromkeys(r["contender"] for r in rows) if c != PLAIN]


def _of(rows: Sequence[Row], contender: str) -> list[Row]:
    return [row for row in rows if row["contender"] == contender]


class NothingToDraw(ConfigError):
    """A result has no data for a picture, for example because nothing was drafted."""


def _drafting(rows: Sequence[Row]) -> list[Row]:
    found = [row for row in rows if row.get("accepted_lengths")]
    if not found:
        raise NothingToDraw("no drafts in this result: measure with a fixed -k")
    return found


def _interval(row: Row, name: str) -> tuple[float, float]:
    value = row[name]
    return value - row.get(f"{name}_low", value), row.get(f"{name}_high", value) - value


def _bars(rows: list[Row], path: Path, name: str, title: str, label: str) -> None:
    """Groups of bars: workloads, and in each of them the contenders."""
    groups = list(dict.fromkeys(row["workload"] for row in rows))
    names = _contenders(rows)
    width = 0.8 / max(1, len(names))
    with figure(path, title, width=max(6.0, 1.1 * len(groups) + 2)) as axes:
        for order, contender in enumerate(names):
            found = {r["workload"]: r for r in _of(rows, contender) if name in r}
            places = [i + (order - (len(names) - 1) / 2) * width for i in range(len(groups))]
            heights = [found.get(group, {}).get(name, 0.0) for group in groups]
            spread = [_interval(found[g], name) if g in found else (0.0, 0.0) for g in groups]
            bars = [list(side) for side in zip(*spread, strict=True)]
            error = bars if f"{name}_low" in next(iter(found.values()), {}) else None
            axes.bar(
                places,
                heights,
                0.92 * width,
                color=COLOURS[order % len(COLOURS)],
                label=contender,
                yerr=error,
                error_kw={"ecolor": INK, "elinewidth": 1},
            )
        axes.set_xticks(range(len(groups)), groups)
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(label)
        if name == "speedup":
            plain_line(axes)
        legend(axes)


def speedup_by_workload(rows: list[Row], path: Path) -> None:
    _bars(rows, path, "speedup", "Speedup over plain decoding, by workload", "speedup")


def acceptance_by_workload(rows: list[Row], path: Path) -> None:
    _bars(
        _drafting(rows),
        path,
        "acceptance_length",
        "Acceptance length, by workload (correction or bonus token counted)",
        "tokens per step with drafts",
    )


def acceptance_by_position(rows: list[Row], path: Path) -> None:
    """Of the contender with the deepest drafts of one length, workload by workload."""
    drafting = _drafting(rows)
    drafting = [r for r in drafting if isinstance(r.get("num_draft_tokens"), int)] or drafting
    deepest = max(drafting, key=lambda r: len(r["conditional_acceptance"]))["contender"]
    with figure(path, f"Acceptance by draft position, {deepest}") as axes:
        for colour, row in zip(COLOURS, _of(drafting, deepest), strict=False):
            given, reached = row["conditional_acceptance"], row["unconditional_acceptance"]
            known = [
                (place, share)
                for place, share in enumerate(given, 1)
                if sum(row["accepted_lengths"][place - 1 :]) >= LEAST_JUDGED
            ]
            places, shares = zip(*known, strict=True) if known else ((), ())
            axes.plot(places, shares, "o-", color=colour, label=row["workload"])
            axes.plot(range(1, len(reached) + 1), reached, "o:", color=colour, markersize=3)
        axes.set_xlabel("position in the draft")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("share accepted")
        axes.set_ylim(0, 1.02)
        axes.plot([], [], "-", color=INK, label="if all before were")
        axes.plot([], [], ":", color=INK, label="of all drafts")
        legend(axes)


def speedup_by_k(rows: list[Row], path: Path) -> None:
    """Measured speedup, and the formula's at bare costs."""
    fixed = [row for row in rows if isinstance(row.get("num_draft_tokens"), int)]
    proposers = [p for p in dict.fromkeys(r.get("proposer") for r in fixed) if p]
    with figure(path, "Speedup against draft length, measured and by the formula") as axes:
        for colour, proposer in zip(COLOURS, proposers, strict=False):
            mine = sorted(
                (r for r in fixed if r.get("proposer") == proposer),
                key=lambda r: int(r["num_draft_tokens"]),
            )
            places = [r["num_draft_tokens"] for r in mine]
            spread = list(zip(*(_interval(r, "speedup") for r in mine), strict=True))
            axes.errorbar(
                places,
                [r["speedup"] for r in mine],
                yerr=[list(side) for side in spread],
                fmt="o-",
                color=colour,
                capsize=2,
                label=proposer,
            )
            promised = [(r["num_draft_tokens"], r["formula"]) for r in mine if "formula" in r]
            if promised:
                axes.plot(*zip(*promised, strict=True), "--", color=colour, linewidth=1.2)
        for row in rows:
            if row.get("num_draft_tokens") == "auto":
                axes.axhline(row["speedup"], color=INK, linewidth=1, linestyle="-.")
                axes.annotate(
                    "auto",
                    (0.0, row["speedup"]),
                    xycoords=("axes fraction", "data"),
                    xytext=(3, 3),
                    textcoords="offset points",
                    fontsize=8,
                )
        plain_line(axes)
        axes.plot([], [], "--", color=INK, label="formula")
        axes.set_xlabel("drafts per step, K")
        axes.set_ylabel("speedup")
        axes.set_ylim(bottom=0)
        legend(axes)


def speedup_by_batch(rows: list[Row], path: Path) -> None:
    with figure(path, "Speedup against batch size") as axes:
        axes.set_xscale("log", base=2)
        contenders = zip(COLOURS, _contenders(rows), strict=False)
        for order, (colour, contender) in enumerate(contenders):
            mine = sorted(_of(rows, contender), key=lambda r: float(r["batch"]))
            places, values = [r["batch"] for r in mine], [r["speedup"] for r in mine]
            spread = list(zip(*(_interval(r, "speedup") for r in mine), strict=True))
            axes.errorbar(
                places,
                values,
                yerr=[list(side) for side in spread],
                fmt="o-",
                color=colour,
                capsize=2,
                label=contender,
            )
            at = crossover(places, values)
            if at is not None:
                axes.axvline(at, color=colour, linewidth=1, linestyle=":")
                axes.annotate(
                    f"crossover {at:.0f}",
                    (at, 0.06 + 0.06 * order),  # crossovers may lie close together
                    xycoords=("data", "axes fraction"),
                    xytext=(4, 0),
                    textcoords="offset points",
                    color=colour,
                    fontsize=8,
                )
        plain_line(axes)
        places = sorted({row["batch"] for row in rows})
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
        axes.set_xlabel("outputs decoded at once")
        axes.set_ylabel("speedup")
        axes.set_ylim(bottom=0)
        legend(axes)


def crossover(places: Sequence[float], values: Sequence[float]) -> float | None:
    """Where a curve first falls below 1, on a logarithmic axis; None if it does not."""
    before = None
    for place, value in zip(places, values, strict=True):
        if value < 1.0:
            if before is None:
                return float(place)
            last, high = before
            share = (high - 1.0) / (high - value)
            return float(last * (place / last) ** share)
        before = place, value
    return None


def acceptance_by_temperature(rows: list[Row], path: Path) -> None:
    with figure(path, "Acceptance against temperature") as axes:
        drafting = _drafting(rows)
        for colour, contender in zip(COLOURS, _contenders(drafting), strict=False):
            mine = sorted(_of(drafting, contender), key=lambda r: float(r["temperature"]))
            axes.plot(
                [r["temperature"] for r in mine],
                [r["acceptance_length"] for r in mine],
                "o-",
                color=colour,
                label=contender,
            )
        axes.set_xlabel("temperature")
        axes.set_ylabel("tokens per step with drafts")
        axes.set_ylim(bottom=0)
        legend(axes)


def accepted_lengths(rows: list[Row], path: Path) -> None:
    """Shares of drafts by how many of their tokens were accepted, workloads together."""
    drafting = _drafting(rows)
    names = _contenders(drafting)[:6]
    width = 0.8 / max(1, len(names))
    with figure(path, "How many drafts of a step were accepted") as axes:
        longest = 0
        for order, contender in enumerate(names):
            total: list[float] = []
            for row in _of(drafting, contender):
                counts = row["accepted_lengths"]
                total += [0.0] * (len(counts) - len(total))
                for length, count in enumerate(counts):
                    total[length] += count
            longest = max(longest, len(total))
            places = [k + (order - (len(names) - 1) / 2) * width for k in range(len(total))]
            shares = [count / sum(total) for count in total]
            axes.bar(places, shares, 0.92 * width, color=COLOURS[order], label=contender)
        axes.set_xticks(range(longest))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("accepted drafts")
        axes.set_ylabel("share of steps with drafts")
        legend(axes)


def time_split(rows: list[Row], path: Path) -> None:
    """Where a step's time goes, by contender: means over workloads."""
    names = [PLAIN, *_contenders(rows)]
    parts = {"draft_share": "draft", "verify_share": "verify", "other_share": "other"}
    found = {n: [r for r in _of(rows, n) if "draft_share" in r] for n in names}
    names = [name for name in names if found[name]]
    if not names:
        raise NothingToDraw("no shares of time in this result")
    with figure(path, "Where the time goes", height=0.45 * len(names) + 1.6) as axes:
        left = [0.0] * len(names)
        for colour, (key, label) in zip(COLOURS, parts.items(), strict=False):
            shares = [sum(r[key] for r in found[n]) / len(found[n]) for n in names]
            axes.barh(names, shares, 0.7, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the time of a step")
        legend(axes)


def throughput_latency(rows: list[Row], path: Path) -> None:
    names = dict.fromkeys(row["contender"] for row in rows)
    with figure(path, "Throughput against latency") as axes:
        for colour, contender in zip(COLOURS, names, strict=False):
            mine = sorted(_of(rows, contender), key=lambda r: int(r["clients"]))
            waits = [1e3 * r["tpot_s"] for r in mine]
            rates = [r["tokens_per_s"] for r in mine]
            axes.plot(waits, rates, "o-", color=colour, label=contender)
            for row, x, y in zip(mine, waits, rates, strict=True):
                axes.annotate(
                    f"{row['clients']}",
                    (x, y),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=8,
                )
        axes.set_xlabel("milliseconds per token of one client   (numbers: clients)")
        axes.set_ylabel("tokens per second, all clients")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        legend(axes)


# kind of result -> pictures that can be drawn of it
PICTURES: dict[str, dict[str, Draw]] = {
    "decode": {
        "speedup": speedup_by_workload,
        "acceptance": acceptance_by_workload,
        "positions": acceptance_by_position,
        "lengths": accepted_lengths,
        "time": time_split,
    },
    "sweep-k": {
        "speedup": speedup_by_k,
        "positions": acceptance_by_position,
        "lengths": accepted_lengths,
        "time": time_split,
    },
    "sweep-batch": {"speedup": speedup_by_batch, "time": time_split},
    "sweep-temperature": {"acceptance": acceptance_by_temperature},
    "sweep-context": {"time": time_split},
    "serve": {"front": throughput_latency},
}
