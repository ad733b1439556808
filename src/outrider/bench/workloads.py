"""Workloads: the prompts in the package, of seven kinds, the chats of `bench spec`, or the user's.

A prompt is a text to continue, or the messages of a chat, which the model's own template renders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import RequestError, UnknownName

if TYPE_CHECKING:
    from outrider.model.tokenizer import Tokenizer

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
# Chats: the six categories that Spec-Bench has as well, and two more.
SIX = ("chat", "rewrite", "summary", "question", "mathematics", "retrieval")
CATEGORIES = (*SIX, "code-edit", "json-records")
MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    text: str
    prediction: str = ""  # what the caller could guess of the output
    temperature: float = 0.0
    messages: Sequence[Mapping[str, str]] = ()  # of a chat, whose last one `text` repeats

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's ids; a chat goes through the model's template."""
        if not self.messages:
            return tokenizer.encode(self.text)
        from outrider.model.chat_template import chat_ids

        return chat_ids(tokenizer, self.messages)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: list[Prompt]

    def at_temperature(self, temperature: float | None) -> Workload:
        """The same at another temperature; None: as it is."""
        if temperature is None:
            return self
        prompts = [replace(p, temperature=temperature) for p in self.prompts]
        return Workload(f"{self.name}, T={temperature:g}", prompts)


def workload_names() -> list[str]:
    return [*SHIPPED, MIXED]


def load_workload(name: str, num_prompts: int = MOST_PROMPTS) -> Workload:
    """A shipped workload or a file of prompts; raises UnknownName or RequestError."""
    if name in SHIPPED:
        file, temperature = SHIPPED[name]
        found = [replace(p, temperature=temperature) for p in _shipped(file)]
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


def load_category(name: str, num_prompts: int = MOST_PROMPTS) -> Workload:
    """The chats of one category of `bench spec`; raises UnknownName."""
    if name not in CATEGORIES:
        raise UnknownName("category", name, CATEGORIES)
    return Workload(name, _shipped(f"spec-{name}")[:num_prompts])


def _shipped(file: str) -> list[Prompt]:
    text = files("outrider.bench").joinpath("texts", f"{file}.jsonl").read_text("utf-8")
    return parse_prompts(text, file)


def parse_prompts(text: str, source: object) -> list[Prompt]:
    """Lines of text, or JSON objects with a "prompt" and perhaps a "prediction", or "messages".

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
        prompt = _prompt(record) if isinstance(record, dict) else None
        if prompt is None:
            raise RequestError(
                f"line {number} of {source} is no JSON object with a 'prompt' or 'messages'"
            )
        found.append(prompt)
    if not found:
        raise RequestError(f"{source} holds no prompts: write one per line")
    return found


def _prompt(record: Mapping[str, object]) -> Prompt | None:
    text, guess = record.get("prompt"), record.get("prediction", "")
    messages = record.get("messages")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            return None
        text = messages[-1]["content"]
    if not isinstance(text, str) or not text or not isinstance(guess, str):
        return None
    return Prompt(text, guess, messages=messages or ())


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
