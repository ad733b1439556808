"""The tables of docs/how-to/run-on-vllm.md, from the mapping itself: part of `reference.py`."""

from __future__ import annotations

from pathlib import Path

from outrider.integrations.vllm.mapping import OPTIONS, in_vllm, on_cpu_build
from outrider.registry import own_entries

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


def page(text: str) -> str:
    for name, lines in tables().items():
        start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + "\n".join(lines) + "\n" + end + after
    return text
