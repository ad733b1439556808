"""What the reference pages say of declared parameters: part of `reference.py`."""

from __future__ import annotations

from dataclasses import fields

from outrider.parameters import Param, default_of, params


def note(text: str) -> str:
    """A help text as part of a sentence: "Most tokens." becomes "most tokens"."""
    if ". " in text or not text.endswith("."):
        return text
    first = text.split()[0]
    keep = first != "A" and not first[1:].islower()  # "API keys", "0 is greedy"
    return text[:-1] if keep else text[0].lower() + text[1:-1]


def docs_rows(config: type) -> list[list[str]]:
    """Field, command line, type, default and meaning of every parameter, as Markdown."""
    rows = []
    for field in fields(config):
        declared: Param = field.metadata["param"]
        meaning = note(declared.help)
        if declared.none:
            meaning += f"; None: {declared.none}"
        flags = ", ".join(f"`{name}`" for name in declared.names)
        default = f"`{default_of(config, field.name)!r}`"
        rows.append([f"`{field.name}`", flags, f"`{field.type}`", default, meaning])
    return rows


def http_notes(*configs: type) -> dict[str, str]:
    """Name in a body -> what the reference page says of it."""
    found = {}
    for config in configs:
        for declared in params(config).values():
            if declared.http:
                left_out = declared.http_default
                more = "" if left_out is None else f"; left out: {left_out:g}"
                found[declared.http] = declared.http_help or note(declared.help) + more
    return found
