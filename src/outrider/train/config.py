"""The options of `outrider train`, declared once: of a run, of its optimiser, of each recipe.

Standard library only, so that `outrider train --help` starts at once.
"""

# A declaration is easier to read in two lines than with a line for each argument.
# fmt: off
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.parameters import DATA, OUTPUT, RECIPE, RUN, check, config_error, param

DEFAULT_STEPS = 500  # where neither steps nor minutes are given


class DataError(ConfigError):
    """Training data that cannot be used: names the file and, where there is one, the line."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    learning_rate: float = param(
        1e-3, "For embeddings, heads and norms.", "--learning-rate X", RUN
    )
    matrix_learning_rate: float = param(
        0.01, "For weight matrices.", "--matrix-learning-rate X", RUN
    )
    muon: bool = param(
        True, "muon (matrices; AdamW for the rest) or adamw.", "--optimiser NAME", RUN
    )
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    schedule: str = param(
        "wsd", "wsd, cosine or constant.", "--schedule NAME", RUN,
        choices=("wsd", "cosine", "constant")
    )
    warmup_steps: int = 50
    decay_share: float = 0.4
    final_share: float = 0.0

    def __post_init__(self) -> None:
        check(self, config_error)


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """A run. `options` are the recipe's own (see `kinds`)."""

    kind: str
    out: Path = param(  # noqa: RUF009
        MISSING, "Folder for the drafter and its provenance.", "--out -o DIR", OUTPUT
    )
    data: tuple[Path, ...] = param(
        (), "Text, .jsonl (messages, prompt/completion or text) or .xz files.", "FILES"
    )
    target: str = param(
        "bundled", "Target: a folder, a GGUF file, a hub name, bundled or smollm2.",
        "--target MODEL", DATA
    )
    start: str | None = param(None, "Continue this drafter (fine-tuning).", "--from MODEL", RECIPE)
    own_tokens: int = param(
        0, "Tokens the target writes itself, to train on.", "--own-tokens N", DATA
    )
    own_share: float = param(
        0.5, "Their share of each batch.", "--own-share SHARE", DATA, low=0, high=1
    )
    length: int = param(512, "Tokens per sequence.", "--length N", DATA)
    num_steps: int | None = param(
        None, "Optimiser steps.", "--steps N", RUN, none=str(DEFAULT_STEPS)
    )
    minutes: float | None = param(
        None, "Length in minutes instead; the first steps are timed.", "--minutes M", RUN
    )
    hours: float | None = param(None, "The same in hours.", "--hours H", RUN)
    rows_per_step: int = param(16, "Sequences per step.", "--batch N", RUN)
    accumulation: int = param(1, "Passes per step, to save memory.", "--accumulation N", RUN)
    seed: int = param(0, "Same seed, same run.", "--seed INT", RUN)
    device: str = param("auto", "auto, cpu, cuda or cuda:N.", "--device NAME", RUN)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint_every_s: float = param(
        60.0, "Seconds between checkpoints.", "--checkpoint-every SECONDS", RUN
    )
    log_every: int = 10
    compiled: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data and not self.own_tokens:
            raise DataError("no training data: give files, or --own-tokens for the target's text")
        if sum(x is not None for x in (self.num_steps, self.minutes, self.hours)) > 1:
            raise ConfigError("--steps, --minutes and --hours set the length: give one of them")
        check(self, config_error)
        if self.length < 16:
            raise ConfigError(f"sequences of {self.length} tokens are too short: take 16 or more")


# --- recipes --------------------------------------------------------------------------------------

