"""`outrider bench spec`: chats of eight categories, as Spec-Bench has them, through the template.

Answers end where the model ends them. The rows of `SIX_CATEGORIES` and `ALL_CATEGORIES` are
geometric means over categories, each of which counts the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from time import perf_counter
from typing import Any

from outrider.bench.contenders import Contender, make_jobs, plain
from outrider.bench.decode import decode
from outrider.bench.measure import Tell
from outrider.bench.peers.base import Peer
from outrider.bench.report import Result, Row
from outrider.bench.settings import Settings
from outrider.bench.workloads import CATEGORIES, SIX, load_category
from outrider.engine.engine import Engine

SIX_CATEGORIES, ALL_CATEGORIES = "six categories", "all eight"
SHOWN_POSITIONS = 4
COLUMNS = (
    "workload",
    "temperature",
    "batch",
    "contender",
    "tokens_per_s",
    "speedup",
    "acceptance_length",
    *(f"alpha_{i}" for i in range(1, SHOWN_POSITIONS + 1)),
    "identical",
    "identical_to_ours",
)
NOTES = (
    "Chats of eight categories, written for this project, through the model's chat template; "
    "answers end where the model ends them. Speedups are ratios to plain decoding of the same "
    "program, medians over the repeats with 95 % intervals; the clock starts when the prompt is "
    "read. Every round has a fresh salt, so that no proposer drafts from an earlier round. "
    f"`{SIX_CATEGORIES}` (chat to retrieval) and `{ALL_CATEGORIES}`: geometric means of the rows "
    "above. `alpha i`: how often draft i is accepted if all before it were. Acceptance lengths "
    "count the correction or bonus token. `identical`: outputs equal to plain decoding's."
)


def spec(
    engine: Engine,
    contenders: Sequence[Contender],
    peers: Sequence[Peer],
    categories: Sequence[str],
    temperatures: Sequence[float],
    settings: Settings,
    tell: Tell,
    minutes: float | None = None,
) -> Iterator[list[Row]]:
    """The rows of each category at each temperature, ours first; then the means.

    With `minutes`, a category gets as many prompts as fit its share of the time that is left.
    """
    found: list[Row] = []
    places = [(t, name) for t in temperatures for name in categories]
    budget = Budget(minutes, len(places), settings.num_prompts)
    for temperature, name in places:
        num_prompts = budget.begin(lambda: _one_prompt_s(engine, contenders, settings))
        work = load_category(name, num_prompts).at_temperature(temperature)
        rows = decode(engine, contenders, [work], settings, tell)
        for peer in peers:
            rows += peer.rows(engine, [work], settings, tell)
        budget.end()
        for row in rows:
            row |= {"workload": name, "num_prompts": num_prompts, **_positions(row)}
        found += rows
        yield rows
    yield [
        mean
        for temperature in temperatures
        for title, names in ((SIX_CATEGORIES, SIX), (ALL_CATEGORIES, CATEGORIES))
        if set(names) <= set(categories)
        for mean in _means(title, names, [r for r in found if r["temperature"] == temperature])
    ]


class Budget:
    """Divides the time that is left evenly among the places that are left."""

    def __init__(self, minutes: float | None, num_places: int, most: int) -> None:
        self._end = None if minutes is None else perf_counter() + 60 * minutes
        self._num_left, self._most = num_places, most
        self._prompt_s: float | None = None  # of all contenders and rounds
        self._began, self._num_prompts = 0.0, most

    def begin(self, measure: Callable[[], float]) -> int:
        """The number of prompts; `measure` gives the seconds of the first."""
        if self._end is not None:
            if self._prompt_s is None:
                self._prompt_s = measure()
            share = (self._end - perf_counter()) / self._num_left
            self._num_prompts = max(1, min(self._most, int(share / self._prompt_s)))
        self._began = perf_counter()
        return self._num_prompts

    def end(self) -> None:
        self._prompt_s = (perf_counter() - self._began) / self._num_prompts
        self._num_left -= 1


def _one_prompt_s(engine: Engine, contenders: Sequence[Contender], settings: Settings) -> float:
    """An estimate from one plain answer; the first category corrects it."""
    jobs = make_jobs(engine, load_category(CATEGORIES[0], 1).prompts, settings.max_tokens)
    began = perf_counter()
    plain(engine).run(jobs)
    return (perf_counter() - began) * len(contenders) * (settings.repeats + 1)


def line(rows: Sequence[Row]) -> str:
    """The rows of one category as a line, for where there is no terminal."""
    parts = [
        f"{row['contender']} {row['tokens_per_s']:.0f} tokens/s ({row['speedup']:.2f} x)"
        for row in rows
    ]
    return f"{rows[0]['workload']}, T={rows[0]['temperature']:g}: {', '.join(parts)}"


def _positions(row: Row) -> Row:
    alphas = row.get("conditional_acceptance") or []
    return {f"alpha_{i}": float(alpha) for i, alpha in enumerate(alphas[:SHOWN_POSITIONS], 1)}


def _means(title: str, names: Sequence[str], rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each contender, over its rows of the categories `names`."""
    for contender in dict.fromkeys(row["contender"] for row in rows):
        mine = [r for r in rows if r["contender"] == contender and r["workload"] in names]
        exact = [row["is_exact"] for row in mine if "is_exact" in row]
        about: dict[str, Any] = {
            "workload": title,
            **{key: mine[0].get(key) for key in ("temperature", "batch", "contender")},
            **{key: _geometric([r[key] for r in mine]) for key in ("tokens_per_s", "speedup")},
        }
        lengths = [row["acceptance_length"] for row in mine if row.get("acceptance_length")]
        if lengths:
            about["acceptance_length"] = sum(lengths) / len(lengths)
        yield about | ({"is_exact": all(exact)} if exact else {})


def _geometric(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def result(model: str, title: str | None, settings: Settings) -> Result:
    about = {
        "prompts of each category": settings.num_prompts,
        "tokens per answer, at most": settings.max_tokens,
        "repeats": settings.repeats,
        "answers at once": settings.batch,
    }
    return Result(
        "spec", title or f"Chats of eight categories with {model}", [], COLUMNS, NOTES, about
    )
