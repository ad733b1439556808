"""Turns exceptions into exit codes and one-line messages.

    0    done                       1    a check failed, a model does not load, or a bug
    2    a mistake in the call      130  interrupted; what was printed stays      141  pipe closed

A mistake, a model that does not load and a bug (--debug shows more of it) print exactly one line on
stderr, which says what to do about it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence

import typer

from outrider.errors import OutriderError

# Options of vLLM's and llama.cpp's servers -> what does the same here.
ELSEWHERE = {
    "--api-key": "OUTRIDER_API_KEY in the environment, or --api-key-file FILE",
    "--model": "the first argument, without an option",
    "--gpu-memory-utilization": "--kv-memory SIZE",
    "--kv-cache-memory-bytes": "--kv-memory SIZE",
    "--ctx-size": "--max-model-len N",
    "--parallel": "--max-num-seqs N",
    "--n-gpu-layers": "--device cuda",
    "--gpu-layers": "--device cuda",
    "--alias": "--served-model-name NAME",
    "--allowed-origins": "--cors-origin ORIGIN",
    "--enable-auto-tool-choice": "always so; leave it out",
    "--jinja": "always so; leave it out",
    "--speculative-config": "--proposer NAME, --draft-model MODEL, --num-draft-tokens K",
    "--model-draft": "--draft-model MODEL",
    "--temp": "--sampling temperature=T",
    "--seed": "--sampling seed=N",
    "--n-predict": "--sampling max_tokens=N",
    "--override-generation-config": "--sampling NAME=VALUE, once for each",
    "--draft-max": "--num-draft-tokens K",
    "--disable-log-requests": "--log-level warning",
    "--trust-remote-code": "never so: code of a model folder is not run",
}
DEBUG_VARIABLE = "OUTRIDER_DEBUG"


def run(app: typer.Typer, args: Sequence[str]) -> int:
    """Runs the app and returns the process's exit code; prints at most one line of error."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode still gets the text
    try:
        code = app(args=list(args), prog_name="outrider", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _pipe_closed()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer caught it and left
            return _pipe_closed()
        return stop.code if isinstance(stop.code, int) else 1
    except OutriderError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of typer's
            return _fail(_usage(error), getattr(error, "exit_code", 2))
        return _bug(error)


class OneLine(logging.Formatter):
    """A warning in one line; the traceback that came with it only when debugging."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"outrider: {' '.join(record.getMessage().split())}"
        if record.exc_info is None or record.exc_info[1] is None:
            return text
        error = record.exc_info[1]
        if debugging():
            return f"{text}\n{self.formatException(record.exc_info)}"
        return f"{text} ({type(error).__name__}: {' '.join(str(error).split())})"


def debugging() -> bool:
    return bool(os.environ.get(DEBUG_VARIABLE))


def _fail(message: str, code: int) -> int:
    """Prints the message in one line, whatever line breaks it has."""
    if debugging():
        traceback.print_exc()
    print("outrider:", " ".join(message.split()), file=sys.stderr)
    return code


def _bug(error: Exception) -> int:
    name = type(error).__name__
    hint = "" if debugging() else " (a bug, not your fault: outrider --debug COMMAND tells more)"
    return _fail(f"{name}: {error}{hint}", 1)


def _usage(error: Exception) -> str:
    """typer's message with a suggestion in our words and the help command to look at."""
    message = str(getattr(error, "format_message")())  # noqa: B009 (not in Exception's type)
    possible = getattr(error, "possibilities", None)
    name = getattr(error, "option_name", None)
    if name in ELSEWHERE:
        message = f"{getattr(error, 'message', message)}. Here it is: {ELSEWHERE[name]}"
    elif possible:
        message = f"{getattr(error, 'message', message)}. Did you mean {possible[0]}?"
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "outrider")
    joint = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:].rstrip('.')}{joint} {path} --help"


def _pipe_closed() -> int:
    """`outrider ... | head`: the pipe is closed, so nothing may be flushed at exit either."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    return 141
