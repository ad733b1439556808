"""Every option of the generating commands, in the groups their help shows them in.

Names follow vLLM and mlx-lm where these agree; `outrider.cli.app.ALIASES` accepts the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from outrider.errors import ConfigError

INPUT = "Input"
SPECULATION = "Speculation"
SAMPLING = "Sampling"
STOPPING = "Length and stopping"
MACHINE = "Machine"
OUTPUT = "Output"


PROPOSERS = (
    *("cascade", "cross-vocab", "dflash", "draft-model", "draft-tree", "eagle3", "early-exit"),
    *("hybrid", "lookahead", "medusa", "ngram", "prediction", "quantized", "suffix"),
)
BUNDLED = ("bundled", "bundled:draft", "bundled:eagle3", "bundled:medusa", "bundled:dflash")


def among(*names: str) -> Callable[[str], list[str]]:
    """For the shell's completion: the names that begin as typed. Must not import torch."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def option(panel: str, help: str, *names: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Target: a folder, a hub name, or 'bundled'.",
        autocompletion=among("bundled"),
    ),
]

Prompt = Annotated[
    str | None,
    option(
        INPUT, "The text to continue; '-' reads standard input.", "--prompt", "-p", metavar="TEXT"
    ),
]
File = Annotated[
    Path | None,
    option(
        INPUT,
        "Continue this file's text; '-' reads standard input.",
        "--file",
        "-f",
        metavar="FILE",
    ),
]
Prediction = Annotated[
    str | None,
    option(INPUT, "A guess of the output, to draft from.", "--prediction", metavar="TEXT"),
]
PredictionFile = Annotated[
    Path | None,
    option(INPUT, "The same, from a file.", "--prediction-file", metavar="FILE"),
]

DraftModel = Annotated[
    str | None,
    option(
        SPECULATION,
        "Drafter: a folder, a hub name or bundled:NAME.",
        "--draft-model",
        metavar="MODEL",
        show_default="the bundled target's own draft",
        autocompletion=among(*BUNDLED),
    ),
]
Proposer = Annotated[
    str | None,
    option(
        SPECULATION,
        "Who drafts; a wrong name lists the right ones.",
        "--proposer",
        metavar="NAME",
        show_default="draft-model where there is one, else ngram",
        autocompletion=among(*PROPOSERS),
    ),
]
ProposerOptions = Annotated[
    list[str] | None,
    option(
        SPECULATION,
        "An option of a proposer, such as suffix.tree=false; may be repeated.",
        "--proposer-option",
        metavar="NAME.KEY=VALUE",
    ),
]


