"""A peer, and the rows of its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.bench.contenders import Job, Run, make_jobs, plain
from outrider.bench.measure import Tell
from outrider.bench.report import Row
from outrider.bench.settings import Settings
from outrider.bench.statistics import estimate
from outrider.bench.workloads import Workload
from outrider.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Way:
    """One way of decoding that a peer has; "plain" comes first."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


class Peer(Protocol):
    name: str

    def rows(
        self, engine: Engine, workloads: Sequence[Workload], settings: Settings, tell: Tell
    ) -> list[Row]:
        """A row per workload and way of decoding."""
        ...


Decode = Callable[[Job], Run]


def time_way(
    decode: Decode, work: dict[str, list[Job]], settings: Settings
) -> dict[str, tuple[list[float], list[list[int]]]]:
    """Workload -> (tokens per second of each repeat, outputs); the first job warms up."""
    found = {}
    decode(next(iter(work.values()))[0])
    for name, jobs in work.items():
        rates = []
        for _ in range(settings.repeats):
            runs = [decode(job) for job in jobs]
            rates.append(sum(run.num_tokens for run in runs) / sum(run.seconds for run in runs))
        found[name] = rates, [run.outputs[0] for run in runs]
    return found


def jobs_by_workload(
    engine: Engine, workloads: Sequence[Workload], settings: Settings
) -> dict[str, list[Job]]:
    return {w.name: make_jobs(engine, w.prompts, settings.max_tokens) for w in workloads}


def peer_rows(
    peer: str,
    engine: Engine,
    work: dict[str, list[Job]],
    found: dict[str, dict[str, tuple[list[float], list[list[int]]]]],
) -> list[Row]:
    """`found[way][workload]`. Sampled outputs of peers are not compared: their noise differs."""
    rows: list[Row] = []
    for name, jobs in work.items():
        temperatures = {job.params.temperature for job in jobs}
        greedy = temperatures == {0.0}
        temperature = temperatures.pop() if len(temperatures) == 1 else "mixed"
        ours = [plain(engine).run([job]).outputs[0] for job in jobs] if greedy else []
        base_rates, base_outputs = found["plain"][name]
        for way, results in found.items():
            rates, outputs = results[name]
            ratios = [a / b for a, b in zip(rates, base_rates, strict=True)]
            rows.append(
                {
                    "workload": name,
                    "temperature": temperature,
                    "batch": 1,
                    "contender": f"{peer}: {way}",
                    **estimate(rates).to_dict("tokens_per_s"),
                    **estimate(ratios).to_dict("speedup"),
                    "identical": _same(outputs, base_outputs) if greedy and way != "plain" else "-",
                    "identical_to_ours": _same(outputs, ours) if greedy else "-",
                    "num_repeats": len(rates),
                }
            )
    return rows


def _same(outputs: list[list[int]], reference: list[list[int]]) -> str:
    same = sum(a == b[: len(a)] for a, b in zip(outputs, reference, strict=True))
    return f"{same}/{len(outputs)}"
