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
    option(
        INPUT,
        "The target: a folder, a GGUF file, a hub name, bundled or smollm2.",
        "--target",
        metavar="MODEL",
    ),
]


@app.callback()
def group() -> None:
    """One command for each layout."""


Drafter = Annotated[
    str, typer.Argument(metavar="DRAFTER_DIR", help="A draft model or head, or bundled:NAME.")
]
HeadFolder = Annotated[
    str, typer.Argument(metavar="HEAD_DIR", help="Drafting heads, or bundled:NAME.")
]
Out = Annotated[Path, typer.Argument(metavar="OUT_DIR", help="Folder to write.")]


@app.command(epilog="Example: outrider export vllm bundled:eagle3 eagle3-for-vllm")
def vllm(drafter: Drafter, out: Out, target: Target = "bundled", as_json: Json = False) -> None:
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


@app.command(epilog="Example: outrider export speculators bundled:eagle3 eagle3-speculators")
def speculators(
    head: HeadFolder, out: Out, target: Target = "bundled", as_json: Json = False
) -> None:
    """Write a head in the speculators format, with the target's embedding."""
    _export(head, out, target, "speculators", as_json=as_json)


@app.command(epilog="Example: outrider export specforge bundled:eagle3 eagle3-for-sglang")
def specforge(
    head: HeadFolder, out: Out, target: Target = "bundled", as_json: Json = False
) -> None:
    """Write a head as SpecForge does and SGLang loads it."""
    _export(head, out, target, "specforge", as_json=as_json)


@app.command(epilog="Example: outrider export gguf bundled:eagle3 eagle3.gguf --target model.gguf")
def gguf(
    head: HeadFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT_FILE", help="File to write.")],
    target: Target = "bundled",
    as_json: Json = False,
) -> None:
    """Write an EAGLE-3 head as llama.cpp loads it. A target in GGUF gives it the tokenizer."""
    from outrider.export.gguf import export_gguf
    from outrider.model.bundled import find_folder

    place = out.resolve()
    written = export_gguf(find_folder(head), find_folder(target), place)
    if as_json:
        print_json({"layout": "gguf", "kind": written.kind, "file": str(place)})
        return
    typer.echo(f"wrote {written.kind} for llama.cpp: {out}")
    typer.echo(f"try it: outrider serve {target} --draft-model {out}")


def _export(head: str, out: Path, target: str, layout: str, *, as_json: bool) -> None:
    from outrider.export.heads import export_head
    from outrider.model.bundled import find_folder

    place = out.resolve()
    written = export_head(find_folder(head), find_folder(target), place, layout)
    record = {
        "layout": layout,
        "kind": written.kind,
        "folder": str(place),
        "num_draft_tokens": written.num_draft_tokens,
    }
    if as_json:
        print_json(record)
        return
    typer.echo(f"wrote {written.kind} in the layout of {layout}: {out}")
    typer.echo(f"try it: outrider serve {target} --draft-model {out}")
