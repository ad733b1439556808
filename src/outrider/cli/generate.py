"""`outrider generate`: continue a text, streaming what is confirmed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.console import Json, busy, print_json
from outrider.config import EngineConfig, SamplingParams
from outrider.errors import ConfigError, RequestError
from outrider.options import Options, expanded, of, option
from outrider.parameters import INPUT, MACHINE, OUTPUT, SPECULATION
from outrider.registry import PREDICTION, uses_draft_model

if TYPE_CHECKING:
    from outrider.llm import LLM

EXAMPLE = "Example: outrider generate -p 'def fibonacci(n):' --max-tokens 60 --trace"


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
Chat = Annotated[
    bool, option(INPUT, "The text is a message: ask it in the model's chat template.", "--chat")
]
Prediction = Annotated[
    str | None,
    option(INPUT, "A guess of the output, to draft from.", "--prediction", metavar="TEXT"),
]
PredictionFile = Annotated[
    Path | None,
    option(INPUT, "The same, from a file.", "--prediction-file", metavar="FILE"),
]
EngineOptions = Annotated[
    Options, of(EngineConfig, "model", SPECULATION, MACHINE, without=("buckets",))
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
Trace = Annotated[
    bool, option(OUTPUT, "Show what was drafted, accepted and rejected, step by step.", "--trace")
]


@expanded
def generate(
    *,
    prompt: Prompt = None,
    file: File = None,
    chat: Chat = False,
    prediction: Prediction = None,
    prediction_file: PredictionFile = None,
    engine: EngineOptions,
    stream: Stream = None,
    show_trace: Trace = False,
    sampling: Annotated[Options, of(SamplingParams)],
    as_json: Json = False,
) -> None:
    """Continue a text with any causal language model, speculatively and exactly."""
    text = read_text("prompt", prompt, file)
    if text is None:
        raise RequestError("no prompt: pass -p TEXT, -f FILE, or -f - for standard input")
    if not text:
        raise RequestError("the prompt is empty: give at least one character", "prompt")
    single = sampling["n"] == 1
    if stream and not single:
        raise ConfigError("--stream shows one completion: leave it out, or leave out --n")
    guess = read_text("prediction", prediction, prediction_file)
    proposer = choose_proposer(engine.get("proposer"), engine.get("draft_model"), guess)
    with busy(f"loading {engine['model']}"):
        from outrider.cli.run import Run
        from outrider.llm import LLM

        params = SamplingParams(**sampling)
        llm = LLM(**engine | {"proposer": proposer})
    refuse_unused(llm)
    ids = chat_prompt(llm, text) if chat else None
    run = Run(
        llm.engine,
        stream=(single and not as_json) if stream is None else stream,
        show_trace=show_trace,
        as_json=as_json,
    )
    run(text, params, guess or "", ids)
    if as_json:
        print_json(run.record(engine["model"]))
    if run.interrupted:
        raise typer.Exit(130)


def chat_prompt(llm: LLM, text: str) -> list[int]:
    """One message in the model's template; ConfigError for a model without one."""
    from outrider.model.chat_template import chat_ids, load_template

    tokenizer = llm.engine.tokenizer
    if not load_template(tokenizer, None)[1]:
        raise ConfigError(f"{llm.config.model} has no chat template: leave out --chat")
    return chat_ids(tokenizer, [{"role": "user", "content": text}])


def read_text(what: str, text: str | None, file: Path | None) -> str | None:
    """The text given directly or in a file; '-' is standard input, None where neither was given."""
    if text is not None and file is not None:
        raise RequestError(f"give the {what} as text or as a file, not both", what)
    if text == "-" or (file is not None and str(file) == "-"):
        return sys.stdin.read()
    if file is None:
        return text
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RequestError(f"cannot read the {what} from {file}: {reason}", what) from None


def refuse_unused(llm: LLM) -> None:
    """Raises ConfigError for options of a proposer that does not draft, which have no effect."""
    from outrider.engine.build import ProposerSet

    proposers = llm.engine.proposers
    assert isinstance(proposers, ProposerSet)
    for name in llm.config.proposer_options:
        if name not in proposers.built():
            raise ConfigError(
                f"--proposer-option {name}...: nothing drafts with {name!r} here; "
                f"choose it with --proposer {name}"
            )


def choose_proposer(proposer: str | None, draft_model: str | None, guess: str | None) -> str | None:
    """The proposer that a prediction implies. Raises ConfigError for an input without effect."""
    if guess is not None and proposer not in (None, PREDICTION):
        raise ConfigError(f"proposer {proposer!r} reads no prediction: use --proposer {PREDICTION}")
    if guess is None and proposer == PREDICTION:
        raise ConfigError(f"proposer {PREDICTION!r} needs one: pass --prediction TEXT")
    chosen = PREDICTION if guess is not None else proposer
    if draft_model is not None and chosen is not None and not uses_draft_model(chosen):
        raise ConfigError(f"proposer {chosen!r} uses no draft model: leave out --draft-model")
    return chosen
