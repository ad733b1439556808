"""Rebuild the bundled family on one GPU in under 30 minutes.

    python family/fetch.py && python family/build.py && python family/card.py

Stages, in order, each of which can be run alone with --stage once those before it have run:

    tokenizer  8192-token byte-level BPE on a part of the training text (CPU)
    tokens     the text as token ids (CPU)
    target     25M, next-token loss with early exits and layer dropout
    draft mid  2.4M and 5M, distilled from the target on text and on the target's own generations
    heads      Medusa, EAGLE-3 and DFlash, together, on the target's features

`--minutes` gives the length of one training stage; `--tiny` shrinks everything for a smoke test on
a CPU. Results: --out/{target,draft,mid} as Hugging Face folders, one provenance JSON each, beside
family/.work.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from outrider.model.heads import load_head
from outrider.train.data import Mixture, Rows, Windows, encode, read_documents, to_device
from outrider.train.measure import cross_entropy, exit_logits, measure, model_logits
from outrider.train.models import llama, load_model, load_tokenizer, num_parameters, save_model
from outrider.train.optim import OptimConfig
from outrider.train.provenance import write_provenance
from outrider.train.recipes.dflash import DFlashRecipe, DFlashRecipeConfig
from outrider.train.recipes.draft import DraftConfig, DraftRecipe
from outrider.train.recipes.eagle3 import Eagle3Recipe, Eagle3RecipeConfig
from outrider.train.recipes.heads import FrozenTarget, HeadRecipe, Together
from outrider.train.recipes.medusa import MedusaRecipe, MedusaRecipeConfig
from outrider.train.recipes.target import TargetConfig, TargetRecipe
from outrider.train.sampler import generate_rows, prompts, temperatures
from outrider.train.trainer import Report, TrainConfig, train

HERE = Path(__file__).parent
BUNDLED = HERE.parent / "src" / "outrider" / "bundled"
VOCABULARY = 8192
END = "<|endoftext|>"
# Newlines; words with the space before them; single digits; underscores; punctuation; indentation
# in one piece.
PIECES = r"\n+| ?\p{L}+|\p{N}|_+| ?[^\s\p{L}\p{N}_]+| +|\s"
SHAPES: dict[str, dict[str, int]] = {
    "target": {"hidden_size": 512, "num_layers": 7, "num_heads": 8, "num_kv_heads": 4,
               "intermediate_size": 1408},
    "mid": {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
            "intermediate_size": 704},
    "draft": {"hidden_size": 192, "num_layers": 2, "num_heads": 3, "num_kv_heads": 1,
              "intermediate_size": 512},
}  # fmt: skip
TINY: dict[str, int] = {
    "hidden_size": 64, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 128,
}  # fmt: skip
MINUTES = {"target": 6.5, "draft": 2.3, "mid": 2.2, "heads": 4.0}


class Build:
    """One build: where things are, and the data, read once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.tiny = options, options.tiny
        self.work, self.out = options.work, options.out
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.compiled = self.device.type == "cuda"
        self.length = 128 if self.tiny else 2048
        self.rows = 4 if self.tiny else options.rows
        self._tokens: dict[str, torch.Tensor] = {}

    def shape(self, name: str) -> dict[str, int]:
        return TINY | {"num_layers": 3 if name == "target" else 1} if self.tiny else SHAPES[name]

    def checkpoint(self, name: str) -> Path:
        return self.work / f"{name}{'-tiny' if self.tiny else ''}.ckpt"

    def tokens(self, part: str) -> torch.Tensor:
        """The token stream of "train" or "heldout", encoded on first use and kept."""
        if part not in self._tokens:
            path = self.work / f"{part}{'-tiny' if self.tiny else ''}.npy"
            if not path.exists():
                shards = sorted(self.work.glob(f"{part}*.txt.xz"))
                documents = read_documents(shards[:1] if self.tiny else shards)
                documents = documents[:400] if self.tiny else documents
                np.save(
                    path, encode(documents, load_tokenizer(self.work / "tokenizer"), VOCABULARY)
                )
            self._tokens[part] = to_device(np.load(path), self.device)
            print(f"{part}: {len(self._tokens[part]) / 1e6:.1f} M tokens", flush=True)
        return self._tokens[part]

    def heldout_rows(self) -> torch.Tensor:
        num_rows = 4 if self.tiny else 256
        return Windows(self.tokens("heldout"), self.length, seed=1).rows(0, num_rows)

    def own_rows(
        self, target: Any, part: str, num_rows: int, shares: dict[float, float]
    ) -> torch.Tensor:
        """Rows the target wrote after short prompts from `part`; two generations to a row."""
        num_prompt, half = (16, 64) if self.tiny else (64, 1024)
        seed = 7 if part == "train" else 8
        given = prompts(self.tokens(part), 2 * num_rows, num_prompt, seed)
        warmth = temperatures(2 * num_rows, shares)
        halves = [
            generate_rows(target, given[i : i + 2048], half, warmth[i : i + 2048], seed + i)
            for i in range(0, 2 * num_rows, 2048)
        ]
        table = torch.cat(halves).int()
        return table.view(num_rows, 2 * half)

    def train_config(self, name: str, **optim: float) -> TrainConfig:
        minutes = self.options.minutes or MINUTES[name]
        return TrainConfig(
            num_steps=6 if self.tiny else None,
            minutes=None if self.tiny else minutes,
            rows_per_step=self.rows,
            optim=OptimConfig(**optim),  # type: ignore[arg-type]
            bf16=self.device.type == "cuda",
            checkpoint_every_s=120,
        )

    def save(self, name: str, model: Any) -> None:
        save_model(model, self.out / name, load_tokenizer(self.work / "tokenizer"))

    def load(self, name: str) -> Any:
        """The model as it ships: in bf16 (computed in fp32 on a CPU), not compiled."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        folder = self.out / name
        folder = folder if folder.exists() or self.tiny else BUNDLED / name
        return load_model(folder, dtype=dtype).to(self.device).eval()

    def record(self, name: str, report: Report, results: dict[str, Any]) -> None:
        corpus = json.loads((self.work / "corpus.json").read_text())["shards"]
        data = {"corpus": corpus, "num_tokens": len(self.tokens("train"))}
        if name != "target":
            data["num_own_tokens"] = train_rows(self).numel()
        path = self.out / f"{name}.json"
        write_provenance(path, report=report, results=results, data=data)
        print(f"RESULT {name} {json.dumps(results)}", flush=True)


def build_tokenizer(build: Build) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    shards = sorted(build.work.glob("train*.txt.xz"))
    documents = read_documents(shards[:1] if build.tiny else shards)
    share = documents[:: max(1, len(documents) // (200 if build.tiny else 6000))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(share, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(build.work / "tokenizer")
    sample = "".join(documents[1::40])
    num_tokens = len(tokenizer.encode(sample).ids)
    ratio = len(sample) / num_tokens
    print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {ratio:.2f} characters a token")


def build_target(build: Build) -> None:
    model = llama(**build.shape("target"), vocab_size=VOCABULARY).to(build.device)
    recipe = TargetRecipe(model, TargetConfig(compiled=build.compiled))
    source = Windows(build.tokens("train"), build.length, seed=0)
    config = build.train_config("target", learning_rate=4e-3, matrix_learning_rate=0.02)
    report = train(recipe, source, config, checkpoint=build.checkpoint("target"), title="target")
    build.save("target", model)
    shipped = build.load("target")
    rows = build.heldout_rows()
    logits = model_logits(shipped)
    results: dict[str, Any] = {
        "num_parameters": num_parameters(shipped),
        "heldout_nats": cross_entropy(logits, rows),
        "exits": {
            str(layer): measure(exit_logits(shipped, layer), logits, rows[:64]).as_dict()
            for layer in recipe.exits
        },
    }
    build.record("target", report, results)


def build_draft(build: Build, name: str) -> None:
    target = FrozenTarget(build.load("target"), compiled=build.compiled)
    table = train_rows(build)
    draft = llama(**build.shape(name), vocab_size=VOCABULARY, seed=1).to(build.device)
    recipe = DraftRecipe(draft, target, DraftConfig(compiled=build.compiled))
    text = Windows(build.tokens("train"), build.length, seed=2)
    source = Mixture([(text, 0.5), (Rows(table, seed=3), 0.5)])
    config = build.train_config(name, learning_rate=4e-3, matrix_learning_rate=0.02)
    report = train(recipe, source, config, checkpoint=build.checkpoint(name), title=name)
    build.save(name, draft)
    build.record(name, report, measure_drafter(build, name))


def measure_drafter(build: Build, name: str) -> dict[str, Any]:
    """How well a finished drafter matches its target, on held-out text and on the target's own."""
    shipped, plain = build.load(name), build.load("target")
    both = model_logits(shipped), model_logits(plain)
    num_rows = 4 if build.tiny else 128
    results = {
        "num_parameters": num_parameters(shipped),
        "heldout_nats": cross_entropy(both[0], build.heldout_rows()),
        "heldout_text": measure(*both, build.heldout_rows()).as_dict(),
    }
    for label, temperature in (("own_samples", 1.0), ("own_greedy", 0.0)):
        own = build.own_rows(plain, "heldout", num_rows, {temperature: 1.0}).long()
        results[label] = measure(*both, own).as_dict()
    return results


