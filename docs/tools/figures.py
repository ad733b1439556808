"""Draws docs/plots/*.svg from committed result files; `--check` compares without writing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLOTS = ROOT / "docs" / "plots"
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]

from results import gpu_passes, load, workloads  # noqa: E402

from outrider.plots import pictures, spec  # noqa: E402
from outrider.plots.style import COLOURS, figure, legend, plain_line  # noqa: E402

Draw = Callable[[Path], None]


def from_bench(name: str, draw: Callable[[list[Any], Path], None]) -> Draw:
    """A picture of a file that `outrider bench` wrote."""
    return lambda path: draw(load(name)["rows"], path)


def verify_cost(path: Path) -> None:
    """The time of a pass over M tokens, relative to a pass over one."""
    with figure(path, "What a pass over M tokens costs (one sequence)") as axes:
        colour = iter(COLOURS)
        for name, weights in (
            ("native-25M-160M", ("float32", "bfloat16", "int8")),
            ("native-700M", ("bfloat16", "int8")),
        ):
            for row in load(name)["tables"]["Verifying M tokens in one step"]:
                if row["weights"] not in weights or row["model"] == "160M":
                    continue
                keys = [key for key in row if key.startswith("verify(")]
                places = [1, *(int(key.split("(")[1].split(")")[0]) for key in keys)]
                values = [1.0, *(row[key] for key in keys)]
                label = f"{row['model']} {row['weights']}, CPU"
                axes.plot(places, values, "o-", color=next(colour), label=label)
        if passes := gpu_passes():
            values = [row["ms"] / passes[0]["ms"] for row in passes]
            places = [int(row["tokens"]) for row in passes]
            axes.plot(places, values, "s--", color=next(colour), label="8B bfloat16, GPU")
        plain_line(axes)
        axes.plot(
            [1, 17], [1, 17], ":", color="#808488", linewidth=1, label="if nothing were shared"
        )
        axes.set_xlabel("tokens verified in one pass, M")
        axes.set_ylabel("time, in passes over one token")
        axes.set_ylim(0, 6)
        axes.set_xlim(0.5, 17.5)
        legend(axes)


def proposers(path: Path) -> None:
    """Every proposer's speed on every workload."""
    kinds = workloads()
    names = [name for name in next(iter(kinds.values())) if name != "plain"]
    names += [name for found in kinds.values() for name in found if name not in (*names, "plain")]
    with figure(path, "Every proposer on every workload", height=5.2) as axes:
        for colour, (kind, found) in zip(COLOURS, kinds.items(), strict=False):
            there = [name for name in names if name in found]
            speeds = [found[name]["against plain"] for name in there]
            axes.plot(speeds, [names.index(n) for n in there], "o", color=colour, label=kind)
        axes.axvline(1, color="#808488", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel("speed against plain decoding (1: the dashed line)")
        legend(axes)


def plan_check(path: Path) -> None:
    """The plan's prediction relative to the server, by load."""
    rows = load("plan-check")["tables"]["predicted and measured"]
    with figure(path, "The plan and the server") as axes:
        ending = ": predicted / measured"
        names = [key for key in rows[0] if key.endswith(ending)]
        for name, colour in zip(names, COLOURS, strict=False):
            values = [row[name] for row in rows]
            axes.plot(values, "o-", color=colour, label=name.removesuffix(ending))
        axes.axhspan(0.85, 1.15, color="#808488", alpha=0.15, label="15 %")
        axes.axhline(1, color="#808488", linewidth=1)
        labels = [f"K = {row['K']}\n{row['load']:.0%}" for row in rows]
        axes.set_xticks(range(len(rows)), labels)
        axes.set_xlabel("drafts, and load as a share of what the server can do")
        axes.set_ylabel("predicted / measured")
        axes.set_ylim(bottom=0)
        legend(axes)


def fleet(path: Path) -> None:
    """Devices by load, with and without speculation, from hardware limits."""
    rows = load("plan-check")["tables"]["a fleet on paper"]
    with figure(path, "Devices for an 8B model, on paper") as axes:
        rates = [row["requests per s"] for row in rows]
        for how, mark, colour in zip(("without", "with"), ("s--", "o-"), COLOURS, strict=False):
            devices = [row[f"devices {how}"] for row in rows]
            axes.loglog(rates, devices, mark, color=colour, label=f"{how} speculation")
        axes.set_xlabel("requests per second")
        axes.set_ylabel("devices")
        legend(axes)


def chats(draw: Callable[[list[Any], float, Path], None], temperature: float) -> Draw:
    """A picture of the chats of eight categories."""
    return lambda path: draw(load("spec")["rows"], temperature, path)


def learning(path: Path) -> None:
    spec.learning(load("learning")["tables"]["by block"], path)


FIGURES: dict[str, Draw] = {
    "proposers": proposers,
    "plan-check": plan_check,
    "fleet": fleet,
    "verify-cost": verify_cost,
    "speedup-by-k": from_bench("speedup-by-k", pictures.speedup_by_k),
    "auto-by-batch": from_bench("auto-by-batch", pictures.speedup_by_batch),
    "time-split": from_bench("auto-by-workload", pictures.time_split),
    "chats-speed": chats(spec.speed_by_category, 0.0),
    "chats-acceptance": chats(spec.acceptance_by_position, 0.0),
    "learning": learning,
}


def draw_all(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in FIGURES.items():
        path = folder / f"{name}.svg"
        try:
            draw(path)
        except FileNotFoundError as error:  # not measured yet
            print(f"{name}: there is no {Path(error.filename).name}", file=sys.stderr)
            continue
        lines = [line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        drawn.append(path)
    return drawn


def stale() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return [
            path.name
            for path in draw_all(Path(folder))
            if not (PLOTS / path.name).is_file()
            or (PLOTS / path.name).read_bytes() != path.read_bytes()
        ]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit("out of date: " + ", ".join(stale()) if stale() else 0)
    draw_all(PLOTS)
