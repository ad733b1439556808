"""`outrider bench`: decode, sweep, serve. Plain decoding always runs beside the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outrider.cli.console import Json, busy, print_json, stderr, stdout
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.options import Options, expanded, of, option, read_count, read_names, read_numbers
from outrider.parameters import OUTPUT, PEERS, WORK
from outrider.registry import WITHOUT_MODEL

if TYPE_CHECKING:
    from outrider.bench.contenders import Contender
    from outrider.bench.decode import Settings
    from outrider.bench.report import Result, Row
    from outrider.engine.engine import Engine

app = typer.Typer(help="Measure decoding, sweeps and servers.", no_args_is_help=True)

EngineOptions = Annotated[
    Options,
    of(
        EngineConfig,
        *("model", "proposer_options", "draft_model", "verifier"),
        *("device", "dtype", "backend", "threads"),
    ),
]

Workloads = Annotated[
    str,
    option(
        WORK,
        "code, prose, edit, json, summary, hot, long, mixed, or files of prompts.",
        "--workloads",
        "-w",
        metavar="NAME,...",
    ),
]
WorkloadName = Annotated[
    str, option(WORK, "One of them, or a file.", "--workload", "-w", metavar="NAME")
]
Proposers = Annotated[
    str | None,
    option(
        WORK,
        "What drafts; synthetic:ALPHA@PROPOSER drafts what is accepted with probability ALPHA.",
        "--proposers",
        metavar="NAME,...",
        show_default="the engine's own",
    ),
]
Counts = Annotated[
    str, option(WORK, "Tokens drafted per step.", "--num-draft-tokens", "-k", metavar="K,...,auto")
]
Temperatures = Annotated[
    str | None,
    option(
        WORK, "Every workload at these.", "--temperatures", metavar="T,...", show_default="its own"
    ),
]
Batch = Annotated[int, option(WORK, "Outputs decoded at once.", "--batch", "-b", metavar="N")]
NumPrompts = Annotated[
    int, option(WORK, "Prompts of each workload.", "--prompts", "-n", metavar="N")
]
MaxTokens = Annotated[
    int, option(WORK, "Tokens of each output.", "--max-tokens", "-m", metavar="N")
]
Repeats = Annotated[int, option(WORK, "Rounds that count.", "--repeats", "-r", metavar="N")]
Out = Annotated[
    Path | None, option(OUTPUT, "Write FILE.json and FILE.md.", "--out", "-o", metavar="FILE")
]
Title = Annotated[str | None, option(OUTPUT, "Heading of the result.", "--title", metavar="TEXT")]
Transformers = Annotated[
    bool, option(PEERS, "transformers too: plain, assisted, prompt lookup.", "--transformers")
]
VllmPython = Annotated[
    Path | None,
    option(
        PEERS,
        "vLLM too, with this interpreter: plain, draft model, n-gram.",
        "--vllm-python",
        metavar="FILE",
    ),
]
LlamaPython = Annotated[
    Path | None,
    option(
        PEERS,
        "llama-cpp-python too, with this interpreter: plain, prompt lookup.",
        "--llama-python",
        metavar="FILE",
    ),
]
Gguf = Annotated[
    Path | None, option(PEERS, "The target in llama.cpp's format.", "--gguf", metavar="FILE")
]
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="An OpenAI-compatible server, without /v1; with --backend the model to serve.",
    ),
]
Backends = Annotated[
    str | None,
    option(
        WORK,
        "Start outrider serve with native, vllm or both, one after the other.",
        "--backend",
        metavar="NAME,...",
        show_default="URL is a server",
    ),
]
ServeArgs = Annotated[
    list[str] | None,
    option(WORK, "With --backend: an argument of outrider serve.", "--serve-arg", metavar="ARG"),
]
VllmArgs = Annotated[
    list[str] | None,
    option(WORK, "With --backend vllm: an argument of vllm serve.", "--vllm-arg", metavar="ARG"),
]
Clients = Annotated[str, option(WORK, "Requests in flight.", "--clients", metavar="N,...")]
Temperature = Annotated[
    float | None,
    option(WORK, "Of all requests.", "--temperature", "-t", metavar="T", show_default="its own"),
]
Name = Annotated[
    str | None,
    option(WORK, "The model's name there.", "--model", metavar="NAME", show_default="the first"),
]
Axis = Annotated[str, option(WORK, "k, batch, context or temperature.", "--axis", metavar="NAME")]
Values = Annotated[
    str | None,
    option(
        WORK,
        "Places on the axis (of k: --num-draft-tokens).",
        "--values",
        metavar="X,...",
        show_default="a usual choice",
    ),
]


@app.command(epilog="Example: outrider bench decode -w code,edit -k 4,auto --proposers draft-model")
@expanded
def decode(
    *,
    engine: EngineOptions,
    workloads: Workloads = "code,prose,edit,json,summary,hot,long",
    proposers: Proposers = None,
    num_draft_tokens: Counts = "auto",
    temperatures: Temperatures = None,
    batch: Batch = 1,
    num_prompts: NumPrompts = 8,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    transformers: Transformers = False,
    vllm_python: VllmPython = None,
    llama_python: LlamaPython = None,
    gguf: Gguf = None,
    out: Out = None,
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Proposers on workloads, against plain decoding and other programs."""
    from outrider.bench.decode import decode as measure
    from outrider.bench.decode import result
    from outrider.bench.peers import find_peers
    from outrider.bench.workloads import load_workload

    wanted = [load_workload(name, num_prompts) for name in read_names(workloads)]
    if temperatures is not None:
        heats = read_numbers(temperatures, "temperatures")
        wanted = [workload.heated(heat) for workload in wanted for heat in heats]
    settings = _settings(max_tokens, batch, repeats)
    core = _load(engine, batch)
    contenders = _ours(core, proposers, num_draft_tokens)
    peers = find_peers(
        engine["model"],
        engine.get("draft_model"),
        transformers=transformers,
        vllm_python=vllm_python,
        llama_python=llama_python,
        gguf=gguf,
    )
    rows: list[Row] = []
    found = result("decode", title or f"Decoding with {engine['model']}", rows, settings)
    with _telling() as tell:
        for workload in wanted:
            rows += measure(core, contenders, [workload], settings, tell)
            if out is not None:  # what is measured is kept, whatever happens next
                found.write(out)
        for peer in peers:
            rows += peer.rows(core, wanted, settings, tell)
    _conclude(found, out, as_json)


