"""Tables of the README and of pages, from committed result files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
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
    minutes = {row["what"]: row["minutes"] for row in result["tables"]["Minutes"]}
    cores = result["provenance"]["machine"].rpartition(", ")[2]
    installed = minutes.get("everything installed")
    share = f" ({installed:.2g} of them installation)" if installed else ""
    return wrap(
        f"From a fresh clone, on {cores} with nothing cached, it took "
        f"{minutes['first token of make demo']:.2g} minutes to the demo's first token{share} and "
        f"{minutes['end of make test']:.2g} minutes to the end of the tests "
        "([measured](benchmarks/results/first-run.md)).",
        105,
    )


def workloads() -> dict[str, dict[str, dict[str, float]]]:
    """Rows of the comparison of proposers, by workload and proposer."""
    tables = load("proposers")["tables"]
    return {
        kind: {row["proposer"]: row for row in rows}
        for kind, rows in tables.items()
        if rows and "against plain" in rows[0]
    }


def proposers() -> list[str]:
    """Speed against plain decoding (acceptance length), by proposer and workload."""
    rows = workloads()
    best = {kind: _best(found) for kind, found in rows.items()}
    lines = ["| proposer | " + " | ".join(rows) + " |", "|" + "---|" * (len(rows) + 1)]
    for name in dict.fromkeys(name for found in rows.values() for name in found):
        cells = []
        for kind, found in rows.items():
            row = found.get(name)
            if row is None:
                cells.append("")
                continue
            text = f"{row['against plain']:.2f} ({row['acceptance length']:.1f})"
            cells.append(f"**{text}**" if row["against plain"] == best[kind] else text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _best(found: dict[str, dict[str, float]]) -> float:
    return max(row["against plain"] for name, row in found.items() if name != "plain")


def winners() -> list[str]:
    """For each workload the best proposer and those within a tenth of it."""
    lines = []
    for kind, found in workloads().items():
        top = _best(found)
        ranked = sorted(found.items(), key=lambda item: -item[1]["against plain"])
        names = [
            f"`{name}` ({row['against plain']:.2f})"
            for name, row in ranked
            if row["against plain"] >= 0.9 * top
        ]
        lines.append(f"- **{kind}**: {', '.join(names)}")
    return lines


def start() -> list[str]:
    """Proposers to begin with if the workload is unknown, by share of each workload's best."""
    rows = workloads()
    lines = ["| you have | proposer | of the best, on average | at worst |", "|---|---|---:|---|"]
    for what, names in (
        ("a draft model", ("draft-model", "draft-tree", "hybrid")),
        ("nothing but the target", ("ngram", "suffix", "quantized", "lookahead")),
    ):
        shares = {
            name: {
                kind: found[name]["against plain"] / _best(found) for kind, found in rows.items()
            }
            for name in names
        }
        means = {name: sum(found.values()) / len(found) for name, found in shares.items()}
        for place, name in enumerate(sorted(names, key=lambda name: -means[name])):
            worst = min(shares[name], key=shares[name].__getitem__)
            shown = f"**`{name}`**" if place == 0 else f"`{name}`"
            lines.append(
                f"| {'' if place else what} | {shown} | {means[name]:.2f} | "
                f"{shares[name][worst]:.2f} ({worst}) |"
            )
    return lines


def drafting() -> list[str]:
    """Which share of the time each proposer drafts."""
    [(kind, found)] = [*workloads().items()][:1]
    ranked = sorted(found.items(), key=lambda item: item[1]["drafting"])
    shares = [f"`{name}` {row['drafting']:.0%}" for name, row in ranked if name != "plain"]
    return wrap(f"Drafting took this share of the time ({kind}): {', '.join(shares)}.", 110)


