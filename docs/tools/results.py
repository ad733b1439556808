"""Tables of the README and of pages that are read from committed result files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def headline() -> list[str]:
    """Engines side by side: tokens per second, plain and with drafts, greedy and sampled."""
    result = load("peers")
    tables = list(result["tables"].values())
    rates = [{row["engine"]: row["tokens/s"] for row in rows} for rows in tables]
    lines = ["| engine | " + " | ".join(result["tables"]) + " |", "|---|" + "---:|" * len(tables)]
    best = [max(rate.values()) for rate in rates]
    for engine in rates[0]:
        shown = [
            f"**{rate[engine]:.0f}**" if rate[engine] == most else f"{rate[engine]:.0f}"
            for rate, most in zip(rates, best, strict=True)
        ]
        lines.append(f"| {engine} | " + " | ".join(shown) + " |")
    about = result["provenance"]
    return [
        *lines,
        "",
        f"Tokens per second in one run on {about['machine']}, {about['date'][:10]}.",
        "[benchmarks/results/peers.md](benchmarks/results/peers.md) has the models, texts,",
        "versions and the command.",
    ]


def times() -> list[str]:
    """From a fresh clone: to the demo's first token and to the end of the tests."""
    result = load("first-run")
    demo, tests = (row["minutes"] for row in result["tables"]["Minutes"])
    cores = result["provenance"]["machine"].rpartition(", ")[2]
    return [
        f"From a fresh clone, on {cores} with nothing cached, it took {demo:.3g} minutes to the",
        f"demo's first token, most of them installation, and {tests:.3g} minutes to the end of the",
        "tests ([measured](benchmarks/results/first-run.md)).",
    ]


def proposers() -> list[str]:
    """Speed against plain decoding (acceptance length), by proposer and workload."""
    tables = load("proposers")["tables"]
    kinds = [name for name, rows in tables.items() if rows and "against plain" in rows[0]]
    names = list(dict.fromkeys(row["proposer"] for kind in kinds for row in tables[kind]))
    rows = {kind: {row["proposer"]: row for row in tables[kind]} for kind in kinds}
    best = {
        kind: max(row["against plain"] for name, row in rows[kind].items() if name != "plain")
        for kind in kinds
    }
    lines = ["| proposer | " + " | ".join(kinds) + " |", "|" + "---|" * (len(kinds) + 1)]
    for name in names:
        cells = []
        for kind in kinds:
            row = rows[kind].get(name)
            if row is None:
                cells.append("")
                continue
            text = f"{row['against plain']:.2f} ({row['acceptance length']:.1f})"
            cells.append(f"**{text}**" if row["against plain"] == best[kind] else text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def winners() -> list[str]:
    """For each workload the best and what is within three per cent of it, from the same file."""
    tables = load("proposers")["tables"]
    lines = []
    for kind, rows in tables.items():
        if not rows or "against plain" not in rows[0]:
            continue
        ranked = sorted(rows, key=lambda row: -row["against plain"])
        top = ranked[0]["against plain"]
        names = [
            f"`{row['proposer']}` ({row['against plain']:.2f})"
            for row in ranked
            if row["against plain"] >= 0.9 * top
        ]
        lines.append(f"- **{kind}**: {', '.join(names)}")
    return lines


def verify_cost() -> list[str]:
    """What a pass over M tokens costs, of every committed native result file."""
    lines: list[str] = []
    for name in ("native-25M-160M", "native-700M"):
        if not (RESULTS / f"{name}.json").exists():
            continue
        for row in load(name)["tables"]["Verifying M tokens in one step"]:
            columns = [key for key in row if key.startswith("verify(")]
            if not lines:
                shown = [
                    key.split("/")[0].replace("verify(", "M = ").rstrip(")") for key in columns
                ]
                lines = ["| model | weights | " + " | ".join(shown) + " |"]
                lines.append("|---|---|" + "---:|" * len(columns))
            cells = " | ".join(f"{row[key]:.2f}" for key in columns)
            lines.append(f"| {row['model']} | {row['weights']} | {cells} |")
    return lines


def gpu_passes() -> list[dict[str, float]]:
    """Passes of one sequence on a GPU, from one token on, if that was measured."""
    if not (RESULTS / "gpu-decode.json").exists():
        return []
    rows = load("gpu-decode")["tables"].get("Passes", [])
    return [row for row in rows if row["context"] == 512]


def verify_cost_gpu() -> list[str]:
    rows = gpu_passes()
    if not rows:
        return ["No result of a GPU is committed yet: `benchmarks/gpu_decode.py` makes one."]
    result = load("gpu-decode")
    device = re.search(r"NVIDIA \w+", result["notes"])
    name = device.group() if device else "one"
    wide = [row for row in rows if row["tokens"] > 1]
    costs = [f"{row['ms'] / rows[0]['ms']:.2f} for {row['tokens']:g} tokens" for row in wide]
    return [
        f"On a GPU ({name}), with 8 billion parameters in bfloat16, the curve is flatter still:",
        f"{', '.join(costs)}",
        "([gpu-decode.md](../../benchmarks/results/gpu-decode.md), table *Passes*).",
    ]


def gpu() -> list[str]:
    """What a pass takes on the GPU, in a sentence."""
    result = load("gpu-decode")
    passes = {(row["context"], row["tokens"]): row for row in result["tables"]["Passes"]}
    one, most = passes[512, 1], passes[512, 16]
    return [
        "On a GPU (`--device cuda`) passes and drafts are CUDA graphs of our own kernels: an 8B",
        f"shape decodes in {one['ms']:.1f} ms a token on one H200, and verifying 16 tokens costs",
        f"{most['over decode at 512']:.2f} times that ([how](docs/how-to/run-on-a-gpu.md),",
        "[figures](benchmarks/results/gpu-decode.md)).",
    ]


PARTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "README.md": {"times": times, "headline": headline, "gpu": gpu},
    "docs/how-to/choose-a-proposer.md": {"proposers": proposers, "winners": winners},
    "docs/explanation/memory-bound.md": {"verify cost": verify_cost, "gpu": verify_cost_gpu},
}
