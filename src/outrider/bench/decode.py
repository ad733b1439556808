"""`outrider bench decode` and `sweep`: contenders by name, on workloads or along one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from outrider.bench.contenders import PLAIN, Contender, Job, Ours, make_jobs, plain
from outrider.bench.formula import BareCosts
from outrider.bench.measure import Record, Tell, measure, row
from outrider.bench.report import Result, Row
from outrider.bench.settings import Settings
from outrider.bench.synthetic import NAME, add_synthetic
from outrider.bench.workloads import Workload
from outrider.config import NumDraftTokens
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.options import read_numbers
from outrider.policy.base import Policy
from outrider.policy.controller import AdaptivePolicy

Axis = Literal["batch", "context", "temperature", "k"]
COLUMNS = (
    "workload",
    "temperature",
    "batch",
    "context",
    "num_draft_tokens",
    "contender",
    "tokens_per_s",
    "speedup",
    "undisturbed_speedup",
    "of_best_fixed",
    "formula",
    "efficiency",
    "acceptance_length",
    "acceptance_rate",
    "draft_share",
    "verify_share",
    "other_share",
    "identical",
    "identical_to_ours",
)
NOTES = (
    "Speedups are ratios to plain decoding in the same engine and repeat, medians with 95 % "
    "intervals; the clock starts when target and drafter have read the prompt. `undisturbed "
    "speedup`: the same where a step that took 1.3 times the median over as many tokens counts as "
    "that median, for machines that are shared. `of best fixed`: K = auto over the best fixed K, "
    "as ratios in the same repeat, their median. Acceptance lengths count the correction or bonus "
    "token. "
    "`identical`: outputs equal to plain decoding's, token by token, in all repeats."
)


def ours(
    engine: Engine,
    proposers: Sequence[str],
    counts: Sequence[NumDraftTokens],
    verifier: str = "coupled",
) -> list[Contender]:
    """Plain decoding, then every proposer with every K.

    The drafts of "synthetic:ALPHA" are accepted with probability ALPHA each; those of
    "synthetic:ALPHA@PROPOSER" also cost what PROPOSER's cost.
    """
    contenders: list[Contender] = [plain(engine)]
    for name in proposers:
        real = _synthetic(engine, name) if name.startswith(f"{NAME}:") else name
        for count in counts:
            if count == 0:
                continue
            wish = Speculation(proposer=real, num_draft_tokens=count, verifier=verifier)
            contenders.append(Ours(f"{real} K={count}", engine, wish, _policy(engine, count)))
    return contenders


def _policy(engine: Engine, count: NumDraftTokens) -> Policy | None:
    """A policy for this contender's steps alone; costs start from the same measurement."""
    own = engine.policy
    if count != "auto" or not isinstance(own, AdaptivePolicy):
        return None
    return AdaptivePolicy(measure=own.measure, evenly=own.evenly)


def _synthetic(engine: Engine, name: str) -> str:
    alpha, _, beneath = name.partition(":")[2].partition("@")
    [value] = read_numbers(alpha, "a synthetic acceptance") or [0.0]
    return add_synthetic(engine, value, beneath or None)


def needs_outputs(contenders: Sequence[Contender]) -> bool:
    """Whether a contender drafts from outputs that are known beforehand."""
    return any(
        isinstance(c, Ours) and (c.speculation.proposer or "").startswith(NAME) for c in contenders
    )


def decode(
    engine: Engine,
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    settings: Settings,
    tell: Tell = lambda what: None,
) -> list[Row]:
    """A row per workload and contender."""
    rows: list[Row] = []
    for workload in workloads:
        jobs = jobs_of(engine, workload, contenders, settings)
        records = measure(
            contenders,
            jobs,
            batch=settings.batch,
            repeats=settings.repeats,
            tell=lambda what, name=workload.name: tell(f"{name}: {what}"),  # type: ignore[misc]
        )
        temperatures = {job.params.temperature for job in jobs}
        temperature = temperatures.pop() if len(temperatures) == 1 else "mixed"
        rows += rows_of(
            records, workload=workload.name, temperature=temperature, batch=settings.batch
        )
    return rows


def rows_of(records: dict[str, Record], **labels: Any) -> list[Row]:
    rows = []
    for record in records.values():
        entry = row(record, records[PLAIN], **labels) | _k(record)
        fixed = [
            other
            for other in records.values()
            if _k(other).get("proposer") == entry.get("proposer")
            and isinstance(_k(other).get("num_draft_tokens"), int)
        ]
        if entry.get("num_draft_tokens") == "auto" and fixed:
            entry["of_best_fixed"] = min(record.speedup(other).value for other in fixed)
        rows.append(entry)
    return rows


def _k(record: Record) -> Row:
    contender = record.contender
    if isinstance(contender, Ours):
        return {
            "num_draft_tokens": contender.speculation.num_draft_tokens,
            "proposer": contender.speculation.proposer,
        }
    return {}


def jobs_of(
    engine: Engine, workload: Workload, contenders: Sequence[Contender], settings: Settings
) -> list[Job]:
    jobs = make_jobs(
        engine, workload.prompts, settings.max_tokens, context=settings.context, seed=settings.seed
    )
    if not needs_outputs(contenders):
        return jobs
    outputs = [plain(engine).run([job]).outputs[0] for job in jobs]
    return [replace(job, prediction=o) for job, o in zip(jobs, outputs, strict=True)]


def sweep(
    engine: Engine,
    contenders: Sequence[Contender],
    workload: Workload,
    axis: Axis,
    values: Sequence[float],
    settings: Settings,
    tell: Tell = lambda what: None,
) -> Iterator[list[Row]]:
    """The rows of each value of one axis. On "k" the contenders are the values, and the formula's
    speedup is added. A large batch takes one prompt for each place, a small one
    `settings.num_prompts`."""
    if axis == "k":
        rows = decode(engine, contenders, [workload], settings, tell)
        yield with_formula(engine, rows)
        return
    for value in values:
        here, work = settings, workload
        if axis == "batch":
            here = replace(settings, batch=int(value))
            most = max(here.batch, settings.num_prompts)
            work = Workload(workload.name, workload.prompts[:most])
        elif axis == "context":
            here = replace(settings, context=int(value))
        elif axis == "temperature":
            work = workload.at_temperature(value)
        found = decode(engine, contenders, [work], here, tell)
        yield [{**entry, "workload": workload.name, axis: value} for entry in found]


def with_formula(engine: Engine, rows: list[Row]) -> list[Row]:
    """Adds the formula's speedup at bare costs and each row's survival, and the share reached.

    For fixed K only: the formula needs one K.
    """
    costs: dict[str, BareCosts] = {}
    done = []
    for entry in rows:
        k, name = entry.get("num_draft_tokens"), entry.get("proposer")
        if not isinstance(k, int) or not isinstance(name, str) or k == 0:
            done.append(entry)
            continue
        if name not in costs:
            costs[name] = BareCosts(engine, name)
        promised = costs[name].speedup(k, entry["unconditional_acceptance"])
        done.append({**entry, "formula": promised, "efficiency": entry["speedup"] / promised})
    return done


def result(kind: str, title: str, rows: list[Row], settings: Settings, notes: str = "") -> Result:
    about = {
        "tokens per output": settings.max_tokens,
        "repeats": settings.repeats,
        "outputs at once": settings.batch,
    }
    return Result(kind, title, rows, COLUMNS, f"{NOTES} {notes}".strip(), about)
