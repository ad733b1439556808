"""The `outrider` command: its subcommands, and the options before the subcommand.

Nothing here imports torch: `outrider --help` and `outrider theory` answer at once. Commands import
the engine inside their functions.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from outrider.cli import (
    bench,
    chat,
    demo,
    doctor,
    export,
    generate,
    models,
    plan,
    plot,
    prove,
    serve,
    theory,
)
from outrider.cli.errors import DEBUG_VARIABLE
from outrider.config import EngineConfig, SamplingParams
from outrider.parameters import params

# Names of vLLM, transformers and mlx-lm for options of ours.
ALIASES = {
    alias: declared.flag.removeprefix("--")
    for config in (EngineConfig, SamplingParams)
    for declared in params(config).values()
    for alias in declared.aliases
}


def canonical(name: str) -> str:
    """The option's own name: accepts underscores and the names of other tools."""
    name = name.replace("_", "-") if len(name) > 1 else name
    return ALIASES.get(name, name)


app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding: the target model's own output, sooner.",
    epilog="Start with: outrider demo",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": canonical},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from outrider.cli.version import version_text

        typer.echo(version_text())
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", envvar=DEBUG_VARIABLE)
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Version, kernel path and optional parts installed.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


BENCH_EXAMPLE = "Example: outrider bench decode -w code -k 4,auto"
TRAIN_EXAMPLE = "Example: outrider train draft notes/*.md --from bundled:draft --out my-draft"
EXPORT_EXAMPLE = "Example: outrider export vllm bundled:eagle3 eagle3-for-vllm"
START, DECIDE, MAKE = "Write and serve", "Decide and prove", "Make drafters"
app.command(epilog=demo.EXAMPLE, rich_help_panel=START)(demo.demo)
app.command(epilog=generate.EXAMPLE, rich_help_panel=START)(generate.generate)
app.command(epilog=chat.EXAMPLE, rich_help_panel=START)(chat.chat)
app.command(epilog=serve.EXAMPLE, rich_help_panel=START)(serve.serve)
app.command(epilog=models.MODELS_EXAMPLE, rich_help_panel=START)(models.models)
app.command(epilog=models.PULL_EXAMPLE, rich_help_panel=START)(models.pull)
app.command(epilog=doctor.EXAMPLE, rich_help_panel=DECIDE)(doctor.doctor)
app.command(epilog=prove.EXAMPLE, rich_help_panel=DECIDE)(prove.prove)
app.add_typer(bench.app, name="bench", epilog=BENCH_EXAMPLE, rich_help_panel=DECIDE)
app.command(epilog=plot.EXAMPLE, rich_help_panel=DECIDE)(plot.plot)
app.command(epilog=theory.EXAMPLE, rich_help_panel=DECIDE)(theory.theory)
app.command(epilog=plan.EXAMPLE, rich_help_panel=DECIDE)(plan.plan)
if find_spec("outrider.cli.train"):
    train = import_module("outrider.cli.train")
    app.add_typer(train.app, name="train", epilog=TRAIN_EXAMPLE, rich_help_panel=MAKE)
app.add_typer(export.app, name="export", epilog=EXPORT_EXAMPLE, rich_help_panel=MAKE)
