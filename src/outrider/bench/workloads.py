"""Workloads: the prompts in the package, of seven kinds, or the user's own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path

from outrider.errors import RequestError, UnknownName

HOT = 1.3
# name -> (file of prompts, temperature)
SHIPPED = {
    "code": ("code", 0.0),
    "prose": ("prose", 0.0),
    "edit": ("edit", 0.0),
    "json": ("json", 0.0),
    "summary": ("summary", 0.0),
    "hot": ("code", HOT),
    "long": ("long", 0.0),
}
MIXED = "mixed"
MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    prediction: str = ""  # what the caller could guess of the output
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: list[Prompt]

    def at_temperature(self, temperature: float | None) -> Workload:
        """The same at another temperature; None: as it is."""
        if temperature is None:
            return self
        prompts = [Prompt(p.text, p.prediction, temperature) for p in self.prompts]
        return Workload(f"{self.name}, T={temperature:g}", prompts)


def workload_names() -> list[str]:
    return [*SHIPPED, MIXED]


def load_workload(name: str, num_prompts: int = MOST_PROMPTS) -> Workload:
    """A shipped workload or a file of prompts; raises UnknownName or RequestError."""
    if name in SHIPPED:
        file, temperature = SHIPPED[name]
        text = files("outrider.bench").joinpath("texts", f"{file}.jsonl").read_text("utf-8")
        found = [Prompt(p.text, p.prediction, temperature) for p in parse_prompts(text, name)]
    elif name == MIXED:
        kinds = [load_workload(kind).prompts for kind in SHIPPED]
        found = [p for p in chain.from_iterable(zip_longest(*kinds)) if p is not None]
    elif Path(name).is_file():
        try:
            text = Path(name).read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise RequestError(f"cannot read {name}: {error}", "workload") from None
        found, name = parse_prompts(text, name), Path(name).stem
    elif "/" in name or Path(name).suffix:
        raise RequestError(f"no file {name}: one prompt per line is read from it", "workload")
    else:
        raise UnknownName("workload", name, [*workload_names(), "a file of prompts"])
    return Workload(name, found[: min(num_prompts, MOST_PROMPTS)])


def parse_prompts(text: str, source: object) -> list[Prompt]:
    """Lines of text, or JSON objects with a "prompt" and perhaps a "prediction".

    Raises RequestError, which names `source` and the line.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record: object = {"prompt": line}
        if line.lstrip().startswith("{"):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
        prompt = record.get("prompt") if isinstance(record, dict) else None
        guess = record.get("prediction", "") if isinstance(record, dict) else ""
        if not isinstance(prompt, str) or not prompt or not isinstance(guess, str):
            raise RequestError(f"line {number} of {source} is no JSON object with a 'prompt'")
        found.append(Prompt(prompt, guess))
    if not found:
        raise RequestError(f"{source} holds no prompts: write one per line")
    return found