def ranked(names: Sequence[str], kinds: Sequence[str]) -> list[tuple[str, list[float]]]:
    """These proposers with their speeds on these workloads, best on average first."""
    rows = workloads()
    speeds = [(name, [rows[kind][name]["against plain"] for kind in kinds]) for name in names]
    return sorted(speeds, key=lambda item: -sum(item[1]))


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
    """Passes of one sequence on a GPU, from one token on, if measured."""
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
    """The time of a pass on the GPU, in a sentence."""
    result = load("gpu-decode")
    passes = {(row["context"], row["tokens"]): row for row in result["tables"]["Passes"]}
    one, most = passes[512, 1], passes[512, 16]
    return [
        "On a GPU (`--device cuda`) passes and drafts are CUDA graphs of our own kernels: an 8B",
        f"shape decodes in {one['ms']:.1f} ms a token on one H200, and verifying 16 tokens costs",
        f"{most['over decode at 512']:.2f} times that ([how](docs/how-to/run-on-a-gpu.md),",
        "[figures](benchmarks/results/gpu-decode.md)).",
    ]


def gpu_figures() -> list[str]:
    """The measured times of passes, cycles and loops on the GPU."""
    tables = load("gpu-decode")["tables"]
    rows: list[tuple[str, str]] = []
    passes = {(row["context"], row["tokens"]): row for row in tables["Passes"]}
    one = passes[512, 1]
    share = f"{one['of the floor']:.0%} of what reading the weights allows at the rate of a copy"
    rows.append(("one token at context 512", f"{one['ms']:.2f} ms, {share}"))
    for context, tokens in ((512, 5), (512, 16), (4096, 1)):
        if row := passes.get((context, tokens)):
            what = f"{tokens} token{'s' * (tokens > 1)} at context {context}"
            rows.append((what, f"{row['over decode at 512']:.2f} times that"))
    for row in tables.get("Cycles, K = 4, context 512", []):
        text = f"{row['parts over cycle']:.1%} of it is its drafts and its verifying pass"
        rows.append((f"a cycle of K = 4, draft of {row['draft']}", text))
    loops = {row["loop"]: row for row in tables.get(f"transformers, {ONE}, greedy", [])}
    for row in tables.get(f"Decoding, {ONE}", []):
        if row["K"] in (0, 4) and row["runners-up"] in (0, 2):
            what = f"K = {row['K']}" if row["K"] else "plain"
            what += ", int8 draft" if row["draft"] == "int8" else ""
            what += ", runners-up" if row["runners-up"] else ""
            text = f"{row['tokens_per_s']:.0f} tokens/s"
            peer = loops.get("assisted" if row["K"] else "generate")
            if peer and not row["temperature"]:
                text += f", {row['tokens_per_s'] / peer['tokens_per_s']:.1f} times transformers'"
                text += " assisted generation" if row["K"] else " `generate`"
            rows.append((f"{what}, temperature {row['temperature']:g}, bare cycle", text))
    return ["| | |", "|---|---|", *(f"| {what} | {text} |" for what, text in rows)]


def machine() -> list[str]:
    """What a pass over 5 and over 17 (GPU: 16) tokens costs, by machine and weights."""
    lines = ["| machine, model | 5 tokens | 17 tokens |", "|---|---:|---:|"]
    for row in load("native-700M")["tables"]["Verifying M tokens in one step"]:
        cells = [row[key] for key in row if key.startswith(("verify(5)", "verify(17)"))]
        name = f"2 CPU cores, {row['model']}, {row['weights']}"
        lines.append(f"| {name} | " + " | ".join(f"{cost:.2f}" for cost in cells) + " |")
    passes = {row["tokens"]: row["ms"] for row in gpu_passes()}
    if passes:
        few, many = (passes[count] / passes[1] for count in (5, 16))
        lines.append(f"| H200, 8B, bfloat16 | {few:.2f} | {many:.2f} (16) |")
    return lines


def batch() -> list[str]:
    """Plain speed, and speedups of a fixed K and of auto, by batch size."""
    rows = load("auto-by-batch")["rows"]
    found = {(row["batch"], row["num_draft_tokens"]): row for row in rows}
    lines = ["| sequences | plain, tokens/s | K = 4 | auto |", "|---:|---:|---:|---:|"]
    for size in dict.fromkeys(row["batch"] for row in rows):
        speedups = [f"{found[size, k]['speedup']:.2f}" for k in (4, "auto")]
        plain = found[size, 0]["tokens_per_s"]
        lines.append(f"| {size:g} | {plain:.0f} | " + " | ".join(speedups) + " |")
    return lines