def train_rows(build: Build) -> torch.Tensor:
    """The target's generations for training, made once per build."""
    path = build.work / f"own{'-tiny' if build.tiny else ''}.npy"
    if not path.exists():
        began = time.monotonic()
        shares = {1.0: 0.6, 0.7: 0.3, 0.0: 0.1}
        target = build.load("target")
        table = build.own_rows(target, "train", 8 if build.tiny else build.options.own_rows, shares)
        np.save(path, table.cpu().numpy().astype(np.uint16))
        spent = time.monotonic() - began
        print(f"own text: {table.numel() / 1e6:.1f} M tokens in {spent:.0f} s", flush=True)
    return to_device(np.load(path), build.device)


def build_heads(build: Build) -> None:
    tokenizer = load_tokenizer(build.work / "tokenizer")
    table = train_rows(build)
    frozen = FrozenTarget(build.load("target"), compiled=build.compiled)
    common = {"compiled": build.compiled, "seed": 4}
    recipes: dict[str, HeadRecipe] = {
        "medusa": MedusaRecipe(
            frozen,
            MedusaRecipeConfig(num_heads=4, num_hidden_layers=2, positions_per_row=256, **common),
        ),
        "eagle3": Eagle3Recipe(
            frozen,
            Eagle3RecipeConfig(
                num_unroll=2 if build.tiny else 4,
                draft_vocab_size=4096,
                intermediate_size=1024,
                **common,
            ),
            table,
        ),
        "dflash": DFlashRecipe(
            frozen,
            DFlashRecipeConfig(
                blocks_per_row=8 if build.tiny else 96,
                # The byte 0xFF never occurs in UTF-8 text.
                mask_token_id=tokenizer.convert_tokens_to_ids("ÿ"),
                intermediate_size=1024,
                markov_rank=32,
                confidence=True,
                **common,
            ),
        ),
    }
    length = 64 if build.tiny else 1024
    text = Windows(build.tokens("train"), length, seed=5)
    source = Mixture([(text, 0.5), (Rows(table.view(-1, length), seed=6), 0.5)])
    config = build.train_config("heads", learning_rate=2e-3, matrix_learning_rate=0.02)
    config = replace(config, rows_per_step=4 if build.tiny else 32)
    together = Together(recipes)
    report = train(together, source, config, checkpoint=build.checkpoint("heads"), title="heads")
    together.save(build.out)
    plain = FrozenTarget(build.load("target"))
    rows = {"heldout_text": build.heldout_rows()[:64].view(-1, length)}
    for label, temperature in (("own_samples", 1.0), ("own_greedy", 0.0)):
        num_rows = 4 if build.tiny else 64
        own = build.own_rows(plain.model, "heldout", num_rows, {temperature: 1.0})
        rows[label] = own.long().view(-1, length)
    for name, recipe in recipes.items():
        shipped = load_head(build.out / name)
        recipe.module.load_state_dict(shipped.state_dict())
        recipe.target = plain
        results: dict[str, Any] = {"num_parameters": num_parameters(shipped)}
        with torch.autocast(build.device.type, torch.bfloat16, enabled=build.compiled):
            results |= {label: recipe.measure(part) for label, part in rows.items()}
        build.record(name, report, results)


STAGES = ("tokenizer", "tokens", "target", "draft", "mid", "heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all, in order")
    parser.add_argument("--minutes", type=float, help="length of each training stage")
    parser.add_argument("--tiny", action="store_true", help="a CPU smoke test of every stage")
    parser.add_argument("--work", type=Path, default=HERE / ".work")
    parser.add_argument("--out", type=Path, default=HERE / ".work" / "models")
    parser.add_argument("--rows", type=int, default=64, help="sequences of 2048 a step")
    parser.add_argument("--own-rows", type=int, default=8192, help="generated rows of 2048")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    torch.set_float32_matmul_precision("high")
    if options.tiny and options.out == HERE / ".work" / "models":
        options.out = HERE / ".work" / "tiny"
    options.out.mkdir(parents=True, exist_ok=True)
    build = Build(options)
    for stage in options.stage or STAGES:
        if stage == "tokenizer":
            build_tokenizer(build)
        elif stage == "tokens":
            build.tokens("train"), build.tokens("heldout")
        elif stage == "heads":
            build_heads(build)
        elif stage == "target":
            build_target(build)
        else:
            build_draft(build, stage)


if __name__ == "__main__":
    main()
