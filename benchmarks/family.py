"""How often the bundled target accepts each bundled drafter, by workload, on held-out packages.

    python family/fetch.py && python benchmarks/family.py

Distributions are compared position by position (teacher-forced), so a figure does not depend on the
engine, the verifier or the machine: alpha is the mean of sum min(p, q) at the workload's
temperature, and acceptance lengths count the correction or bonus token, for four drafts (a DFlash
block: seven).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
import torch

from outrider.model.bundled import bundled_path
from outrider.model.heads import load_head
from outrider.train.config import DFlashRecipeConfig, Eagle3RecipeConfig, MedusaRecipeConfig
from outrider.train.data import read_documents
from outrider.train.measure import measure, model_logits
from outrider.train.models import load_model, load_tokenizer
from outrider.train.recipes.dflash import DFlashRecipe
from outrider.train.recipes.eagle3 import Eagle3Recipe
from outrider.train.recipes.heads import FrozenTarget, HeadRecipe
from outrider.train.recipes.medusa import MedusaRecipe
from outrider.train.sampler import generate_rows

HELDOUT = Path(__file__).parents[1] / "family" / ".work" / "heldout.txt.xz"
PROVENANCE = Path(__file__).parents[1] / "family" / "provenance"
PROMPT, LENGTH = 64, 320
Figures = dict[str, Any]
Measure = Callable[[torch.Tensor, int, float], Figures]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`greedy` and `sampled` are rows of tokens; figures leave out the first `skip` of each."""

    name: str
    greedy: torch.Tensor
    sampled: torch.Tensor
    skip: int
    temperature: float = 1.0


class Remembered(FrozenTarget):
    """The target's pass over each group of rows, made once for all drafters."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.passes: dict[bytes, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}

    def recall(self, tokens: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        key = tokens.numpy().tobytes()
        if key not in self.passes:
            states = super().states(tokens)
            self.passes[key] = states, self.logits(states[-1])
        return self.passes[key]

    def states(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.recall(tokens)[0]

    def next_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.recall(tokens)[1]

    def exit(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        return self.logits(self.model.model.norm(self.states(tokens)[layer]))


class Bench:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        folder = bundled_path("target")
        self.tokenizer = load_tokenizer(folder)
        self.target = load_model(folder).eval()
        self.frozen = Remembered(self.target)
        self.documents = read_documents([HELDOUT])

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def rows(self, texts: list[str], length: int) -> torch.Tensor:
        """The first tokens of the first texts that are long enough, spread over all of them."""
        found = [ids[:length] for ids in map(self.ids, texts) if len(ids) >= length]
        step = max(1, len(found) // self.num_rows)
        return torch.tensor(found[::step][: self.num_rows])

    def continued(self, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
        warmth = torch.full((len(prompts),), temperature)
        return generate_rows(self.target, prompts, LENGTH, warmth, seed=0)

    def workloads(self) -> list[Workload]:
        functions = [piece for document in self.documents[::5] for piece in functions_of(document)]
        pieces = functions[:: max(1, len(functions) // 400)]
        code = self.rows(
            [document[len(document) // 3 :] for document in self.documents[::9]], PROMPT
        )
        prose = self.rows([cut for piece in functions if (cut := inside_docstring(piece))], PROMPT)
        edits = self.edits(pieces)
        records = self.rows([signatures(document) for document in self.documents[::7]], LENGTH)
        greedy, sampled = self.continued(code, 0.0), self.continued(code, 1.0)
        hot = self.continued(code, 1.3)
        return [
            Workload(name="code completion", greedy=greedy, sampled=sampled, skip=PROMPT),
            Workload(
                name="docstring prose",
                greedy=self.continued(prose, 0.0),
                sampled=self.continued(prose, 1.0),
                skip=PROMPT,
            ),
            Workload(name="edit / rewrite", greedy=edits, sampled=edits, skip=170),
            Workload(name="JSON records", greedy=records, sampled=records, skip=PROMPT),
            Workload(
                name="code, temperature 1.3",
                greedy=greedy,
                sampled=hot,
                skip=PROMPT,
                temperature=1.3,
            ),
        ]

    def edits(self, functions: list[str]) -> torch.Tensor:
        """A function, a comment, and the function again with one name changed."""
        between = self.ids("\n\n\n# The same with a better name.\n")
        rows = []
        for function in functions:
            first, second = self.ids(function), self.ids(renamed(function))
            if min(len(first), len(second)) >= 170 - len(between):
                size = 170 - len(between)
                rows.append([*first[:size], *between, *second[:size]])
        return torch.tensor(rows[: self.num_rows])

    def drafters(self) -> dict[str, Measure]:
        plain = self.frozen.next_logits

        def model(name: str) -> Measure:
            draft = model_logits(load_model(bundled_path(name)).eval())
            return lambda rows, skip, t: measure(
                draft, plain, rows, skip=skip, temperature=t
            ).as_dict()

        def exit_at(layer: int) -> Measure:
            return lambda rows, skip, t: measure(
                lambda tokens: self.frozen.exit(tokens, layer),
                plain,
                rows,
                skip=skip,
                temperature=t,
            ).as_dict()

        def head(recipe: HeadRecipe) -> Measure:
            return lambda rows, skip, t: recipe.measure(
                rows, skip=skip, temperature=t, rows_per_pass=4
            )

        frozen = self.frozen
        heads: dict[str, Any] = {
            name: load_head(bundled_path(name)) for name in ("medusa", "eagle3", "dflash")
        }
        every = LENGTH
        medusa = MedusaRecipeConfig(positions_per_row=every)
        dflash = DFlashRecipeConfig(blocks_per_row=64)
        return {
            "draft (2.4M)": model("draft"),
            "mid (5M)": model("mid"),
            "EAGLE-3": head(
                Eagle3Recipe(frozen, Eagle3RecipeConfig(), torch.empty(0), heads["eagle3"])
            ),
            "DFlash": head(DFlashRecipe(frozen, dflash, heads["dflash"])),
            "Medusa": head(MedusaRecipe(frozen, medusa, heads["medusa"])),
            **{f"early exit, {layer} of 7 layers": exit_at(layer) for layer in (2, 3, 4)},
        }


def functions_of(document: str) -> list[str]:
    """Source of the top-level and nested functions of a file, long ones only."""
    found, lines = [], document.split("\n")
    for node in ast.walk(ast.parse(document)):
        if isinstance(node, ast.FunctionDef):
            text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(text) > 400:
                found.append(text)
    return found


def inside_docstring(function: str) -> str:
    """The function up to the middle of a long docstring, or nothing."""
    try:
        text = ast.get_docstring(ast.parse(function).body[0], clean=False)  # type: ignore[arg-type]
    except SyntaxError:
        return ""
    if not text or len(text) < 300:
        return ""
    start = function.find(text)
    return function[: start + len(text) // 2] if start > 0 else ""


def renamed(function: str) -> str:
    names = Counter(re.findall(r"\b[a-z][a-z_]{4,}\b", function))
    common = next(
        (name for name, count in names.most_common(3) if name not in ("self", "return")), ""
    )
    return re.sub(rf"\b{common}\b", "renamed_value", function) if common else function


def signatures(document: str) -> str:
    """A file's functions as JSON records."""
    records = [
        {
            "name": node.name,
            "line": node.lineno,
            "arguments": [argument.arg for argument in node.args.args],
            "returns": ast.unparse(node.returns) if node.returns else None,
            "decorators": [ast.unparse(decorator) for decorator in node.decorator_list],
        }
        for node in ast.walk(ast.parse(document))
        if isinstance(node, ast.FunctionDef)
    ]
    return json.dumps(records, indent=2)