def read_proposer_options(texts: Sequence[str] | None) -> dict[str, dict[str, object]]:
    """NAME.KEY=VALUE, by name and key. A value is JSON where it can be read as such, else text.

    Names, keys and types are checked where the proposer is built.
    """
    options: dict[str, dict[str, object]] = {}
    for text in texts or ():
        path, equals, value = text.partition("=")
        name, dot, key = path.partition(".")
        if not (equals and dot and name and key):
            raise ConfigError(
                f"--proposer-option takes NAME.KEY=VALUE, such as eagle3.passes=6, not {text!r}"
            )
        try:
            options.setdefault(name, {})[key.replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options.setdefault(name, {})[key.replace("-", "_")] = value
    return options


def read_buckets(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """ "1x4,16x1": (sequences, drafts of each)."""
    if text is None:
        return None
    parts = [part.split("x") for part in text.split(",")]
    if not all(len(part) == 2 and part[0].isdigit() and part[1].isdigit() for part in parts):
        raise ConfigError(f"--buckets takes sequences x drafts, such as 1x4,16x1, not {text!r}")
    return tuple((int(size), int(k)) for size, k in parts)


def read_draft_tokens(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"a number or auto, not {text!r}") from None


NumDraftTokens = Annotated[
    Any,  # int or "auto": typer knows no unions
    option(
        SPECULATION,
        "Tokens drafted per step; 0 is plain decoding, auto what pays.",
        "--num-draft-tokens",
        "-k",
        metavar="K|auto",
        parser=read_draft_tokens,
    ),
]
Verifier = Annotated[
    str,
    option(
        SPECULATION,
        "Acceptance rule: coupled, token, block, tree. All are exact.",
        "--verifier",
        metavar="NAME",
        autocompletion=among("coupled", "token", "block", "tree"),
    ),
]

Temperature = Annotated[float, option(SAMPLING, "0 is greedy.", "--temperature", "-t", metavar="T")]
TopK = Annotated[int, option(SAMPLING, "Keep the K most probable; 0: all.", "--top-k", metavar="K")]
TopP = Annotated[
    float, option(SAMPLING, "Keep the smallest set of mass P.", "--top-p", metavar="P")
]
MinP = Annotated[
    float, option(SAMPLING, "Keep what has P times the top probability.", "--min-p", metavar="P")
]
PresencePenalty = Annotated[
    float, option(SAMPLING, "Against tokens already produced.", "--presence-penalty", metavar="X")
]
FrequencyPenalty = Annotated[
    float, option(SAMPLING, "The same, per occurrence.", "--frequency-penalty", metavar="X")
]
RepetitionPenalty = Annotated[
    float,
    option(SAMPLING, "Against tokens of prompt and output.", "--repetition-penalty", metavar="X"),
]
Seed = Annotated[
    int | None,
    option(
        SAMPLING,
        "The same seed gives the same tokens, with and without speculation.",
        "--seed",
        metavar="INT",
        show_default="a fresh one",
    ),
]
NumSamples = Annotated[int, option(SAMPLING, "How many completions.", "--n", metavar="N")]

MaxTokens = Annotated[int, option(STOPPING, "Most tokens.", "--max-tokens", "-m", metavar="N")]
MinTokens = Annotated[int, option(STOPPING, "Fewest tokens.", "--min-tokens", metavar="N")]
StopTexts = Annotated[
    list[str] | None,
    option(STOPPING, "Stop before this text; may be repeated.", "--stop", metavar="TEXT"),
]
IgnoreEos = Annotated[bool, option(STOPPING, "Go on after the end-of-text token.", "--ignore-eos")]

Device = Annotated[str, option(MACHINE, "cpu, cuda or cuda:N.", "--device", metavar="NAME")]
Dtype = Annotated[
    str,
    option(
        MACHINE,
        "auto (as stored), float32, bfloat16, float16; int8 or int4 round the weights.",
        "--dtype",
        metavar="NAME",
        autocompletion=among("auto", "float32", "bfloat16", "float16", "int8", "int4"),
    ),
]
Backend = Annotated[
    str,
    option(
        MACHINE,
        "auto, native, torch or transformers.",
        "--backend",
        metavar="NAME",
        autocompletion=among("auto", "native", "torch", "transformers"),
    ),
]
Threads = Annotated[
    int | None,
    option(MACHINE, "CPU threads.", "--threads", metavar="N", show_default="every core"),
]

TensorParallel = Annotated[
    int,
    option(
        MACHINE,
        "Processes or GPUs that share each layer of the target.",
        "--tensor-parallel-size",
        "--tp",
        metavar="N",
    ),
]

Json = Annotated[
    bool, option(OUTPUT, "Print one JSON object as the last line of stdout.", "--json")
]
Trace = Annotated[
    bool, option(OUTPUT, "Show what was drafted, accepted and rejected, step by step.", "--trace")
]
Stream = Annotated[
    bool | None,
    option(
        OUTPUT,
        "Print confirmed text as it comes.",
        "--stream/--no-stream",
        show_default="stream, unless --json or --n",
    ),
]
Logprobs = Annotated[
    int | None,
    option(
        OUTPUT,
        "Log-probabilities, with that many alternatives.",
        "--logprobs",
        metavar="N",
        show_default="off",
    ),
]