_TVD_SHARE: dict[str, Any] = {
    "help": "Share of the total variation in the loss at the end.",
    "cli": "--tvd-share X",
    "panel": RECIPE,
}
_INTERMEDIATE: dict[str, Any] = {
    "help": "Feed-forward width.",
    "cli": "--intermediate-size N",
    "panel": RECIPE,
    "none": "auto",
}
_TAPS: dict[str, Any] = {
    "help": "Target layers to read, like 2,4,6.",
    "cli": "--taps LIST",
    "panel": RECIPE,
    "none": "low, middle, high",
}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    loss: str = param(
        "forward-kl", "forward-kl, reverse-kl, jsd or tvd.", "--loss NAME", RECIPE,
        choices=("forward-kl", "reverse-kl", "jsd", "tvd")
    )
    # Share of the total variation in the loss: 0 at the start, rising to `tvd_share` by the part
    # `tvd_by` of the run.
    tvd_share: float = param(0.9, **_TVD_SHARE)
    tvd_by: float = 1.0
    # Part of the total variation at temperature 1/2: this gives the most probable tokens, and so
    # greedy agreement, more weight.
    sharp_share: float = 0.0
    # Positions per slice of the loss: fp32 logits of a whole batch may not fit in memory.
    slice_rows: int = 1 << 15
    compiled: bool = False

    def __post_init__(self) -> None:
        check(self, config_error)


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Sizes of a new draft model; None: from the target's."""

    hidden_size: int | None = param(
        None, "Width of a new draft.", "--hidden-size N", RECIPE, none="auto"
    )
    num_layers: int | None = param(None, "Its layers.", "--num-layers N", RECIPE, none="auto")
    intermediate_size: int | None = param(None, **_INTERMEDIATE)
    num_kv_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Options of every head recipe."""

    # Depth k has the weight decay^k: later guesses are rarely reached.
    decay: float = param(0.8, "Weight of each further depth.", "--decay X", RECIPE)
    tvd_share: float = param(0.9, **_TVD_SHARE)
    seed: int = 0
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class MedusaRecipeConfig(HeadConfig):
    num_heads: int = param(4, "Tokens guessed ahead.", "--num-heads N", RECIPE)
    num_hidden_layers: int = param(1, "Residual layers per head.", "--num-layers N", RECIPE)
    original_lm_head: bool = True
    # Trained positions of a row in one step; neighbouring positions are similar.
    positions_per_row: int = 128


@dataclass(frozen=True, kw_only=True)
class Eagle3RecipeConfig(HeadConfig):
    num_unroll: int = param(4, "Steps on its own outputs.", "--num-unroll N", RECIPE)
    draft_vocab_size: int | None = param(
        None, "Ids it can draft: the most frequent of the text.", "--draft-vocab-size N", RECIPE,
        none="all"
    )
    taps: tuple[int, ...] | None = param(None, **_TAPS)
    intermediate_size: int | None = param(None, **_INTERMEDIATE)


@dataclass(frozen=True, kw_only=True)
class DFlashRecipeConfig(HeadConfig):
    block_size: int = param(
        8, "Places of a block, the known one included.", "--block-size N", RECIPE
    )
    num_hidden_layers: int = param(2, "Layers.", "--num-layers N", RECIPE)
    blocks_per_row: int = 32
    taps: tuple[int, ...] | None = param(None, **_TAPS)
    intermediate_size: int | None = param(None, **_INTERMEDIATE)
    mask_token_id: int = param(
        0, "Id that means 'not known yet'.", "--mask-token-id ID", RECIPE,
        none="one the text never holds"
    )
    markov_rank: int = param(0, "Rank of the Markov bias; 0: none.", "--markov-rank N", RECIPE)
    confidence: bool = param(
        False, "Also predict each place's acceptance.", "--confidence", RECIPE
    )


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    exit_weight: float = param(0.15, "Weight of the exits' loss.", "--exit-weight X", RECIPE)
    # Layers whose output may draft, in rotation, `exits_per_step` at a time. () means all but the
    # last.
    exits: tuple[int, ...] = ()
    exits_per_step: int = 2
    layer_dropout: float = param(0.05, "Dropout of the last layer.", "--layer-dropout P", RECIPE)
    seed: int = 0
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """A command of `outrider train`."""

    name: str
    help: str
    example: str
    recipe: tuple[type, ...]  # whose fields are its options
    learning_rates: tuple[float, float] | None = None  # where they differ from OptimConfig's
    continues: bool = True  # takes --from


COMMANDS = (
    Kind(
        "draft",
        "Distil a draft model from the target, from scratch or from a checkpoint (--from).",
        "my/*.txt --from bundled:draft --out my-draft",
        (DraftConfig, DraftShape),
    ),
    Kind(
        "medusa", "Train Medusa heads on the target's last hidden state.",
        "my/*.txt --out my-medusa", (MedusaRecipeConfig,),
    ),
    Kind(
        "eagle3", "Train an EAGLE-3 head on the target's features and its own outputs.",
        "my/*.txt --own-tokens 200000 --out my-eagle3", (Eagle3RecipeConfig,),
    ),
    Kind(
        "dflash", "Train a DFlash head that drafts a whole block in one pass.",
        "my/*.txt --markov-rank 32 --out my-dflash", (DFlashRecipeConfig,),
    ),
    Kind(
        "early-exit",
        "Continue a target's own training so that its first layers can draft (changes the target).",
        "my/*.txt --target MODEL --out my-target", (TargetConfig,), (3e-4, 0.003),
        continues=False,
    ),
)
