"""Writes examples/alpha_against_temperature.ipynb with its outputs, without Jupyter.

The cells below are the source; running this script executes them and stores what they print and
draw. A test executes the cells of the committed notebook.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "alpha_against_temperature.ipynb"

CELLS = [
    (
        "markdown",
        """# Acceptance against temperature

How often is a drafted token right? At temperature 0 both models choose their most probable token,
which is often the same. A higher temperature makes the target's distribution flatter, and any guess
is right less often.

This notebook compares three ways to draft for a *sampling* target on the same positions:

- **ratio rule**: the draft is sampled from q and accepted with probability min(1, p/q). It accepts
  Σ min(p, q); no rule accepts more of one guess.
- **coupled**: draft and target draw with the same noise; accepted if they agree. The default.
- **greedy draft**: the most probable token of the draft, at any temperature. A common choice.""",
    ),
    (
        "code",
        """import torch

from outrider import LLM
from outrider.layout import Slice, pack
from outrider.theory import coupled_acceptance, greedy_acceptance, ratio_acceptance

llm = LLM("bundled")
draft = LLM("bundled:draft", num_draft_tokens=0)""",
    ),
    (
        "markdown",
        "The target samples a text. At each of its positions both distributions are evaluated.",
    ),
    (
        "code",
        """PROMPTS = ["def add(a, b):", "class Stack:", "import json\\n"]
NUM_TOKENS = 32
RULES = (ratio_acceptance, coupled_acceptance, greedy_acceptance)


def logits(model, tokens):
    \"\"\"The logits after every token of a text, in one pass.\"\"\"
    target, kv = model.engine.target, model.engine.kv
    [scratch] = kv.scratch(1)
    kv.reserve(scratch, len(tokens))
    text = Slice(tokens, 0, kv.table(scratch), proposal=None, scored=range(len(tokens)))
    rows = target.forward(pack([text])).logits_RV.clone()
    kv.free(scratch)
    return rows


def alphas(temperature):
    \"\"\"Mean acceptance of the three ways on the target's own samples.\"\"\"
    found = []
    for seed, prompt in enumerate(PROMPTS):
        text = llm.generate(prompt, max_tokens=NUM_TOKENS, temperature=temperature, seed=seed)
        tokens = text.prompt_tokens + text.tokens
        p = torch.softmax(logits(llm, tokens).double() / temperature, -1).tolist()
        q = torch.softmax(logits(draft, tokens).double() / temperature, -1).tolist()
        for row in range(len(text.prompt_tokens) - 1, len(tokens) - 1):
            found.append([rule(p[row], q[row]) for rule in RULES])
    return torch.tensor(found).mean(0).tolist()""",
    ),
    (
        "code",
        """temperatures = [0.2, 0.6, 1.0, 1.4]
curves = [alphas(t) for t in temperatures]
for t, (ratio, coupled, greedy) in zip(temperatures, curves):
    print(f"T = {t}: ratio {ratio:.2f}, coupled {coupled:.2f}, greedy draft {greedy:.2f}")""",
    ),
    (
        "code",
        """import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, values in zip(["ratio rule", "coupled (default)", "greedy draft"], zip(*curves)):
    axes.plot(temperatures, values, "o-", label=name)
axes.set(xlabel="temperature", ylabel="acceptance of one guess", ylim=(0, 1))
axes.grid(alpha=0.3)
axes.legend();""",
    ),
    (
        "markdown",
        """The coupled rule is close to the ratio rule and needs no q. Greedy drafts are accepted
less often under sampling. Replace `bundled` by your own folders to see your pair.
`docs/explanation/coupled-rule.md` explains the curves.""",
    ),
]


def execute(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """A cell's outputs as Jupyter would store them: printed text, then a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "cell", "exec"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=110, metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    plt.close("all")
    return outputs


def main() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    for number, (kind, source) in enumerate(CELLS):
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"cell-{number}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": execute(source, names)}
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    main()
