"""docs/reference/claims.md: which sentence rests on which result file, and what measures it.

A claim is the sentence, row or heading that links to a file of benchmarks/results.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reference" / "claims.md"
RESULT = re.compile(r"\]\([^)\s]*benchmarks/results/([\w-]+)\.md[^)]*\)")
PLOT = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
END = re.compile(r"(?:(?<=[.:!?])(?<!\d\.)|(?<=\.\)))\s+(?=[A-Z\[`*])")  # of a sentence
MAX_CHARS = 150
HEAD = """# Claims: file and command

<!-- written by `make reference`: do not edit -->

Every figure in the README and on these pages comes from a result file in `benchmarks/results`.
Below is each file with its command, which measures it again, and the sentences that link to it. The
file names the machine, the versions and the commit.
"""


def pages() -> list[Path]:
    others = [ROOT / "CHANGELOG.md", ROOT / "family" / "README.md"]
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page != PAGE]
    return [ROOT / "README.md", *docs, *others]


def claims(text: str) -> Iterator[tuple[str, str]]:
    """Name of a result file and the sentence of a page that links to it."""
    heading = ""
    text = FENCE.sub("", text)
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=[-|#] ?)", text):
        if block.startswith("#"):
            heading = block.lstrip("# ").strip()
        for sentence in END.split(" ".join(PLOT.sub("", block).split())):
            for name in dict.fromkeys(RESULT.findall(sentence)):
                yield name, _plain(sentence) or heading


def _plain(sentence: str) -> str:
    """Without marks and links, cut to a row's width; "" for a bare reference."""
    words = LINK.sub(r"\1", RESULT.sub("]()", sentence)).strip(" -|(*")
    words = re.sub(r"\s*\((?:measured|figures|result|more|how|one run)\)", "", words)
    words = words.replace("|", ":").replace("**", "")
    if len(words.split()) < 4:
        return ""
    return words if len(words) <= MAX_CHARS else words[:MAX_CHARS].rsplit(" ", 1)[0] + " ..."


def found(texts: Mapping[Path, str] = {}) -> dict[str, list[tuple[Path, str]]]:
    """By result file: the pages and sentences that rest on it. `texts` are newer than the files."""
    by_file: dict[str, list[tuple[Path, str]]] = {}
    for page in pages():
        for name, sentence in claims(texts.get(page) or page.read_text(encoding="utf-8")):
            rows = by_file.setdefault(name, [])
            if (page, sentence) not in rows:
                rows.append((page, sentence))
    return by_file


def measured_by(name: str) -> str:
    """The command in the result file."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    line = re.search(r"^- command: (.*)$", text, re.MULTILINE) or re.search(r"`(make [^`]+)`", text)
    assert line is not None, f"benchmarks/results/{name}.md does not name its command"
    command = re.sub(r"^__main__\.py ", "outrider ", line.group(1).strip())
    command = re.sub(r"^(?=\w+\.py)", "python benchmarks/", command)
    return command if len(command) <= MAX_CHARS else command[:MAX_CHARS].rsplit(" ", 1)[0] + " ..."


def page_text(texts: Mapping[Path, str] = {}) -> str:
    lines = [HEAD]
    for name, rows in sorted(found(texts).items()):
        file = f"**[{name}](../../benchmarks/results/{name}.md)**"
        lines += [f"{file}: `{measured_by(name)}`", ""]
        for page, sentence in rows:
            there = posixpath.relpath(str(page), str(PAGE.parent))
            lines.append(f"- {sentence} ([{page.stem}]({there}))")
        lines.append("")
    return "\n".join(lines)


def unused() -> list[str]:
    """Result files that no page refers to."""
    known = set(found())
    return sorted({path.stem for path in RESULTS.iterdir()} - known)
