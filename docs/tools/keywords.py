"""The keyword arguments of `LLM` in src/outrider/llm.py, from the configuration: part of
`reference.py`. Between `# fields of CLASS` and `# end` stands one argument for each field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from outrider import config
from outrider.parameters import default_of

MODULE = Path(__file__).parents[2] / "src" / "outrider" / "llm.py"
PART = re.compile(r"( *)# fields of (\w+)[^\n]*\n.*? *# end\n", re.DOTALL)


def keywords(kind: type, indent: str) -> str:
    lines = []
    for field in dataclasses.fields(kind):
        if field.name == "model":  # given by position
            continue
        default = default_of(kind, field.name)
        shown = f'"{default}"' if isinstance(default, str) else repr(default)
        written = str(field.type).replace("'", '"')
        lines.append(f"{indent}{field.name}: {written} = {shown},\n")
    return "".join(lines)


def filled(text: str) -> str:
    """The module's text with its generated arguments made anew."""

    def fill(found: re.Match[str]) -> str:
        indent, name = found.groups()
        head = f"{indent}# fields of {name}, written by `make reference`\n"
        return f"{head}{keywords(getattr(config, name), indent)}{indent}# end\n"

    return PART.sub(fill, text)
