"""Which loss teaches a draft most: the 2.4M draft with several, at once, on the same batches.

    python benchmarks/family_ablation.py [--steps N] [--tiny]    # on a GPU, after family/build.py

Every variant starts from the same weights and sees the same rows in the same order: text, and the
target's own generations as often, mostly in rows as long as one generation. The target's states
are computed once for all of them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import report
import torch

from outrider.train.config import DraftConfig
from outrider.train.data import BatchSource, Mixture, Rows, Windows
from outrider.train.measure import measure, model_logits
from outrider.train.models import llama
from outrider.train.provenance import environment
from outrider.train.recipes.draft import DraftRecipe
from outrider.train.recipes.heads import FrozenTarget, Together
from outrider.train.trainer import train

FAMILY = Path(__file__).parents[1] / "family"
sys.path.insert(0, str(FAMILY))

family = import_module("build")

VARIANTS = {
    "forward KL": {"tvd_share": 0.0},
    "KL, TV rising to 90 % over the run": {"tvd_share": 0.9},
    "KL, TV alone from half of the run on": {"tvd_share": 1.0, "tvd_by": 0.5},
    "the same, a third of the TV at temperature 1/2": {
        "tvd_share": 1.0,
        "tvd_by": 0.5,
        "sharp_share": 1 / 3,
    },
}


OWN_ROWS, OWN_SHARES = 12288, {1.0: 0.7, 0.7: 0.2, 0.0: 0.1}  # generations, by temperature


@dataclass
class Lengths:
    """Three steps of short rows, then one of half as many rows twice as long."""

    short: BatchSource
    long: BatchSource

    def rows(self, step: int, num_rows: int) -> torch.Tensor:
        if step % 4 == 3:
            return self.long.rows(step // 4, num_rows // 2)
        return self.short.rows(step - step // 4, num_rows)


def rows_of(build: Any, target: Any) -> Lengths:
    short, text = build.length // 2, build.tokens("train")
    own = build.own_rows(target, "train", 8 if build.tiny else OWN_ROWS, OWN_SHARES)
    mixed = Mixture([(Windows(text, short, seed=2), 1 / 3), (Rows(own.view(-1, short), 3), 2 / 3)])
    return Lengths(mixed, Windows(text, build.length, seed=5))


def heldout_texts(build: Any, target: Any) -> dict[str, torch.Tensor]:
    num_rows = 4 if build.tiny else 64
    return {
        "held-out text": build.heldout_rows()[:num_rows],
        "own samples": build.own_rows(target, "heldout", num_rows, {1.0: 1.0}).long(),
        "own greedy": build.own_rows(target, "heldout", num_rows, {0.0: 1.0}).long(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=Path, default=FAMILY / ".work")
    parser.add_argument("--out", type=Path, default=FAMILY / ".work" / "models")
    options = parser.parse_args()
    options.minutes, options.rows = 1.0, 64
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.automatic_dynamic_shapes = False  # two lengths: one compilation each
    build = family.Build(options)
    target = FrozenTarget(build.load("target"), compiled=build.compiled)
    recipes = {
        str(number): DraftRecipe(
            llama(**build.shape("draft"), vocab_size=family.VOCABULARY, seed=1).to(build.device),
            target,
            DraftConfig(compiled=build.compiled, **given),  # type: ignore[arg-type]
        )
        for number, given in enumerate(VARIANTS.values())
    }
    config = build.train_config(
        "draft", learning_rate=4e-3, matrix_learning_rate=0.02, decay_share=0.6
    )
    config = replace(config, num_steps=options.steps, minutes=None)
    plain = build.load("target")
    trained = train(Together(recipes), rows_of(build, plain), config, title="ablation")
    texts = heldout_texts(build, plain)
    rows: list[dict[str, Any]] = []
    for name, recipe in zip(VARIANTS, recipes.values(), strict=True):
        row: dict[str, Any] = {"loss": name}
        with torch.autocast(build.device.type, torch.bfloat16, enabled=config.bf16):
            for label, part in texts.items():
                found = measure(model_logits(recipe.draft), model_logits(plain), part)
                row[f"alpha, {label}"] = round(found.alpha, 4)
                row[f"agreement, {label}"] = round(found.agreement, 4)
        rows.append(row)
    report.write(
        "family-ablation",
        "The 2.4M draft with several losses",
        {"By loss": rows},
        f"All at once on the same batches: {trained.num_steps} steps, {trained.tokens / 1e6:.0f} M "
        f"tokens, {trained.seconds:.0f} s on one {environment()['device']}; a run of the family is "
        "longer. alpha: mean of sum min(p, q) at temperature 1; agreement: of the greedy tokens.",
    )


if __name__ == "__main__":
    main()
