"""`outrider train`: drafters for your own target, and for your own text.

Each command trains one kind; all share the options of `train_flags` and the run of
`outrider.train.session`. Training resumes by itself when the same command is given again.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from outrider.cli import train_flags as flags
from outrider.cli.console import print_json, stdout
from outrider.cli.train_flags import RECIPE, option
from outrider.errors import ConfigError

app = typer.Typer(
    help="Train drafters: draft models, Medusa, EAGLE-3 and DFlash heads, early exits.",
    no_args_is_help=True,
)

# Options of the run; whatever else a command takes belongs to its recipe.
SHARED = {
    *("data", "out", "target", "start", "own_tokens", "own_share", "length", "steps", "minutes"),
    *("batch", "accumulation", "learning_rate", "matrix_learning_rate", "optimiser", "schedule"),
    *("seed", "checkpoint_every", "device", "plot", "as_json"),
}


@app.command(epilog="Example: outrider train draft my/*.txt --from bundled:draft --out my-draft")
def draft(
    context: typer.Context,
    out: flags.Out,
    data: flags.Data = None,
    target: flags.Target = "bundled",
    start: flags.Start = None,
    loss: Annotated[
        str,
        option(RECIPE, "forward-kl, reverse-kl, jsd or tvd.", "--loss", metavar="NAME"),
    ] = "forward-kl",
    tvd_share: flags.TvdShare = 0.9,
    hidden_size: Annotated[
        int | None,
        option(RECIPE, "Width of a new draft.", "--hidden-size", metavar="N", show_default="auto"),
    ] = None,
    num_layers: Annotated[
        int | None,
        option(RECIPE, "Its layers.", "--num-layers", metavar="N", show_default="auto"),
    ] = None,
    intermediate_size: flags.Intermediate = None,
    own_tokens: flags.OwnTokens = 0,
    own_share: flags.OwnShare = 0.5,
    length: flags.Length = 512,
    steps: flags.Steps = None,
    minutes: flags.Minutes = None,
    batch: flags.RowsPerStep = 16,
    accumulation: flags.Accumulation = 1,
    learning_rate: flags.LearningRate = 1e-3,
    matrix_learning_rate: flags.MatrixLearningRate = 0.01,
    optimiser: flags.Optimiser = "muon",
    schedule: flags.Schedule = "wsd",
    seed: flags.Seed = 0,
    checkpoint_every: flags.CheckpointEvery = 60.0,
    device: flags.Device = "auto",
    plot: flags.Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Distil a draft model from the target, from scratch or from a checkpoint (--from)."""
    _train("draft", context.params)


