"""The tables of docs/how-to/run-on-vllm.md, from the mapping itself: part of `reference.py`."""

from __future__ import annotations

from pathlib import Path

from outrider.integrations.vllm.mapping import OPTIONS
from outrider.registry import OURS, own_entries

PAGE = Path(__file__).parents[1] / "how-to" / "run-on-vllm.md"


def tables() -> dict[str, list[str]]:
    options = ["| option of `outrider serve` | fate | with vLLM |", "|---|---|---|"]
    fates = ("passed", "ours", "refused")
    for option in sorted(OPTIONS, key=lambda option: fates.index(option.fate)):
        options.append(f"| `{option.flag}` | {option.fate} | {option.theirs} |")
    proposers = ["| proposer | in vLLM | on its CPU build |", "|---|---|---|"]
    proposers += [
        f"| `{name}` | {in_vllm(name)} | {on_cpu_build(name)} |" for name in own_entries()
    ]
    return {"options": options, "proposers": proposers}


def in_vllm(proposer: str) -> str:
    """What vLLM makes of one of our proposers, in words."""
    theirs = own_entries()[proposer].vllm
    if not theirs.method:
        return f"refused: {theirs.note}"
    joint = " " if theirs.note.startswith("with ") else ": " if theirs.method == OURS else ", "
    return f"`{theirs.method}`{joint}{theirs.note}" if theirs.note else f"`{theirs.method}`"


def on_cpu_build(proposer: str) -> str:
    """The same for vLLM's CPU build: see `integrations/vllm/build.py`."""
    theirs = own_entries()[proposer].vllm
    if not theirs.method:
        return "–"
    return f"temperature 0 only{f'; {theirs.cpu_note}' if theirs.cpu_note else ''}"


def page(text: str) -> str:
    for name, lines in tables().items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "\n".join(lines) + "\n" + end + after
    return text
