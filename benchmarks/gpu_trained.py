"""Real text on a GPU: trains a target of 324M, a draft of 12M and an EAGLE-3 head, then decodes.

    python benchmarks/gpu_trained.py --text FOLDER [--minutes 2.3] [--tiny] [--out FOLDER]

FOLDER holds the family's text and tokenizer (`family/fetch.py`, `family/build.py --stage
tokenizer`): train-00.txt.xz, heldout.txt.xz, tokenizer/. The target learns the text, the draft is
distilled from it on text and on what it writes itself, as the bundled family was, and so is the
head. Held-out text is continued plainly, with drafts of several lengths by either, and as `auto`
chooses; the result is `gpu-pair`.
`--tiny` tries every part on a CPU and leaves no result.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_engine
import report
import torch
from gpu_engine import say

from outrider.bench.contenders import make_jobs
from outrider.bench.workloads import Prompt
from outrider.doctor.advice import advise, buckets
from outrider.doctor.curves import SURVIVAL_TOKENS, measure_curves
from outrider.engine.engine import Engine
from outrider.llm import LLM
from outrider.model.capabilities import PrefersThinPasses
from outrider.train.config import DraftConfig, Eagle3RecipeConfig, OptimConfig, TargetConfig
from outrider.train.data import Mixture, Rows, Windows, encode, read_documents, to_device
from outrider.train.measure import cross_entropy, measure, model_logits
from outrider.train.models import llama, load_model, load_tokenizer, num_parameters, save_model
from outrider.train.recipes.draft import DraftRecipe
from outrider.train.recipes.eagle3 import Eagle3Recipe
from outrider.train.recipes.heads import FrozenTarget
from outrider.train.recipes.target import TargetRecipe
from outrider.train.sampler import generate_rows, prompts, temperatures
from outrider.train.trainer import TrainConfig, train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 8192
SHAPES: dict[str, dict[str, int]] = {
    "target": {"hidden_size": 1024, "num_layers": 28, "num_heads": 16, "num_kv_heads": 4,
               "intermediate_size": 2816},
    "draft": {"hidden_size": 512, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2,
              "intermediate_size": 1408},
}  # fmt: skip
TINY = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 128}
OWN_TEXT = {1.0: 0.6, 0.7: 0.3, 0.0: 0.1}  # temperatures and their shares
DRAFTS = (2, 4, 6)
HEAD_DRAFTS = (2, 3, 4, 5)


class Pair:
    """Both models in the making: text, settings and what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.tiny = options, folder, options.tiny
        self.tokenizer = load_tokenizer(options.text / "tokenizer")
        self.length = 128 if self.tiny else 1024
        self.rows = 2 if self.tiny else 32
        self.compiled = DEVICE.type == "cuda"
        self.train = self.tokens("train-00.txt.xz")
        self.heldout = self.tokens("heldout.txt.xz")
        self.about: list[dict[str, Any]] = []
        self.tables: dict[str, list[dict[str, Any]]] = {"Models": self.about}

    def tokens(self, name: str) -> torch.Tensor:
        documents = read_documents([self.options.text / name])[: 100 if self.tiny else None]
        found = to_device(encode(documents, self.tokenizer, VOCABULARY), DEVICE)
        say(name, f"{len(found) / 1e6:.1f} M tokens")
        return found

    def fresh(self, name: str) -> Any:
        layers = {"num_layers": 2 if name == "target" else 1}
        shape = TINY | layers if self.tiny else SHAPES[name]
        return llama(**shape, vocab_size=VOCABULARY, seed=len(name)).to(DEVICE)

    def config(self, minutes: float) -> TrainConfig:
        return TrainConfig(
            num_steps=4 if self.tiny else None,
            minutes=None if self.tiny else minutes,
            rows_per_step=self.rows,
            optim=OptimConfig(learning_rate=3e-3, matrix_learning_rate=0.02),
            bf16=self.compiled,
        )

    def finish(self, name: str, model: Any, trained: Any, more: dict[str, Any]) -> Any:
        """Saves a model; returns it as the engine will have it."""
        save_model(model, self.folder / name, self.tokenizer)
        dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
        saved = load_model(self.folder / name, dtype=dtype).to(DEVICE).eval()
        rows = Windows(self.heldout, self.length, seed=1).rows(0, 2 if self.tiny else 64)
        with torch.no_grad():
            nats = cross_entropy(model_logits(saved), rows)
        self.tell(name, num_parameters(saved), trained, {"held-out loss, nats": nats, **more})
        return saved

    def tell(self, name: str, size: int, trained: Any, more: dict[str, Any]) -> None:
        self.about.append({
            "model": name, "parameters, M": size / 1e6,
            "trained on, M tokens": trained.tokens / 1e6, "seconds": trained.seconds, **more,
        })  # fmt: skip
        say(self.about[-1])


