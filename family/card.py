"""Ship what build.py made and write the model cards: `python family/card.py`.

The built models and their records are copied into the repository; what was not built again stays
as it is. A card says what a model was trained on, how, with what result, and the SHA-256 of every
file; the hashes are also written to family/hashes.json, against which a test checks the folders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUNDLED = HERE.parent / "src" / "outrider" / "bundled"
RECIPES = {
    "target": (
        "Llama-shaped, {size}. Next-token loss plus 0.15 times the loss of two early exits a step "
        "(layers 1-6 in turn, through the model's own norm and head) and layer dropout rising to "
        "5 %, so that its first layers can draft for it. Muon for the matrices, AdamW for the "
        "rest, sequences of 2048."
    ),
    "draft": (
        "Llama-shaped, {size}. Distilled from the target: forward KL whose weight gives way to the "
        "total variation over the run (0 to 90 %), half of each batch text, half the target's own "
        "generations ({own:.1f} M tokens; 60 % at temperature 1, 30 % at 0.7, 10 % greedy). Muon "
        "and AdamW, sequences of 2048."
    ),
}
RECIPES["mid"] = RECIPES["draft"]
HEADS = (
    " The target is frozen; half of each batch is text ({text}), half the target's own "
    "generations ({own:.1f} M tokens); forward KL giving way to "
    "the total variation, weight 0.8^k for depth k. All three heads were trained in one run."
)
RECIPES["medusa"] = (
    "{size}, on the target's last hidden state, through the target's own output head." + HEADS
)
RECIPES["eagle3"] = (
    "{size}, on the target's hidden states after layers 2, 4 and 6 and the next token; trained on "
    "its own outputs, unrolled 4 times; draft vocabulary of the 4096 most frequent ids." + HEADS
)
RECIPES["dflash"] = (
    "{size}, blocks of 8 (one known token, seven guesses) denoised in one pass over the target's "
    "features after layers 2, 4 and 6; Markov bias of rank 32 and a confidence." + HEADS
)
SIZES = {
    "target": "512 wide, 7 layers, 8 heads over 4 kv heads",
    "mid": "256 wide, 4 layers, 4 heads over 2 kv heads",
    "draft": "192 wide, 2 layers, 3 heads over 1 kv head",
    "medusa": "Four Medusa heads of two residual layers",
    "eagle3": "One EAGLE-3 decoder layer, 512 wide",
    "dflash": "Two DFlash layers, 512 wide",
}


# What the records of the shipped models do not say: the heads were trained on a part of the text.
UNRECORDED: dict[str, dict[str, Any]] = {
    "models": {"text": "", "own": 16.8},
    "heads": {"text": "36 M characters of the training files, drawn at random", "own": 8.4},
}


def amounts(name: str, data: dict[str, Any]) -> dict[str, Any]:
    if "num_tokens" not in data:
        return UNRECORDED["models" if name in ("target", "draft", "mid") else "heads"]
    own = data.get("num_own_tokens", 0) / 1e6
    return {"text": f"{data['num_tokens'] / 1e6:.0f} M tokens", "own": own}


def file_hashes(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "README.md"
    }


def data_section(corpus: dict[str, Any]) -> str:
    packages = corpus["packages"]
    trained = [package for package in packages if package["role"] == "train"]
    heldout = [package for package in packages if package["role"] == "heldout"]
    licences = Counter(package["licence"] for package in trained)
    chars = sum(package["num_chars"] for package in trained)
    return (
        f"Python source of {len(trained)} packages (the standard library among them), "
        f"{chars / 1e6:.0f} M characters, pinned by version and SHA-256 in `family/packages.txt` "
        "and cleaned by `family/fetch.py`: no tests, vendored, generated or minified files, no "
        "copyleft notices, exact and near copies dropped, at most "
        f"{corpus['package_cap'] / 1e6:.1f} M characters a package. Licences: "
        + ", ".join(f"{name} {count}" for name, count in licences.most_common())
        + ". Never trained on, used to measure: "
        + ", ".join(f"{package['name']} {package['version']}" for package in heldout)
        + "."
    )


WORKLOADS = {
    "heldout_text": "held-out packages",
    "own_samples": "target's own samples, T=1",
    "own_greedy": "target's own greedy text",
}
NOTE = """
alpha is the mean of sum min(p, q) over positions; acceptance length is for greedy decoding and
counts the correction or bonus token. Own text continues prompts from held-out packages.
"""


def results_section(name: str, record: dict[str, Any]) -> str:
    """The measured figures as a table: by exit layer, by kind of text, or by depth."""
    results = record["results"]
    lines = []
    if "heldout_nats" in results:
        lines += [
            f"Held-out loss {results['heldout_nats']:.3f} nats a token of 3.4 characters.",
            "",
        ]
    rows: Any = [(label, results[key]) for key, label in WORKLOADS.items() if key in results]
    first = "on"
    if name == "target":
        first, rows = "drafter: first layers", results["exits"].items()
    depth = next(iter(dict(rows).values()))["num_draft_tokens"]
    lines += [f"| {first} | alpha (T=1) | greedy agreement | acceptance length, K={depth} |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| {label} | {figures['alpha']:.3f} | {figures['agreement']:.3f} "
        f"| {figures['greedy_acceptance_length']:.2f} |"
        for label, figures in rows
    ]
    for label, figures in rows:
        if "alpha_by_depth" in figures:
            values = ", ".join(f"{alpha:.3f}" for alpha in figures["alpha_by_depth"])
            lines += ["", f"alpha by depth on {label}: {values}."]
    return "\n".join(lines) + "\n" + NOTE.rstrip()


def write_card(name: str, models: Path, corpus: dict[str, Any], sample: str) -> dict[str, str]:
    folder = BUNDLED / name
    if (models / name).exists():
        shutil.copytree(models / name, folder, dirs_exist_ok=True)
        shutil.copy(models / f"{name}.json", HERE / "provenance")
    record = json.loads((models / f"{name}.json").read_text())
    hashes = file_hashes(folder)
    run, machine = record["run"], record["environment"]
    millions = record["results"]["num_parameters"] / 1e6
    parts = [
        "---\nlicense: apache-2.0\nlanguage: en\ntags: [code, python, speculative-decoding]\n---",
        f"# outrider-{name}: {millions:.1f} M parameters",
        "A small model of Python source, shipped so that speculative decoding can be tried offline "
        "on a CPU. It writes plausible Python; it knows little and must not be relied on for facts "
        "or correct programs.",
        "## Data\n\n" + data_section(corpus),
        "## Recipe\n\n"
        + RECIPES[name].format(size=SIZES[name], **amounts(name, record["data"]))
        + f" {run['tokens'] / 1e6:.0f} M tokens in {run['num_steps']} steps, "
        f"{run['seconds'] / 60:.1f} minutes on one {machine['device']} (torch {machine['torch']}). "
        f"Command: `python family/{record['command']}`.",
        "## Measured\n\n" + results_section(name, record),
    ]
    if sample:
        parts.append("## Samples\n\n" + sample)
    table = "\n".join(f"| {file} | `{digest}` |" for file, digest in hashes.items())
    parts.append("## Hashes (SHA-256)\n\n| file | hash |\n|---|---|\n" + table)
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=Path, default=HERE / ".work" / "models")
    parser.add_argument("--corpus", type=Path, default=HERE / ".work" / "corpus.json")
    options = parser.parse_args()
    corpus = json.loads(options.corpus.read_text())
    samples = HERE / "samples.md"
    hashes = json.loads((HERE / "hashes.json").read_text())
    for name in RECIPES:
        text = samples.read_text() if name == "target" and samples.exists() else ""
        hashes[name] = write_card(name, options.models, corpus, text)
    (HERE / "hashes.json").write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
