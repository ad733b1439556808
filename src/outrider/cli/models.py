"""`outrider models` and `outrider pull`: what is on this machine, and what the hub has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import Json, busy, print_json, stderr, stdout
from outrider.errors import ConfigError

MODELS_EXAMPLE = "Example: outrider models ~/gguf"
PULL_EXAMPLE = "Example: outrider pull Qwen/Qwen3-0.6B-GGUF:Q8_0"


def models(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER", help="Look for GGUF files here, too.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models on this machine, and the drafting heads that fit them."""
    wrong = [folder for folder in folders or () if not folder.is_dir()]
    if wrong:
        raise ConfigError(f"{wrong[0]} is no folder: name one that holds GGUF files")
    with busy("looking"):
        from rich import box
        from rich.table import Table

        from outrider.model.inventory import inventory

        found = inventory(folders or ())
    console = stderr() if as_json else stdout()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("model", "from", "size", "format", "context", "heads that fit"):
        right = title in ("size", "context")
        table.add_column(title, justify="right" if right else "left", no_wrap=title == "model")
    for item in found:
        fits = "\n".join(item.drafters) if item.head is None else f"({item.head} heads)"
        size, context = f"{item.num_bytes / 2**20:.0f} MiB", str(item.context or "")
        table.add_row(item.name, item.place, size, item.format, context, fits)
    console.print(table, soft_wrap=False)
    if as_json:
        keys = ("name", "place", "num_bytes", "format", "context", "head", "drafters")
        records = [{key: getattr(item, key) for key in keys} for item in found]
        paths = [{"path": str(item.path)} for item in found]
        print_json({"models": [a | b for a, b in zip(records, paths, strict=True)]})


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="owner/name, owner/name:Q4_K_M, owner/name/FILE.gguf, or smollm2."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Download a model from the hub. An interrupted download goes on where it ended."""
    from outrider.model.hub import HubName
    from outrider.model.named import PACKAGED, packaged_file

    if name in PACKAGED:
        path = packaged_file(name)
    else:
        wanted = HubName.parse(name)
        if wanted is None:
            raise ConfigError(f"{name} is no name on the hub: they look like owner/name")
        path = wanted.download()  # with the hub library's own progress bars
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        stdout().print(f"{path}\noutrider chat {name}", markup=False)
