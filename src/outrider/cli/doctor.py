"""`outrider doctor`: whether speculation helps here, by how much, and what prevents it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.console import Json, busy, print_json, stderr, stdout, telling
from outrider.config import EngineConfig, SamplingParams
from outrider.errors import ConfigError, ModelError
from outrider.options import Options, expanded, of, option, read_names
from outrider.parameters import INPUT, OUTPUT, SPECULATION
from outrider.registry import WITHOUT_MODEL

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.doctor.advice import Advice
    from outrider.doctor.checks import Finding
    from outrider.doctor.curves import Curves
    from outrider.engine.engine import Engine

EXAMPLE = "Example: outrider doctor my/target --draft-model my/draft --prompts prompts.jsonl"
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
MOST_PROMPTS = 8

Prompts = Annotated[
    Path | None,
    option(
        INPUT,
        f"Lines of text, or JSON objects with a 'prompt' or 'messages'; {MOST_PROMPTS} are read.",
        "--prompts",
        metavar="FILE",
        show_default="pieces of Python",
    ),
]
Proposers = Annotated[
    str | None,
    option(
        SPECULATION,
        "Proposers to consider.",
        "--proposers",
        metavar="NAME,...",
        show_default="the engine's own and ngram",
    ),
]
Check = Annotated[
    bool,
    option(OUTPUT, "Measure what was predicted, at every batch size advised.", "--check"),
]
Plot = Annotated[
    Path | None,
    option(OUTPUT, "Draw the curves into this file (.png or .svg).", "--plot", metavar="FILE"),
]


EngineOptions = Annotated[
    Options,
    of(
        EngineConfig,
        *("model", "draft_model", "proposer_options", "device", "dtype", "backend", "threads"),
    ),
]


@expanded
def doctor(
    *,
    prompts: Prompts = None,
    engine: EngineOptions,
    proposers: Proposers = None,
    sampling: Annotated[Options, of(SamplingParams, "temperature")],
    check: Check = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Check a pair of models, measure their costs, and say whether speculation will help."""
    from outrider.bench.workloads import load_workload

    if plot is not None:
        from outrider.plots.style import check_file

        check_file(plot)
    work = load_workload(str(prompts) if prompts else "code", MOST_PROMPTS)
    work = work.at_temperature(sampling["temperature"])
    with busy(f"loading {engine['model']}"):
        from outrider.bench.contenders import make_jobs
        from outrider.doctor.advice import advise, conclusion
        from outrider.doctor.check import measure_advice
        from outrider.doctor.checks import examine_costs, examine_passes
        from outrider.doctor.curves import SURVIVAL_TOKENS, measure_curves

        core, findings = _load(engine)
        own = core.default.proposer or WITHOUT_MODEL
        names = read_names(proposers) if proposers else list(dict.fromkeys([own, WITHOUT_MODEL]))
        for name in names:
            core.proposers[name]
        jobs = make_jobs(core, work.prompts, SURVIVAL_TOKENS)
    with telling("measuring") as tell:
        curves = measure_curves(core, jobs, names, tell)
        advice = advise(curves)
        measured = measure_advice(core, jobs, advice, tell) if check else {}
    findings += [*examine_costs(curves, own), *examine_passes(core, advice)]
    console = stderr() if as_json else stdout()
    show(console, findings, curves, advice, measured)
    console.print(conclusion(advice))
    if plot is not None:
        from outrider.plots.doctor import draw_doctor

        draw_doctor(curves, advice, plot)
        console.print(f"written: {plot}", style="dim")
    if as_json:
        print_json(record(engine, findings, curves, advice, measured))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def _load(options: Options) -> tuple[Engine, list[Finding]]:
    """The engine, and what is found about its models before anything is measured."""
    from outrider.doctor.checks import examine
    from outrider.llm import LLM
    from outrider.model.named import default_drafter

    try:
        llm = LLM(**options, prefix_caching=False)
    except (ModelError, ConfigError):  # of the drafter: a finding; look-ups can still be measured
        if options.get("draft_model") is None:
            raise
        alone = options | {"draft_model": None, "proposer": WITHOUT_MODEL}
        llm = LLM(**alone, prefix_caching=False)
    drafter = options.get("draft_model") or default_drafter(options["model"])
    return llm.engine, examine(
        llm.engine, drafter, device=options["device"], dtype=options["dtype"]
    )


def show(
    console: Console,
    findings: list[Finding],
    curves: Curves,
    advice: list[Advice],
    measured: dict[int, float],
) -> None:
    from rich.text import Text

    checks = _table("check", "", "found")
    for finding in findings:
        checks.add_row(finding.what, MARKS[finding.state], Text(finding.text))
    console.print(checks, soft_wrap=False)
    costs = _table("proposer", "acceptance", "draft of 4, ms", "pass of 1", "of 5", "of 9", "of 17")
    for name, worth in curves.worth.items():
        draft = curves.draft_s(name, 1, 4)
        passes = (f"{1e3 * curves.pass_s(1, n):.2f}" for n in (1, 5, 9, 17))
        costs.add_row(name, f"{worth.alpha:.2f}", f"{1e3 * draft:.2f}", *passes)
    console.print(costs, soft_wrap=False)
    head = ["batch", "advice", "predicted", "break-even acceptance"]
    table = _table(*head, *(["measured"] if measured else []))
    for entry in advice:
        choice = f"{entry.proposer}, K = {entry.num_draft_tokens}" if entry.proposer else "plain"
        even = "never pays" if entry.break_even is None else f"{entry.break_even:.2f}"
        cells = [str(entry.batch), choice, f"{entry.predicted_speedup:.2f} x", even]
        if measured:
            got = measured.get(entry.batch)
            cells.append("-" if got is None else f"{got:.2f} x")
        table.add_row(*cells)
    console.print(table, soft_wrap=False)


def _table(*head: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(*head, box=box.SIMPLE_HEAD, pad_edge=False)


def record(
    engine: Options,
    findings: list[Finding],
    curves: Curves,
    advice: list[Advice],
    measured: dict[int, float],
) -> dict[str, Any]:
    """The JSON object of `outrider doctor --json`."""
    from dataclasses import asdict

    from outrider.bench.report import provenance

    return {
        "model": engine["model"],
        "draft_model": engine.get("draft_model"),
        "provenance": provenance(),
        "findings": [asdict(finding) for finding in findings],
        "verify_s": {str(n): s for n, s in sorted(curves.verify.items())},
        "passes_s": {
            str(b): {str(n): s for n, s in sorted(found.items())}
            for b, found in sorted(curves.passes.items())
        },
        "overhead_s": {str(n): s for n, s in sorted(curves.overhead.items())},
        "draft_s": {
            name: {str(b): {str(k): s for k, s in costs.items()} for b, costs in table.items()}
            for name, table in curves.draft.items()
        },
        "reading_s": {
            name: {str(n): s for n, s in found.items()} for name, found in curves.reading.items()
        },
        "acceptance": {
            name: {"alpha": w.alpha, "survival": w.survival, "fill": w.fill}
            for name, w in curves.worth.items()
        },
        "advice": [
            entry.to_dict() | {"measured_speedup": measured.get(entry.batch)} for entry in advice
        ],
        "helps": any(entry.proposer is not None for entry in advice),
    }
