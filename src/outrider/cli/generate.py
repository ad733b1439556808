"""`outrider generate`: continue a text, streaming what is confirmed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli import flags
from outrider.cli.console import busy, print_json
from outrider.config import EngineConfig
from outrider.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

EXAMPLE = "Example: outrider generate -p 'def fibonacci(n):' --max-tokens 60 --trace"

WITHOUT_DRAFT_MODEL = ("early-exit", "lookahead", "ngram", "prediction", "quantized", "suffix")


def generate(
    model: flags.Model = "bundled",
    prompt: flags.Prompt = None,
    file: flags.File = None,
    prediction: flags.Prediction = None,
    prediction_file: flags.PredictionFile = None,
    draft_model: flags.DraftModel = None,
    proposer: flags.Proposer = None,
    proposer_option: flags.ProposerOptions = None,
    num_draft_tokens: flags.NumDraftTokens = EngineConfig.num_draft_tokens,
    verifier: flags.Verifier = "coupled",
    temperature: flags.Temperature = 0.0,
    top_k: flags.TopK = 0,
    top_p: flags.TopP = 1.0,
    min_p: flags.MinP = 0.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    repetition_penalty: flags.RepetitionPenalty = 1.0,
    seed: flags.Seed = None,
    n: flags.NumSamples = 1,
    max_tokens: flags.MaxTokens = 128,
    min_tokens: flags.MinTokens = 0,
    stop: flags.StopTexts = None,
    ignore_eos: flags.IgnoreEos = False,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = "auto",
    backend: flags.Backend = "auto",
    threads: flags.Threads = None,
    tensor_parallel_size: flags.TensorParallel = 1,
    stream: flags.Stream = None,
    show_trace: flags.Trace = False,
    logprobs: flags.Logprobs = None,
    as_json: flags.Json = False,
) -> None:
    """Continue a text with any causal language model, speculatively and exactly."""
    text = read_text("prompt", prompt, file)
    if text is None:
        raise RequestError("no prompt: pass -p TEXT, -f FILE, or -f - for standard input")
    if not text:
        raise RequestError("the prompt is empty: give at least one character", "prompt")
    if stream and n > 1:
        raise ConfigError("--stream shows one completion: leave it out, or leave out --n")
    guess = read_text("prediction", prediction, prediction_file)
    proposer = choose_proposer(proposer, draft_model, guess)
    options = flags.read_proposer_options(proposer_option)
    with busy(f"loading {model}"):
        from outrider.cli.run import Run
        from outrider.llm import LLM
        from outrider.sampling import SamplingParams

        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            seed=seed,
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        llm = LLM(
            model,
            draft_model=draft_model,
            proposer=proposer,
            proposer_options=options,
            num_draft_tokens=num_draft_tokens,
            verifier=verifier,
            device=device,
            dtype=dtype,
            backend=backend,  # type: ignore[arg-type]
            threads=threads,
            tensor_parallel_size=tensor_parallel_size,
        )
    refuse_unused(llm.engine, options)
    run = Run(
        llm.engine,
        stream=(n == 1 and not as_json) if stream is None else stream,
        show_trace=show_trace,
        as_json=as_json,
    )
    run(text, params, guess or "")
    if as_json:
        print_json(run.record(model))
    if run.interrupted:
        raise typer.Exit(130)


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


def refuse_unused(engine: Engine, options: Iterable[str]) -> None:
    """Options of a proposer that nobody asks would be silently ignored."""
    from outrider.engine.build import ProposerSet

    proposers = engine.proposers
    assert isinstance(proposers, ProposerSet)
    for name in options:
        if name not in proposers.built():
            raise ConfigError(
                f"--proposer-option {name}...: nothing drafts with {name!r} here; "
                f"choose it with --proposer {name}"
            )


def choose_proposer(proposer: str | None, draft_model: str | None, guess: str | None) -> str | None:
    """The proposer a prediction implies; refuses an input that nobody would read."""
    if guess is not None and proposer not in (None, "prediction"):
        raise ConfigError(f"proposer {proposer!r} reads no prediction: use --proposer prediction")
    if guess is None and proposer == "prediction":
        raise ConfigError("proposer 'prediction' needs one: pass --prediction TEXT")
    chosen = "prediction" if guess is not None else proposer
    if draft_model is not None and chosen in WITHOUT_DRAFT_MODEL:
        raise ConfigError(f"proposer {chosen!r} uses no draft model: leave out --draft-model")
    return chosen
