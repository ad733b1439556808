"""`outrider doctor`: will speculation help here, by how much, and what is in the way."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import flags
from outrider.cli.console import busy, print_json, stderr, stdout
from outrider.cli.prove import telling
from outrider.errors import VocabularyMismatch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from outrider.doctor.advice import Advice
    from outrider.doctor.checks import Finding
    from outrider.doctor.curves import Curves

EXAMPLE = "Example: outrider doctor my/target --draft-model my/draft --prompts prompts.jsonl"
MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
MOST_PROMPTS = 8

Prompts = Annotated[
    Path | None,
    flags.option(
        flags.INPUT,
        f"Your prompts: lines, or JSON objects with a 'prompt'; {MOST_PROMPTS} are read.",
        "--prompts",
        metavar="FILE",
        show_default="pieces of Python",
    ),
]
Proposers = Annotated[
    str | None,
    flags.option(
        flags.SPECULATION,
        "Who is considered.",
        "--proposers",
        metavar="NAME,...",
        show_default="the engine's own and ngram",
    ),
]
Check = Annotated[
    bool,
    flags.option(
        flags.OUTPUT, "Measure what was predicted, at every batch size advised.", "--check"
    ),
]
Plot = Annotated[
    Path | None,
    flags.option(
        flags.OUTPUT, "Draw the curves into this file (.png or .svg).", "--plot", metavar="FILE"
    ),
]


def doctor(
    model: flags.Model = "bundled",
    prompts: Prompts = None,
    draft_model: flags.DraftModel = None,
    proposers: Proposers = None,
    proposer_option: flags.ProposerOptions = None,
    temperature: flags.Temperature = 0.0,
    device: flags.Device = "cpu",
    dtype: flags.Dtype = "auto",
    backend: flags.Backend = "auto",
    threads: flags.Threads = None,
    check: Check = False,
    plot: Plot = None,
    as_json: flags.Json = False,
) -> None:
    """Check a pair of models, measure their costs, and say whether speculation will help."""
    from outrider.bench.plan import split
    from outrider.bench.workloads import load_workload

    if plot is not None:
        from outrider.plots.style import check_file

        check_file(plot)
    work = load_workload(str(prompts) if prompts else "code", MOST_PROMPTS).heated(temperature)
    with busy(f"loading {model}"):
        from outrider.bench.contenders import make_jobs
        from outrider.doctor.advice import advise, conclusion
        from outrider.doctor.check import measure_advice
        from outrider.doctor.checks import examine, examine_passes
        from outrider.doctor.curves import SURVIVAL_TOKENS, measure_curves
        from outrider.llm import LLM

        load = partial(
            LLM,
            model,
            proposer_options=flags.read_proposer_options(proposer_option),
            device=device,
            dtype=dtype,
            backend=backend,  # type: ignore[arg-type]
            threads=threads,
            prefix_caching=False,
        )
        try:
            engine = load(draft_model=draft_model).engine
        except VocabularyMismatch:  # a finding; what needs no drafter can still be measured
            engine = load(proposer="ngram").engine
        own = engine.default.proposer or "ngram"
        names = split(proposers) if proposers else list(dict.fromkeys([own, "ngram"]))
        for name in names:
            engine.proposers[name]
        drafter = draft_model or ("bundled:draft" if model == "bundled" else None)
        findings = examine(engine, drafter, device=device, dtype=dtype)
        jobs = make_jobs(engine, work.prompts, SURVIVAL_TOKENS)
    with telling("measuring") as tell:
        curves = measure_curves(engine, jobs, names, tell)
        advice = advise(curves)
        measured = measure_advice(engine, jobs, advice, tell) if check else {}
    findings += examine_passes(engine, advice)
    console = stderr() if as_json else stdout()
    show(console, findings, curves, advice, measured)
    console.print(conclusion(advice))
    if plot is not None:
        from outrider.plots.doctor import draw_doctor

        draw_doctor(curves, advice, plot)
        console.print(f"written: {plot}", style="dim")
    if as_json:
        print_json(record(model, draft_model, findings, curves, advice, measured))
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


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
    model: str,
    draft_model: str | None,
    findings: list[Finding],
    curves: Curves,
    advice: list[Advice],
    measured: dict[int, float],
) -> dict[str, Any]:
    """The JSON object of `outrider doctor --json`."""
    from dataclasses import asdict

    from outrider.bench.report import provenance

    return {
        "model": model,
        "draft_model": draft_model,
        "provenance": provenance(),
        "findings": [asdict(finding) for finding in findings],
        "verify_s": {str(n): s for n, s in sorted(curves.verify.items())},
        "overhead_s": {str(n): s for n, s in sorted(curves.overhead.items())},
        "draft_s": {
            name: {str(b): {str(k): s for k, s in costs.items()} for b, costs in table.items()}
            for name, table in curves.draft.items()
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
