"""Writes the prompts of `outrider bench` (src/outrider/bench/texts) from the held-out packages.

    python family/fetch.py && python benchmarks/make_workloads.py

The packages are permissively licensed and no bundled model was trained on them. Their names and
licences are written beside the prompts.
"""

from __future__ import annotations

import json
from pathlib import Path

from family import HELDOUT, functions_of, inside_docstring, renamed, signatures

from outrider.train.data import read_documents

ROOT = Path(__file__).parents[1]
TEXTS = ROOT / "src" / "outrider" / "bench" / "texts"
PACKAGES = ROOT / "family" / "packages.txt"
NUM_PROMPTS = 24
Record = dict[str, str]


def main() -> None:
    documents = [d for d in read_documents([HELDOUT]) if d.isascii() and len(d) > 4000]
    functions = [f for d in documents[::3] for f in functions_of(d)]
    workloads = {
        "code": [{"prompt": lines(d, len(d) // 3, 360)} for d in documents[::9]],
        "prose": [{"prompt": cut[-500:]} for f in functions if (cut := inside_docstring(f))],
        "edit": [edit(f) for f in functions if 500 < len(f) < 900 and renamed(f) != f],
        "json": [{"prompt": s[:400]} for d in documents[::5] if len(s := signatures(d)) > 900],
        "summary": [summary(d) for d in documents[2::7]],
        "long": [{"prompt": lines(d, 0, 3600)} for d in documents[4::11] if len(d) > 9000],
    }
    TEXTS.mkdir(exist_ok=True)
    for name, records in workloads.items():
        step = len(records) // NUM_PROMPTS
        chosen = records[:: max(1, step)][:NUM_PROMPTS]
        text = "".join(json.dumps(record) + "\n" for record in chosen)
        (TEXTS / f"{name}.jsonl").write_text(text)
        print(f"{name}: {len(chosen)} of {len(records)}, {len(text)} bytes")
    packages = [line.split(" | ") for line in PACKAGES.read_text().splitlines()]
    held = [package for package in packages if package[2:3] == ["heldout"]]
    notice = "".join(f"- {name} ({licence})\n" for name, licence, *_ in held)
    (TEXTS / "README.md").write_text(NOTICE + notice)


def lines(document: str, start: int, length: int) -> str:
    """Whole lines from about `start` on, about `length` characters."""
    first = document.find("\n", start) + 1 if start else 0
    return document[first : document.find("\n", first + length) + 1]


def edit(function: str) -> Record:
    """A function and the beginning of the same one with a better name in it."""
    new = renamed(function)
    head = new.index("\n") + 1
    return {
        "prompt": f"{function}\n\n\n# The same with a better name.\n{new[:head]}",
        "prediction": new[head:],
    }


def summary(document: str) -> Record:
    """A piece of a file, then the same piece's definitions listed again."""
    piece = lines(document, len(document) // 4, 900)
    return {"prompt": f"{piece}\n\n# The code above once more, in short:\n"}


NOTICE = """# Prompts of `outrider bench`

Short pieces of these packages, which are under permissive licences and were used to train none of
the bundled models. `benchmarks/make_workloads.py` wrote them.

"""

if __name__ == "__main__":
    main()
