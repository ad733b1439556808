"""`outrider bench spec`: chats of eight categories, as Spec-Bench has them, through the template.

Answers end where the model ends them. The rows of `SIX_CATEGORIES` and `ALL_CATEGORIES` are
geometric means over categories, each of which counts the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import exp, log
from typing import Any

from outrider.bench.contenders import Contender
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
) -> Iterator[list[Row]]:
    """The rows of each category at each temperature, ours first; then the means."""
    found: list[Row] = []
    for temperature in temperatures:
        for name in categories:
            work = load_category(name, settings.num_prompts).at_temperature(temperature)
            rows = decode(engine, contenders, [work], settings, tell)
            for peer in peers:
                rows += peer.rows(engine, [work], settings, tell)
            for row in rows:
                row["workload"] = name
                row |= _positions(row)
            found += rows
            yield rows
    yield [
        mean
        for temperature in temperatures
        for title, names in ((SIX_CATEGORIES, SIX), (ALL_CATEGORIES, CATEGORIES))
        if set(names) <= set(categories)
        for mean in _means(title, names, [r for r in found if r["temperature"] == temperature])
    ]


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
