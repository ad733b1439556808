"""The doctor's picture: predicted speedup against K, for each batch size."""

from __future__ import annotations

from pathlib import Path

from outrider.doctor.advice import Advice
from outrider.doctor.curves import DEEPEST, Curves
from outrider.plots.style import COLOURS, figure, legend, plain_line


def draw_doctor(curves: Curves, advice: list[Advice], path: Path) -> None:
    with figure(path, "Predicted speedup over plain decoding") as axes:
        for colour, entry in zip(COLOURS, advice, strict=False):
            name = entry.proposer or next(iter(curves.worth))
            counts = range(DEEPEST + 1)
            speedups = [curves.speedup(name, entry.batch, k) for k in counts]
            axes.plot(counts, speedups, color=colour, label=f"batch {entry.batch}, {name}")
            k = entry.num_draft_tokens
            axes.plot([k], [speedups[k]], "o", color=colour)
        plain_line(axes)
        axes.set_xlabel("drafts per step, K   (dots: the advice)")
        axes.set_ylabel("speedup")
        axes.set_ylim(bottom=0)
        legend(axes)
