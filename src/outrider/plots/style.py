"""The style of all pictures: no background, colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError

# Mid-tones: enough contrast to white and to the dark grey of dark pages (about 4:1 each).
COLOURS = ["#2f81d6", "#d9730d", "#2b9348", "#c2457a", "#8a63d2", "#8c7a00", "#16969c", "#7d7d7d"]
INK = "#808488"  # axes and text: a grey that reads on both
GRID = "#80848840"
SUFFIXES = (".png", ".svg")


def check_file(path: Path) -> None:
    """Raises ConfigError for a file that could not be drawn, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"a picture is a .png or an .svg file, not {path.name}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'outrider[plots]'") from None


@contextmanager
def figure(path: Path, title: str, width: float = 7.0, height: float = 4.2) -> Iterator[Any]:
    """Axes to draw on; saved to `path` at the end, without a background."""
    check_file(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    look = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": plt.cycler(color=COLOURS),
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "outrider",
    }
    with plt.rc_context(look):
        drawn, axes = plt.subplots(figsize=(width, height), layout="constrained")
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left")
        try:
            yield axes
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn.savefig(path, transparent=True, dpi=160, metadata=_undated(path))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        finally:
            plt.close(drawn)


def _undated(path: Path) -> dict[str, None]:
    """The same figures give the same file."""
    return {"Date": None} if path.suffix == ".svg" else {}


def legend(axes: Any, columns: int = 3) -> None:
    """Below the picture, where it does not cover data."""
    axes.figure.legend(loc="outside lower center", ncols=columns, fontsize=8)


def plain_line(axes: Any) -> None:
    """A line at the speed of plain decoding."""
    axes.axhline(1.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.annotate(
        "plain",
        (1.0, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(3, -3),
        textcoords="offset points",
        ha="left",
        fontsize=8,
        color=INK,
    )