def train_target(pair: Pair) -> Any:
    model = pair.fresh("target")
    plain = TargetConfig(exits_per_step=0, layer_dropout=0.0, compiled=pair.compiled)
    source = Windows(pair.train, pair.length, seed=0)
    minutes = pair.options.minutes
    trained = train(TargetRecipe(model, plain), source, pair.config(minutes), title="target")
    return pair.finish("target", model, trained, {"alpha": "-", "greedy agreement": "-"})


def own_text(pair: Pair, target: Any, tokens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """What the target writes after short pieces of text."""
    length = pair.length // 2
    given = prompts(tokens, num_rows, length // 16, seed=7)
    return generate_rows(target, given, length, temperatures(num_rows, OWN_TEXT), 7)


def train_head(pair: Pair, target: Any, table: torch.Tensor, rows: torch.Tensor) -> None:
    """An EAGLE-3 head, on text and on what the target wrote."""
    config = Eagle3RecipeConfig(num_unroll=2 if pair.tiny else 4, compiled=pair.compiled)
    recipe = Eagle3Recipe(FrozenTarget(target), config, table)
    text = Windows(pair.train, pair.length, seed=4)
    source = Mixture([(text, 0.5), (Rows(table.view(-1, pair.length), seed=5), 0.5)])
    settings = replace(pair.config(pair.options.minutes / 3), rows_per_step=pair.rows // 2)
    trained = train(recipe, source, settings, title="eagle3")
    recipe.head.eval()
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=pair.compiled):
        found = recipe.measure(rows)
    recipe.save(pair.folder / "eagle3")
    size = sum(parameter.numel() for parameter in recipe.head.parameters())
    pair.tell("eagle3", size, trained, {
        "held-out loss, nats": "-", "alpha": found["alpha"],
        "greedy agreement": found["agreement"],
    })  # fmt: skip


def train_draft(pair: Pair, target: Any, table: torch.Tensor, rows: torch.Tensor) -> None:
    model = pair.fresh("draft")
    recipe = DraftRecipe(model, FrozenTarget(target), DraftConfig(compiled=pair.compiled))
    text = Windows(pair.train, pair.length, seed=2)
    source = Mixture([(text, 0.5), (Rows(table.view(-1, pair.length), seed=3), 0.5)])
    trained = train(recipe, source, pair.config(pair.options.minutes / 2.5), title="draft")
    model.eval()
    with torch.no_grad():
        found = measure(model_logits(model), model_logits(target), rows).as_dict()
    pair.finish("draft", model, trained,
                {"alpha": found["alpha"], "greedy agreement": found["agreement"]})  # fmt: skip


def decode(pair: Pair) -> None:
    """Held-out text continued by the engine: one stream, then batches."""
    one_stream = partial(gpu_engine.one_stream, warm_up=not pair.tiny)
    count, length = (12, 24) if pair.tiny else (256, 256)
    num_prompts = 2 if pair.tiny else 6
    common: dict[str, Any] = {
        "device": DEVICE.type, "kv_tokens": 40 * 1024, "max_sequences": 64,
    }  # fmt: skip
    given = prompts(pair.heldout, 64, length, seed=9).tolist()
    for steps in (16, 1):
        made = LLM(
            str(pair.folder / "target"), draft_model=str(pair.folder / "eagle3"),
            proposer="eagle3", num_draft_tokens=4, max_ahead_steps=steps, **common,
        ).engine  # fmt: skip
        heading = "EAGLE-3, one stream" + ("" if steps > 1 else ", every step by itself")
        drafts = HEAD_DRAFTS if steps > 1 else HEAD_DRAFTS[1:2]
        pair.tables[heading] = one_stream(made, given[:num_prompts], count, drafts)
    write(pair)
    settings = common | {
        "draft_model": str(pair.folder / "draft"), "proposer": "draft-model",
        "num_draft_tokens": "auto",
    }  # fmt: skip
    started = time.perf_counter()
    made = LLM(str(pair.folder / "target"), **settings).engine
    pair.tables["Prepared at the engine's start"] = [{
        "steps": getattr(made.target, "prepared", lambda: "-")(),
        "seconds, loading included": time.perf_counter() - started,
    }]  # fmt: skip
    say(pair.tables["Prepared at the engine's start"])
    pair.tables["One stream, by temperature and K"] = one_stream(
        made, given[:num_prompts], count, DRAFTS
    )
    pair.tables["Auto against plain by batch, greedy"] = gpu_engine.auto_rows(
        made, lambda size: given[:size], max_tokens=count, rounds=1 if pair.tiny else 5
    )
    write(pair)
    doctor(pair, made, settings, given[:num_prompts])


def doctor(pair: Pair, made: Engine, settings: dict[str, Any], given: list[list[int]]) -> None:
    """What the doctor would prepare, and how long an engine then takes to start."""
    target = made.target
    if not isinstance(target, PrefersThinPasses):
        return
    texts = [Prompt(made.tokenizer.decode(tokens)) for tokens in given]
    jobs = make_jobs(made, texts, SURVIVAL_TOKENS)
    advice = advise(measure_curves(made, jobs, ["draft-model"], say))
    chosen = tuple(buckets(advice, target))
    pair.tables["The doctor's advice"] = [entry.to_dict() for entry in advice]
    started = time.perf_counter()
    again = LLM(str(pair.folder / "target"), **settings, buckets=chosen).engine.target
    assert isinstance(again, PrefersThinPasses)
    pair.tables["An engine that prepares what the doctor advises"] = [{
        "buckets": ",".join(f"{size}x{k}" for size, k in chosen),
        "steps": again.prepared(),
        "seconds, loading included, kernels compiled": time.perf_counter() - started,
    }]  # fmt: skip


def write(pair: Pair) -> None:
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    notes = (
        f"Trained and measured in one run on {device}, bfloat16. Text: a part of the bundled"
        " family's, Python packages; prompts are pieces of its held-out part, of 256 tokens. No"
        " prompt is cached: `tokens/s` starts at a sequence's first token and counts what the"
        " drafter has to read. `alpha` and agreement are measured on what the target writes after"
        " held-out text. The EAGLE-3 head drafts in one graph and, unless every step is taken by"
        " itself, without the host between steps."
    )
    folder = pair.folder if pair.tiny else pair.options.out
    report.write("gpu-pair", "A pair trained on real text, on a GPU", pair.tables, notes, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="the family's work folder")
    parser.add_argument("--minutes", type=float, default=2.3, help="of the target's training")
    parser.add_argument("--tiny", action="store_true", help="a CPU smoke test of every part")
    report.add_out(parser)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as name:
        pair = Pair(options, Path(name))
        target = train_target(pair)
        table = own_text(pair, target, pair.train, 8 if pair.tiny else 4096)
        rows = own_text(pair, target, pair.heldout, 4 if pair.tiny else 128)
        say(f"the target wrote {table.numel() / 1e6:.2f} M tokens")
        train_draft(pair, target, table, rows)
        train_head(pair, target, table, rows)
        write(pair)
        del target
        decode(pair)
        write(pair)


if __name__ == "__main__":
    main()