def text() -> list[str]:
    """By workload: look-ups alone, and with a draft model."""
    lines = [
        "| text | `suffix`: no drafter | `draft-model` | `hybrid`: both |",
        "|---|---:|---:|---:|",
    ]
    for kind, found in workloads().items():
        cells = [f"{found[n]['against plain']:.2f}" for n in ("suffix", "draft-model", "hybrid")]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


MEANS = ("six categories", "all eight")  # rows of `bench spec`


def _chats() -> dict[tuple[str, float], dict[str, float]]:
    """Speedups of Outrider's proposers with SmolLM2: (kind of chat, temperature) -> by proposer."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for row in load("spec")["rows"]:
        name, _, ours = row["contender"].partition(" K=")
        if ours:
            found.setdefault((row["workload"], row["temperature"]), {})[name] = row["speedup"]
    return found


def chats() -> list[str]:
    """By kind of chat: speedups of every proposer, greedy and sampled."""
    found = _chats()
    columns = [(t, name) for t in sorted({t for _, t in found}) for name in ("suffix", "eagle3")]
    heads = [f"`{name}`, T = {t:g}" for t, name in columns]
    lines = ["| kind | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for kind in dict.fromkeys(kind for kind, _ in found):
        cells = [f"{found[kind, t][name]:.2f}" for t, name in columns]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def chat_means() -> list[str]:
    """Means over all kinds of chats: speedups by proposer."""
    found = {t: speeds for (kind, t), speeds in _chats().items() if kind == "all eight"}
    lines = ["| drafts with | " + " | ".join(f"T = {t:g}" for t in sorted(found)) + " |"]
    lines.append("|---|" + "---:|" * len(found))
    for name in next(iter(found.values())):
        cells = [f"{found[t][name]:.2f}" for t in sorted(found)]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return lines


def chats_in_short() -> list[str]:
    """The drafter's mean over all kinds of chats by temperature, and its worst case."""
    found = _chats()
    least = min(speeds["eagle3"] for (kind, _), speeds in found.items() if kind not in MEANS)
    greedy, warm = (found["all eight", t]["eagle3"] for t in (0.0, 0.8))
    return wrap(
        f"- **High temperature, small models.** Drafts are accepted less often if the target's "
        f"distribution is flat. SmolLM2 with its drafter is {greedy:.2f} times plain decoding over "
        f"eight kinds of greedy chats, {warm:.2f} times at temperature 0.8, {least:.2f} in the "
        "worst case "
        "([measured](benchmarks/results/spec.md)).",
        115,
        subsequent_indent="  ",
    )


def temperature() -> list[str]:
    """Acceptance length and speedup of auto, by temperature."""
    rows = [row for row in load("temperature")["rows"] if row["num_draft_tokens"] == "auto"]
    shown = [f"{row['temperature']:g}" for row in rows]
    return [
        "| temperature | " + " | ".join(shown) + " |",
        "|---|" + "---:|" * len(rows),
        "| speedup | " + " | ".join(f"{row['speedup']:.2f}" for row in rows) + " |",
        "| tokens per step with drafts | "
        + " | ".join(f"{row['acceptance_length']:.1f}" for row in rows)
        + " |",
    ]


ONE = "one sequence, 512 tokens of prompt"
PARTS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "README.md": {"times": times, "headline": headline, "gpu": gpu, "chats": chats_in_short},
    "docs/how-to/will-it-help.md": {
        "machine": machine,
        "batch": batch,
        "text": text,
        "chats": chats,
        "temperature": temperature,
    },
    "docs/how-to/choose-a-proposer.md": {
        "start": start,
        "proposers": proposers,
        "winners": winners,
        "drafting": drafting,
        "chats": chat_means,
    },
    "docs/how-to/run-on-a-gpu.md": {"figures": gpu_figures},
    "docs/explanation/memory-bound.md": {"verify cost": verify_cost, "gpu": verify_cost_gpu},
}