def training() -> list[dict[str, Any]]:
    """What each member cost to train, from its provenance."""
    rows = []
    for name in ("target", "draft", "mid", "eagle3"):
        record = json.loads((PROVENANCE / f"{name}.json").read_text())
        run, machine = record["run"], record["environment"]
        rows.append(
            {
                "trained": "medusa, eagle3, dflash together" if name == "eagle3" else name,
                "steps": run["num_steps"],
                "M tokens": round(run["tokens"] / 1e6),
                "GPU minutes": round(run["seconds"] / 60, 1),
                "on": machine["device"],
                "command": f"`python family/{record['command']}`",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=12, help="sequences per workload")
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options.rows)
    drafters = bench.drafters()
    tables: dict[str, list[dict[str, Any]]] = {}
    for workload in bench.workloads():
        rows = []
        for name, figures in drafters.items():
            sampled = figures(workload.sampled, workload.skip, workload.temperature)
            greedy = figures(workload.greedy, workload.skip, 1.0)
            rows.append(
                {
                    "drafter": name,
                    "alpha": round(sampled["alpha"], 3),
                    "acceptance length, sampled": round(sampled["sampled_acceptance_length"], 2),
                    "greedy agreement": round(greedy["agreement"], 3),
                    "acceptance length, greedy": round(greedy["greedy_acceptance_length"], 2),
                    "K": greedy["num_draft_tokens"],
                    "positions": sampled["num_positions"],
                }
            )
            print(workload.name, rows[-1], flush=True)
        tables[workload.name] = rows
        bench.frozen.passes.clear()
    tables["training"] = training()
    report.write("family-acceptance", "Acceptance of the bundled drafters", tables, NOTES)


NOTES = """Prompts from packages never trained on. Code, prose and temperature 1.3: the target's
own continuations (256 tokens), sampled ones for alpha and greedy ones for agreement. Edit and JSON:
given text, past its first part (170 and 64 tokens). Acceptance lengths count the correction or
bonus token; the sampled one is the ratio rule's expectation, 1 + the sum over k of the mean product
of k alphas."""


if __name__ == "__main__":
    main()