@app.command(epilog="Example: outrider bench sweep --axis batch --values 1,2,4,8,16,32 -k auto")
@expanded
def sweep(
    *,
    engine: EngineOptions,
    axis: Axis = "k",
    values: Values = None,
    workload: WorkloadName = "code",
    proposers: Proposers = None,
    num_draft_tokens: Counts = "1,2,3,4,6,8,auto",
    batch: Batch = 1,
    num_prompts: NumPrompts = 8,
    max_tokens: MaxTokens = 128,
    repeats: Repeats = 5,
    out: Out = None,
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Along one axis: draft length, batch size, context length or temperature."""
    from outrider.bench import decode as bench
    from outrider.bench.workloads import load_workload

    if axis not in USUAL:
        raise ConfigError(f"--axis must be one of {', '.join(USUAL)}, not {axis!r}")
    places = read_numbers(values or USUAL[axis], "--values")
    if any(place < (0 if axis in ("k", "temperature") else 1) for place in places):
        raise ConfigError(f"--values {values}: out of range for {axis}")
    most = int(max(places)) if axis == "batch" else batch
    work = load_workload("long" if axis == "context" else workload, max(num_prompts, most))
    settings = replace(_settings(max_tokens, batch, repeats), num_prompts=num_prompts)
    core = _load(engine, most)
    contenders = _ours(core, proposers, num_draft_tokens)
    rows: list[Row] = []
    found = bench.result(
        f"sweep-{axis}", title or f"{engine['model']} along {axis}", rows, settings
    )
    with _telling() as tell:
        places_rows = bench.sweep(core, contenders, work, cast(Any, axis), places, settings, tell)
        for more in places_rows:
            rows += more
            if out is not None:
                found.write(out)
    _conclude(found, out, as_json)


USUAL = {
    "k": "0",  # the contenders are the places
    "batch": "1,2,4,8,16,32",
    "context": "128,512,1024,1800",
    "temperature": "0,0.5,0.8,1,1.3",
}


@app.command(epilog="Example: outrider bench serve http://127.0.0.1:8000 --clients 1,4,16")
def serve(
    url: Url,
    backend: Backends = None,
    serve_args: ServeArgs = None,
    vllm_args: VllmArgs = None,
    workload: WorkloadName = "code",
    clients: Clients = "1,4,16",
    num_prompts: NumPrompts = 16,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    name: Name = None,
    out: Out = None,
    title: Title = None,
    as_json: Json = False,
) -> None:
    """Load on a server, ours or another: throughput, first token, time per token."""
    from outrider.bench.backends import bench_backends
    from outrider.bench.serve import bench_server
    from outrider.bench.workloads import load_workload

    work = load_workload(workload, num_prompts).heated(temperature)
    counts = [int(n) for n in read_numbers(clients, "--clients")]
    if min(counts, default=0) < 1:
        raise ConfigError("--clients must be numbers from 1 on")
    if backend is None and (serve_args or vllm_args):
        raise ConfigError("--serve-arg and --vllm-arg need --backend")
    with _telling() as tell:

        def bench(place: str) -> Result:
            return bench_server(place, work, counts, max_tokens, name, title, tell)

        if backend is None:
            found = bench(url)
        else:
            names = read_names(backend)
            found = bench_backends(names, url, serve_args or (), vllm_args or (), bench)
    _conclude(found, out, as_json)


# --- what they share ------------------------------------------------------------------------


def _settings(max_tokens: int, batch: int, repeats: int) -> Settings:
    from outrider.bench.decode import Settings

    for what, value, least in (
        ("--max-tokens", max_tokens, 4),  # reading the prompt gives up to three
        ("--batch", batch, 1),
        ("--repeats", repeats, 1),
    ):
        if value < least:
            raise ConfigError(f"{what} must be at least {least}, not {value}")
    return Settings(max_tokens=max_tokens, batch=batch, repeats=repeats)


def _load(options: Options, batch: int) -> Engine:
    with busy(f"loading {options['model']}"):
        from outrider.llm import LLM

        return LLM(
            **options,
            max_sequences=max(EngineConfig.max_sequences, batch),
            max_step_tokens=max(EngineConfig.max_step_tokens, 24 * batch),
            prefix_caching=False,  # or the first contender would compute the others' prompts
        ).engine


def _ours(engine: Engine, proposers: str | None, counts: str) -> list[Contender]:
    from outrider.bench.decode import ours

    names = read_names(proposers or "") or [engine.default.proposer or WITHOUT_MODEL]
    numbers = [read_count(word) for word in read_names(counts)]
    return ours(engine, names, numbers, engine.default.verifier)


def _telling() -> Any:
    from outrider.cli.prove import telling

    return telling("measuring")


def _conclude(found: Result, out: Path | None, as_json: bool) -> None:
    """The table, the files, the object; exit code 1 where an output was not exact."""
    from rich import box
    from rich.table import Table

    from outrider.bench.report import cell

    console = stderr() if as_json else stdout()
    shown = [c for c in found.columns if c in SHOWN and _tells(found.rows, c)]
    table = Table(*(SHOWN[c] for c in shown), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in found.rows:
        table.add_row(*(cell(row, c) for c in shown))
    console.print(table, soft_wrap=False)
    if out is not None:
        written = found.write(out)
        console.print(f"written: {', '.join(map(str, written))}", style="dim")
    if as_json:
        print_json(found.to_dict())
    wrong = [row for row in found.rows if row.get("is_exact") is False]
    for row in wrong:
        console.print(f"NOT EXACT: {row['contender']} on {row.get('workload')}", style="red")
    if wrong:
        raise typer.Exit(1)


def _tells(rows: list[Row], column: str) -> bool:
    """Whether a column says anything: something other than one and the same setting."""
    values = {str(row.get(column, "")) for row in rows}
    return values != {""} and (
        len(values) > 1 or column not in ("temperature", "batch", "workload")
    )


SHOWN = {
    "workload": "workload",
    "temperature": "T",
    "batch": "batch",
    "context": "context",
    "clients": "clients",
    "contender": "contender",
    "tokens_per_s": "tokens/s",
    "speedup": "speedup",
    "of_best_fixed": "of best K",
    "formula": "formula",
    "efficiency": "efficiency",
    "acceptance_length": "acceptance",
    "identical": "identical",
    "identical_to_ours": "as ours",
    "ttft_s": "first token, s",
    "tpot_s": "per token, s",
}
