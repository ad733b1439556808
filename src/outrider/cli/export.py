"""`outrider export`: drafters for other engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import Json, print_json
from outrider.options import option
from outrider.parameters import INPUT

app = typer.Typer(help="Write drafters in the layouts of other engines.", no_args_is_help=True)

Target = Annotated[
    str,
    option(INPUT, "The target: a folder, a hub name, or 'bundled'.", "--target", metavar="MODEL"),
]


@app.callback()
def group() -> None:
    """Makes typer treat this as a group although it has one command."""


@app.command(epilog="Example: outrider export vllm bundled:eagle3 eagle3-for-vllm")
def vllm(
    drafter: Annotated[
        str, typer.Argument(metavar="DRAFTER_DIR", help="A draft model or head, or bundled:NAME.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to write.")],
    target: Target = "bundled",
    as_json: Json = False,
) -> None:
    """Write a trained draft or head as vLLM loads it, and print what serves it."""
    from outrider.export.vllm import export_vllm
    from outrider.integrations.vllm.mapping import Wish, command, shown
    from outrider.model.bundled import find_folder

    place = out.resolve()
    config = export_vllm(find_folder(drafter), find_folder(target), place)
    wish = Wish(model=target, draft_model=str(place))
    args, _ = command(wish, host="127.0.0.1", port=8000)
    if as_json:
        print_json({"speculative_config": config, "command": ["vllm", *args]})
        return
    typer.echo(json.dumps(config, indent=2))
    typer.echo(f"\n{shown(args)}\n\nor: outrider serve {target} --backend vllm --draft-model {out}")
