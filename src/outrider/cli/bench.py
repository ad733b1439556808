"""`outrider bench`: decode, spec, sweep, serve. Plain decoding always runs beside the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from outrider.bench.settings import Output, Peers, Places, Server, Settings, Work
from outrider.cli.console import Json, busy, print_json, stderr, stdout, telling
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.options import Options, expanded, of, read_count, read_names, read_numbers
from outrider.registry import WITHOUT_MODEL

if TYPE_CHECKING:
    from outrider.bench.contenders import Contender
    from outrider.bench.report import Result, Row
    from outrider.engine.engine import Engine

app = typer.Typer(help="Measure decoding, sweeps and servers.", no_args_is_help=True)

FIELDS = (
    *("model", "proposer_options", "draft_model", "verifier"),
    *("device", "dtype", "backend", "threads"),
)
EngineOptions = Annotated[Options, of(EngineConfig, *FIELDS)]
OutputOptions = Annotated[Options, of(Output)]
USUAL = {
    "k": "0",  # the contenders are the places
    "batch": "1,2,4,8,16,32",
    "context": "128,512,1024,1800",
    "temperature": "0,0.5,0.8,1,1.3",
}


@app.command(epilog="Example: outrider bench decode -w code,edit -k 4,auto --proposers draft-model")
@expanded
def decode(
    *,
    engine: EngineOptions,
    work: Annotated[Options, of(Work, "workloads", "proposers", "counts", "temperatures")],
    settings: Annotated[Options, of(Settings, "batch", "num_prompts", "max_tokens", "repeats")],
    peers: Annotated[Options, of(Peers)],
    output: OutputOptions,
    as_json: Json = False,
) -> None:
    """Proposers on workloads, against plain decoding and other programs."""
    from outrider.bench.decode import decode as measure
    from outrider.bench.decode import result
    from outrider.bench.peers import find_peers
    from outrider.bench.workloads import load_workload

    how = Settings(**settings)
    wanted = [load_workload(name, how.num_prompts) for name in read_names(work["workloads"])]
    if "temperatures" in work:
        values = read_numbers(work["temperatures"], "--temperatures")
        wanted = [workload.at_temperature(value) for workload in wanted for value in values]
    core = _load(engine, how.batch)
    contenders = _ours(core, work)
    others = find_peers(engine["model"], engine.get("draft_model"), Peers(**peers))
    title = output.get("title", f"Decoding with {engine['model']}")
    rows: list[Row] = []
    found = result("decode", title, rows, how)
    with _telling() as tell:
        _collect(found, (measure(core, contenders, [w], how, tell) for w in wanted), output)
        for peer in others:
            rows += peer.rows(core, wanted, how, tell)
    _conclude(found, output, as_json)


@app.command(epilog="Example: outrider bench spec smollm2 --proposers eagle3,hybrid -k auto,4")
@expanded
def spec(
    *,
    engine: Annotated[Options, of(EngineConfig, *FIELDS, model={"default": "smollm2"})],
    work: Annotated[
        Options,
        of(
            Work,
            *("categories", "proposers", "counts", "temperatures", "minutes"),
            temperatures={"default": "0,0.8"},
        ),
    ],
    settings: Annotated[
        Options,
        of(
            Settings,
            *("batch", "num_prompts", "max_tokens", "repeats"),
            num_prompts={"default": 20},
            repeats={"default": 3},
        ),
    ],
    peers: Annotated[Options, of(Peers)],
    output: OutputOptions,
    as_json: Json = False,
) -> None:
    """Chats of eight categories, as Spec-Bench has them: any target, drafters, other programs."""
    from outrider.bench import spec as bench
    from outrider.bench.peers import find_peers

    how, model = Settings(**settings), engine["model"]
    core = _load(engine, how.batch)
    contenders = _ours(core, work)
    others = find_peers(model, engine.get("draft_model"), Peers(**peers))
    temperatures = read_numbers(work["temperatures"], "--temperatures")
    categories = read_names(work["categories"])
    found = bench.result(model, output.get("title"), how)
    with _telling() as tell:
        minutes = work.get("minutes")
        rows = bench.spec(core, contenders, others, categories, temperatures, how, tell, minutes)
        _collect(found, _with_lines(rows, bench.line), output)
    _conclude(found, output, as_json)


@app.command(epilog="Example: outrider bench sweep --axis batch --values 1,2,4,8,16,32 -k auto")
@expanded
def sweep(
    *,
    engine: EngineOptions,
    places: Annotated[Options, of(Places)],
    work: Annotated[
        Options,
        of(Work, "workload", "proposers", "counts", counts={"default": "1,2,3,4,6,8,auto"}),
    ],
    settings: Annotated[Options, of(Settings, "batch", "num_prompts", "max_tokens", "repeats")],
    output: OutputOptions,
    as_json: Json = False,
) -> None:
    """Along one axis: draft length, batch size, context length or temperature."""
    from outrider.bench import decode as bench
    from outrider.bench.workloads import load_workload

    axis, how = places["axis"], Settings(**settings)
    if axis not in USUAL:
        raise ConfigError(f"--axis must be one of {', '.join(USUAL)}, not {axis!r}")
    text = places.get("values", USUAL[axis])
    values = read_numbers(text, "--values")
    if any(value < (0 if axis in ("k", "temperature") else 1) for value in values):
        raise ConfigError(f"--values {text}: out of range for {axis}")
    most = int(max(values)) if axis == "batch" else how.batch
    name = "long" if axis == "context" else work["workload"]
    texts = load_workload(name, max(how.num_prompts, most))
    core = _load(engine, most)
    contenders = _ours(core, work)
    title = output.get("title", f"{engine['model']} along {axis}")
    found = bench.result(f"sweep-{axis}", title, [], how)
    with _telling() as tell:
        axis_rows = bench.sweep(core, contenders, texts, cast(Any, axis), values, how, tell)
        _collect(found, axis_rows, output)
    _conclude(found, output, as_json)


@app.command(epilog="Example: outrider bench serve http://127.0.0.1:8000 --clients 1,4,16")
@expanded
def serve(
    *,
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="An OpenAI-compatible server, without /v1; with --backend the model to serve.",
        ),
    ],
    server: Annotated[Options, of(Server)],
    work: Annotated[Options, of(Work, "workload", "temperature")],
    settings: Annotated[
        Options, of(Settings, "num_prompts", "max_tokens", num_prompts={"default": 16})
    ],
    output: OutputOptions,
    as_json: Json = False,
) -> None:
    """Load on a server, ours or another: throughput, first token, time per token."""
    from outrider.bench.backends import bench_backends
    from outrider.bench.serve import bench_server
    from outrider.bench.workloads import load_workload

    how = Settings(**settings)
    texts = load_workload(work["workload"], how.num_prompts).at_temperature(work.get("temperature"))
    counts = [int(n) for n in read_numbers(server["clients"], "--clients")]
    if min(counts, default=0) < 1:
        raise ConfigError("--clients must be numbers from 1 on")
    serve_args, vllm_args = (server.get(name, ()) for name in ("serve_args", "vllm_args"))
    if "backend" not in server and (serve_args or vllm_args):
        raise ConfigError("--serve-arg and --vllm-arg need --backend")
    with _telling() as tell:

        def bench(place: str) -> Result:
            name, title = server.get("name"), output.get("title")
            return bench_server(place, texts, counts, how.max_tokens, name, title, tell)

        if "backend" not in server:
            found = bench(url)
        else:
            names = read_names(server["backend"])
            found = bench_backends(names, url, serve_args, vllm_args, bench)
    _conclude(found, output, as_json)


# --- what they share ------------------------------------------------------------------------


def _load(options: Options, batch: int) -> Engine:
    with busy(f"loading {options['model']}"):
        from outrider.llm import LLM

        return LLM(
            **options,
            max_sequences=max(EngineConfig.max_sequences, batch),
            max_step_tokens=max(EngineConfig.max_step_tokens, 24 * batch),
            prefix_caching=False,  # the first contender would fill the cache for the others
        ).engine


def _ours(engine: Engine, work: Options) -> list[Contender]:
    from outrider.bench.decode import ours

    names = work.get("proposers") or [engine.default.proposer or WITHOUT_MODEL]
    numbers = [read_count(word) for word in read_names(work["counts"])]
    return ours(engine, names, numbers, engine.default.verifier)


def _collect(found: Result, measured: Iterable[list[Row]], output: Options) -> None:
    """Writes the files after each part, so that an interrupted run keeps its results."""
    for rows in measured:
        found.rows += rows
        if "out" in output:
            found.write(output["out"])


def _with_lines(
    measured: Iterable[list[Row]], line: Callable[[list[Row]], str]
) -> Iterator[list[Row]]:
    """Where there is no terminal, each part is a line on stderr as soon as it is measured."""
    console = stderr()
    for rows in measured:
        if rows and not console.is_terminal:
            console.print(line(rows), soft_wrap=True)
        yield rows


def _telling() -> Any:
    return telling("measuring")


def _conclude(found: Result, output: Options, as_json: bool) -> None:
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
    if "out" in output:
        written = found.write(output["out"])
        console.print(f"written: {', '.join(map(str, written))}", style="dim")
    if as_json:
        print_json(found.to_dict())
    wrong = [row for row in found.rows if row.get("is_exact") is False]
    for row in wrong:
        console.print(f"NOT EXACT: {row['contender']} on {row.get('workload')}", style="red")
    if wrong:
        raise typer.Exit(1)


def _tells(rows: list[Row], column: str) -> bool:
    """Whether a column holds information: values that differ, or figures."""
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
