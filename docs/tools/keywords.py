"""The keyword arguments of `LLM` in src/outrider/llm.py, from the configuration: part of
`reference.py`. Between `# fields of CLASS` and `# end` stands one argument for each field,
between `# types of CLASS` and `# end` its name and type."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from outrider import config
from outrider.parameters import default_of

MODULE = Path(__file__).parents[2] / "src" / "outrider" / "llm.py"
PART = re.compile(r"( *)# (fields|types) of (\w+)[^\n]*\n.*? *# end\n", re.DOTALL)


def keywords(kind: type, indent: str, *, defaults: bool) -> str:
    lines = []
    for field in dataclasses.fields(kind):
        if field.name == "model":  # given by position
            continue
        line = f"{indent}{field.name}: " + str(field.type).replace("'", '"')
        if defaults:
            default = default_of(kind, field.name)
            line += " = " + (f'"{default}"' if isinstance(default, str) else repr(default)) + ","
        lines.append(line + "\n")
    return "".join(lines)


def filled(text: str) -> str:
    """The module's text with its generated lines made anew."""

    def fill(found: re.Match[str]) -> str:
        indent, what, name = found.groups()
        head = f"{indent}# {what} of {name}, written by `make reference`\n"
        lines = keywords(getattr(config, name), indent, defaults=what == "fields")
        return f"{head}{lines}{indent}# end\n"

    return PART.sub(fill, text)
