"""The options that all `outrider train` commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

DATA = "Data"
RUN = "Run"
RECIPE = "Recipe"
OUTPUT = "Output"


def option(panel: str, help: str, *names: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


Data = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILES", help="Text, .jsonl (messages, prompt/completion or text) or .xz files."
    ),
]
Out = Annotated[
    Path, option(OUTPUT, "Folder for the drafter and its provenance.", "--out", "-o", metavar="DIR")
]
Target = Annotated[
    str,
    option(DATA, "Target: a folder, a hub name, or 'bundled'.", "--target", metavar="MODEL"),
]
Start = Annotated[
    str | None,
    option(RECIPE, "Continue this drafter (fine-tuning).", "--from", metavar="MODEL"),
]
OwnTokens = Annotated[
    int,
    option(DATA, "Tokens the target writes itself, to train on.", "--own-tokens", metavar="N"),
]
OwnShare = Annotated[
    float, option(DATA, "Their share of each batch.", "--own-share", metavar="SHARE")
]
Length = Annotated[int, option(DATA, "Tokens per sequence.", "--length", metavar="N")]
Steps = Annotated[
    int | None, option(RUN, "Optimiser steps.", "--steps", metavar="N", show_default="500")
]
Minutes = Annotated[
    float | None,
    option(RUN, "Length in minutes instead; the first steps are timed.", "--minutes", metavar="M"),
]
RowsPerStep = Annotated[int, option(RUN, "Sequences per step.", "--batch", metavar="N")]
Accumulation = Annotated[
    int, option(RUN, "Passes per step, to save memory.", "--accumulation", metavar="N")
]
LearningRate = Annotated[
    float, option(RUN, "For embeddings, heads and norms.", "--learning-rate", metavar="X")
]
MatrixLearningRate = Annotated[
    float, option(RUN, "For weight matrices.", "--matrix-learning-rate", metavar="X")
]
Optimiser = Annotated[
    str, option(RUN, "muon (matrices; AdamW for the rest) or adamw.", "--optimiser", metavar="NAME")
]
Schedule = Annotated[str, option(RUN, "wsd, cosine or constant.", "--schedule", metavar="NAME")]
Seed = Annotated[int, option(RUN, "Same seed, same run.", "--seed", metavar="INT")]
CheckpointEvery = Annotated[
    float,
    option(RUN, "Seconds between checkpoints.", "--checkpoint-every", metavar="SECONDS"),
]
Device = Annotated[str, option(RUN, "auto, cpu, cuda or cuda:N.", "--device", metavar="NAME")]
TvdShare = Annotated[
    float,
    option(
        RECIPE, "Share of the total variation in the loss at the end.", "--tvd-share", metavar="X"
    ),
]
Decay = Annotated[float, option(RECIPE, "Weight of each further depth.", "--decay", metavar="X")]
Taps = Annotated[
    str | None,
    option(
        RECIPE,
        "Target layers to read, like 2,4,6.",
        "--taps",
        metavar="LIST",
        show_default="low, middle, high",
    ),
]
Intermediate = Annotated[
    int | None,
    option(RECIPE, "Feed-forward width.", "--intermediate-size", metavar="N", show_default="auto"),
]
Plot = Annotated[
    Path | None, option(OUTPUT, "Draw the learning curve to this file.", "--plot", metavar="FILE")
]
Json = Annotated[
    bool, option(OUTPUT, "Print one JSON object as the last line of stdout.", "--json")
]