@app.command(epilog="Example: outrider train medusa my/*.txt --out my-medusa")
def medusa(
    context: typer.Context,
    out: flags.Out,
    data: flags.Data = None,
    target: flags.Target = "bundled",
    start: flags.Start = None,
    num_heads: Annotated[
        int, option(RECIPE, "Tokens guessed ahead.", "--num-heads", metavar="N")
    ] = 4,
    num_hidden_layers: Annotated[
        int, option(RECIPE, "Residual layers per head.", "--num-layers", metavar="N")
    ] = 1,
    decay: flags.Decay = 0.8,
    tvd_share: flags.TvdShare = 0.9,
    own_tokens: flags.OwnTokens = 0,
    own_share: flags.OwnShare = 0.5,
    length: flags.Length = 512,
    steps: flags.Steps = None,
    minutes: flags.Minutes = None,
    batch: flags.RowsPerStep = 16,
    accumulation: flags.Accumulation = 1,
    learning_rate: flags.LearningRate = 1e-3,
    matrix_learning_rate: flags.MatrixLearningRate = 0.01,
    optimiser: flags.Optimiser = "muon",
    schedule: flags.Schedule = "wsd",
    seed: flags.Seed = 0,
    checkpoint_every: flags.CheckpointEvery = 60.0,
    device: flags.Device = "auto",
    plot: flags.Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Train Medusa heads on the target's last hidden state."""
    _train("medusa", context.params)


@app.command(epilog="Example: outrider train eagle3 my/*.txt --own-tokens 200000 --out my-eagle3")
def eagle3(
    context: typer.Context,
    out: flags.Out,
    data: flags.Data = None,
    target: flags.Target = "bundled",
    start: flags.Start = None,
    num_unroll: Annotated[
        int, option(RECIPE, "Steps on its own outputs.", "--num-unroll", metavar="N")
    ] = 4,
    draft_vocab_size: Annotated[
        int | None,
        option(
            RECIPE,
            "Ids it can draft: the most frequent of the text.",
            "--draft-vocab-size",
            metavar="N",
            show_default="all",
        ),
    ] = None,
    taps: flags.Taps = None,
    intermediate_size: flags.Intermediate = None,
    decay: flags.Decay = 0.8,
    tvd_share: flags.TvdShare = 0.9,
    own_tokens: flags.OwnTokens = 0,
    own_share: flags.OwnShare = 0.5,
    length: flags.Length = 512,
    steps: flags.Steps = None,
    minutes: flags.Minutes = None,
    batch: flags.RowsPerStep = 16,
    accumulation: flags.Accumulation = 1,
    learning_rate: flags.LearningRate = 1e-3,
    matrix_learning_rate: flags.MatrixLearningRate = 0.01,
    optimiser: flags.Optimiser = "muon",
    schedule: flags.Schedule = "wsd",
    seed: flags.Seed = 0,
    checkpoint_every: flags.CheckpointEvery = 60.0,
    device: flags.Device = "auto",
    plot: flags.Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Train an EAGLE-3 head on the target's features and its own outputs."""
    _train("eagle3", context.params)


@app.command(epilog="Example: outrider train dflash my/*.txt --markov-rank 32 --out my-dflash")
def dflash(
    context: typer.Context,
    out: flags.Out,
    data: flags.Data = None,
    target: flags.Target = "bundled",
    start: flags.Start = None,
    block_size: Annotated[
        int,
        option(RECIPE, "Places of a block, the known one included.", "--block-size", metavar="N"),
    ] = 8,
    num_hidden_layers: Annotated[int, option(RECIPE, "Layers.", "--num-layers", metavar="N")] = 2,
    mask_token_id: Annotated[
        int | None,
        option(
            RECIPE,
            "Id that means 'not known yet'.",
            "--mask-token-id",
            metavar="ID",
            show_default="one the text never holds",
        ),
    ] = None,
    markov_rank: Annotated[
        int, option(RECIPE, "Rank of the Markov bias; 0: none.", "--markov-rank", metavar="N")
    ] = 0,
    confidence: Annotated[
        bool, option(RECIPE, "Also predict each place's acceptance.", "--confidence")
    ] = False,
    taps: flags.Taps = None,
    intermediate_size: flags.Intermediate = None,
    decay: flags.Decay = 0.8,
    tvd_share: flags.TvdShare = 0.9,
    own_tokens: flags.OwnTokens = 0,
    own_share: flags.OwnShare = 0.5,
    length: flags.Length = 512,
    steps: flags.Steps = None,
    minutes: flags.Minutes = None,
    batch: flags.RowsPerStep = 16,
    accumulation: flags.Accumulation = 1,
    learning_rate: flags.LearningRate = 1e-3,
    matrix_learning_rate: flags.MatrixLearningRate = 0.01,
    optimiser: flags.Optimiser = "muon",
    schedule: flags.Schedule = "wsd",
    seed: flags.Seed = 0,
    checkpoint_every: flags.CheckpointEvery = 60.0,
    device: flags.Device = "auto",
    plot: flags.Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Train a DFlash head that drafts a whole block in one pass."""
    _train("dflash", context.params)


@app.command(
    "early-exit",
    epilog="Example: outrider train early-exit my/*.txt --target MODEL --out my-target",
)
def early_exit(
    context: typer.Context,
    out: flags.Out,
    data: flags.Data = None,
    target: flags.Target = "bundled",
    exit_weight: Annotated[
        float, option(RECIPE, "Weight of the exits' loss.", "--exit-weight", metavar="X")
    ] = 0.15,
    layer_dropout: Annotated[
        float, option(RECIPE, "Dropout of the last layer.", "--layer-dropout", metavar="P")
    ] = 0.05,
    own_tokens: flags.OwnTokens = 0,
    own_share: flags.OwnShare = 0.5,
    length: flags.Length = 512,
    steps: flags.Steps = None,
    minutes: flags.Minutes = None,
    batch: flags.RowsPerStep = 16,
    accumulation: flags.Accumulation = 1,
    learning_rate: flags.LearningRate = 3e-4,
    matrix_learning_rate: flags.MatrixLearningRate = 0.003,
    optimiser: flags.Optimiser = "muon",
    schedule: flags.Schedule = "wsd",
    seed: flags.Seed = 0,
    checkpoint_every: flags.CheckpointEvery = 60.0,
    device: flags.Device = "auto",
    plot: flags.Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Continue a target's own training so that its first layers can draft (changes the target)."""
    _train("early-exit", context.params)


def _train(kind: str, given: dict[str, Any]) -> None:
    """Run one session with a command's options and say what it was worth."""
    if given["steps"] is not None and given["minutes"] is not None:
        raise ConfigError("--steps and --minutes both set the length: give one of them")
    if given["optimiser"] not in ("muon", "adamw"):
        raise ConfigError(f"optimiser {given['optimiser']!r} is neither muon nor adamw")
    if not sys.stderr.isatty():
        _log_to_stderr()
    from outrider.train.optim import OptimConfig
    from outrider.train.session import SessionConfig, run_session

    options = {name: value for name, value in given.items() if name not in SHARED}
    options = {name: value for name, value in options.items() if value is not None}
    if "taps" in options:
        options["taps"] = _numbers(options["taps"])
    steps = 500 if given["minutes"] is None and given["steps"] is None else given["steps"]
    outcome = run_session(
        SessionConfig(
            kind=kind,
            out=given["out"],
            data=tuple(given["data"] or ()),
            target=given["target"],
            start=given.get("start"),
            own_tokens=given["own_tokens"],
            own_share=given["own_share"],
            length=given["length"],
            num_steps=steps,
            minutes=given["minutes"],
            rows_per_step=given["batch"],
            accumulation=given["accumulation"],
            seed=given["seed"],
            checkpoint_every_s=given["checkpoint_every"],
            device=given["device"],
            optim=OptimConfig(
                learning_rate=given["learning_rate"],
                matrix_learning_rate=given["matrix_learning_rate"],
                muon=given["optimiser"] == "muon",
                schedule=given["schedule"],
            ),
            options=options,
        )
    )
    if os.environ.get("RANK", "0") != "0":
        return  # one process of several speaks
    if given["plot"] is not None:
        from outrider.train.plots import plot_run

        plot_run(outcome.folder / "provenance.json", given["plot"])
    _show(kind, outcome, given["as_json"])


def _show(kind: str, outcome: Any, as_json: bool) -> None:
    record = {
        "kind": kind,
        "folder": str(outcome.folder),
        "num_steps": outcome.report.num_steps,
        "seconds": round(outcome.report.seconds, 1),
        "before": outcome.before,
        "after": outcome.after,
        "training_text": outcome.trained_on,
    }
    console = stdout()
    rows = [("before", outcome.before), ("after", outcome.after)]
    for label, figures in rows:
        console.print(
            f"held-out text, {label}: alpha {figures['alpha']:.3f}, greedy agreement "
            f"{figures['agreement']:.3f}, acceptance length "
            f"{figures['greedy_acceptance_length']:.2f} with K={figures['num_draft_tokens']}"
        )
    console.print(f"written to {outcome.folder}")
    if as_json:
        print_json(record)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--taps is {text!r}; give layer numbers like 2,4,6") from None


def _log_to_stderr() -> None:
    import logging

    logging.getLogger("outrider.train").setLevel(logging.INFO)
