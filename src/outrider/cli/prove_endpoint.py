"""`outrider prove --endpoint`: the checks that need no access to the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from outrider.cli.checks import MARKS, Timed, records, show_checks, timed
from outrider.cli.console import print_json, stderr, stdout
from outrider.errors import ConfigError
from outrider.prove.checks import Check
from outrider.prove.endpoint import (
    PLAIN,
    Endpoint,
    Output,
    check_greedy,
    check_sampled,
    decode,
    load,
    save,
)

KEY_VARIABLES = ("OUTRIDER_API_KEY", "OPENAI_API_KEY")


@dataclass(frozen=True, slots=True)
class Sides:
    """Where the outputs with and without speculation come from."""

    endpoint: str
    baseline: str | None = None  # another endpoint
    record: Path | None = None  # only write the greedy outputs there
    against: Path | None = None  # such a file
    model: str | None = None

    def __post_init__(self) -> None:
        if sum(side is not None for side in (self.baseline, self.record, self.against)) > 1:
            raise ConfigError("give one of --baseline, --record and --against")


def prove_endpoint(
    sides: Sides, prompts: list[str], max_tokens: int, num_sampled: int, *, as_json: bool
) -> None:
    """Prints the page or the object; exits with 1 where something is not proven."""
    key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    endpoint = Endpoint.find(sides.endpoint, sides.model, key)
    console = stderr() if as_json else stdout()
    if sides.record is not None:
        outputs = decode(endpoint, prompts, max_tokens)
        save(outputs, prompts, max_tokens, sides.record)
        console.print(f"recorded {len(outputs)} outputs of {endpoint.model} in {sides.record}")
        return
    results = list(_checks(sides, endpoint, key, prompts, max_tokens, num_sampled))
    proven = all(check.passed is not False for check, _ in results)
    show_checks(console, results)
    console.print(f"{MARKS[proven]}: {endpoint.model} at {endpoint.url}, {len(prompts)} prompts")
    if as_json:
        print_json(_record(results, proven, endpoint, sides))
    if not proven:
        raise typer.Exit(1)


def _checks(
    sides: Sides,
    endpoint: Endpoint,
    key: str | None,
    prompts: list[str],
    max_tokens: int,
    num_sampled: int,
) -> Iterator[Timed]:
    yield timed("greedy", lambda tell: _greedy(sides, endpoint, key, prompts, max_tokens))
    if num_sampled > 0:
        yield timed("sampling", lambda tell: check_sampled(endpoint, prompts, num_sampled, tell))


def _greedy(
    sides: Sides, endpoint: Endpoint, key: str | None, prompts: list[str], max_tokens: int
) -> Check:
    plain = _plain(sides, endpoint, key, prompts, max_tokens)
    if plain is None:
        how = (
            "give --baseline URL, or --record FILE with speculation off and --against FILE with it"
        )
        return Check("greedy identity", None, f"nothing to compare with: {how}")
    return check_greedy(decode(endpoint, prompts, max_tokens), plain)


def _plain(
    sides: Sides, endpoint: Endpoint, key: str | None, prompts: list[str], max_tokens: int
) -> list[Output] | None:
    """Outputs without speculation; None if there is no source of them."""
    if sides.against is not None:
        return load(sides.against, prompts, max_tokens)
    if sides.baseline is not None:
        return decode(Endpoint.find(sides.baseline, sides.model, key), prompts, max_tokens)
    if endpoint.can_be_plain():
        return decode(endpoint, prompts, max_tokens, **PLAIN)
    return None


def _record(
    results: list[Timed], proven: bool, endpoint: Endpoint, sides: Sides
) -> dict[str, object]:
    return {
        "proven": proven,
        "endpoint": endpoint.url,
        "model": endpoint.model,
        "baseline": sides.baseline or (str(sides.against) if sides.against else None),
        "checks": records(results),
    }
