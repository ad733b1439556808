"""Learning curves as a picture; needs the extra `plots`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError


def plot_run(provenance: Path, picture: Path) -> None:
    """Loss and alpha over the steps of the run that `provenance` records."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'outrider[plots]'") from None
    record: dict[str, Any] = json.loads(provenance.read_text())
    curve = record["run"]["curve"]
    steps = [row["step"] for row in curve]
    figure, loss_axis = pyplot.subplots(figsize=(7, 4))
    loss_axis.plot(steps, [row["loss"] for row in curve], color="tab:blue", label="loss")
    loss_axis.set_xlabel("step")
    loss_axis.set_ylabel("loss")
    if curve and "alpha" in curve[0]:
        alpha_axis = loss_axis.twinx()
        alpha_axis.plot(steps, [row["alpha"] for row in curve], color="tab:orange", label="alpha")
        alpha_axis.set_ylabel("alpha at temperature 1, on the batch")
        alpha_axis.set_ylim(0, 1)
        if checks := record["run"].get("checks"):
            length_axis = loss_axis.twinx()
            length_axis.spines.right.set_position(("axes", 1.13))
            places, lengths = zip(*checks, strict=True)
            length_axis.plot(places, lengths, "o", color="tab:green", label="held-out length")
            length_axis.set_ylabel("acceptance length, held-out")
    results = record["results"]
    if "alpha" in results.get("after", {}):
        before, after = results["before"]["alpha"], results["after"]["alpha"]
        loss_axis.set_title(f"held-out alpha {before:.3f} before, {after:.3f} after")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(loc="lower center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
