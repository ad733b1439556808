"""`outrider train`: drafters for your own target, and for your own text.

Each command trains one kind; its options are declared in `outrider.train.config`. Training resumes
by itself when the same command is given again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.console import Json, print_json, stdout
from outrider.errors import ConfigError
from outrider.options import Group, Options, expanded, of, option
from outrider.parameters import OUTPUT
from outrider.train.config import COMMANDS, DEFAULT_STEPS, Kind, OptimConfig, SessionConfig

if TYPE_CHECKING:
    from outrider.train.session import Outcome

OWN_TOKENS = 400_000  # that a target writes where no files are given
MOST_OWN_TOKENS = 8_000_000  # where a time is given, which ends it earlier

app = typer.Typer(
    help="Train drafters: draft models, Medusa, EAGLE-3 and DFlash heads, early exits.",
    no_args_is_help=True,
)
Plot = Annotated[
    Path | None, option(OUTPUT, "Draw the learning curve to this file.", "--plot", metavar="FILE")
]


def command_of(kind: Kind) -> Callable[..., None]:
    groups = {
        "session": of(SessionConfig, without=() if kind.continues else ("start",)),
        "optim": of(OptimConfig, muon={"default": "muon"}),
    }
    if kind.learning_rates is not None:
        rates = zip(("learning_rate", "matrix_learning_rate"), kind.learning_rates, strict=True)
        changes: Any = {name: {"default": rate} for name, rate in rates}
        groups["optim"] = of(OptimConfig, muon={"default": "muon"}, **changes)
    for number, config in enumerate(kind.recipe):
        groups[f"recipe{number}"] = _recipe(config)

    def command(*, plot: Plot = None, as_json: Json = False, **given: Options) -> None:
        recipe = {
            name: value
            for number in range(len(kind.recipe))
            for name, value in given[f"recipe{number}"].items()
        }
        _train(kind.name, given["session"], given["optim"], recipe, plot, as_json)

    command.__doc__ = kind.help
    return expanded(command, groups)


def _recipe(config: type) -> Group:
    """The options of a recipe; a mask token that is not given is found in the text."""
    group = of(config)
    if "mask_token_id" not in group.names:
        return group
    return of(config, mask_token_id={"default": None})


for _kind in COMMANDS:
    _example = f"Example: outrider train {_kind.name} {_kind.example}"
    app.command(_kind.name, epilog=_example)(command_of(_kind))


def _train(
    kind: str, session: Options, optim: Options, recipe: Options, plot: Path | None, as_json: bool
) -> None:
    """Runs one session with a command's options and says what it gained."""
    _take_target(session)
    if not {"minutes", "hours"} & {*session}:
        session.setdefault("num_steps", DEFAULT_STEPS)
    config = SessionConfig(kind=kind, optim=OptimConfig(**optim), options=recipe, **session)
    if not sys.stderr.isatty():
        _log_to_stderr()
    from outrider.train.session import run_session

    outcome = run_session(config)
    if os.environ.get("RANK", "0") != "0":
        return  # of several processes, the first one prints
    if plot is not None:
        from outrider.train.plots import plot_run

        plot_run(outcome.folder / "provenance.json", plot)
    _show(kind, outcome, as_json)


def _take_target(session: Options) -> None:
    """A short name in front of the files is the target: `outrider train eagle3 smollm2`. Without
    files, the target writes its own text."""
    from outrider.model.named import SHORT_NAMES

    files = list(session.get("data", ()))
    if files and str(files[0]) in SHORT_NAMES and not files[0].exists():
        if "target" in session and session["target"] != "bundled":
            raise ConfigError(f"two targets: {files[0]} and {session['target']}; give one of them")
        session["target"], session["data"] = str(files[0]), tuple(files[1:])
        if not session["data"]:
            has_time = session.get("minutes") or session.get("hours")
            usual = MOST_OWN_TOKENS if has_time else OWN_TOKENS
            session["own_tokens"] = session.get("own_tokens") or usual


def _show(kind: str, outcome: Outcome, as_json: bool) -> None:
    record: dict[str, Any] = {
        "kind": kind,
        "folder": str(outcome.folder),
        "num_steps": outcome.report.num_steps,
        "seconds": round(outcome.report.seconds, 1),
        "before": outcome.before,
        "after": outcome.after,
        "training_text": outcome.trained_on,
        "expected": outcome.expected,
    }
    console = stdout()
    rows = [("before", outcome.before), ("after", outcome.after)]
    for label, figures in rows:
        console.print(
            f"held-out text, {label}: alpha {figures['alpha']:.3f}, greedy agreement "
            f"{figures['agreement']:.3f}, acceptance length "
            f"{figures['greedy_acceptance_length']:.2f} with K={figures['num_draft_tokens']}"
        )
    if "agreement_by_depth" in outcome.after:
        names = ("alpha_by_depth", "agreement_by_depth")
        by_depth = [" ".join(f"{x:.2f}" for x in outcome.after[name]) for name in names]
        console.print(f"by depth: alpha {by_depth[0]}, greedy agreement {by_depth[1]}")
    if outcome.expected:
        speeds = outcome.expected
        console.print(
            f"speed to expect: {speeds['speedup']:.2f} x plain decoding with K=4 "
            f"({speeds['drafted']:.0f} against {speeds['plain']:.0f} tokens/s here, held-out chats)"
        )
    console.print(f"written to {outcome.folder}")
    if as_json:
        print_json(record)


def _log_to_stderr() -> None:
    import logging

    logging.getLogger("outrider.train").setLevel(logging.INFO)
