"""The pages of the documentation, cut into what can be checked: blocks, links, inline commands.

A fenced block is run unless its language says that it is no code. A comment on the line before it
says what to expect, words separated by commas:

    <!-- run: numbers vary -->   any number stands for any other; tables may be wider
    <!-- run: avx512 -->         the text depends on the kernels: compared where they are the same
    <!-- run: exit 1 -->         the command must end with this code
    <!-- run: background -->     a server: it stays up until the end of the page
    <!-- run: slow -->           only in `make docs-test`
    <!-- run: short -->          a measurement or training: a test runs a small one
    <!-- run: not here: WHY -->  only the names of commands and options are checked

In an expected output a line `...` stands for any lines, `...` inside a line for any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- run: (.*?) -->\s*\Z", re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass
class Block:
    page: Path
    line: int
    language: str
    text: str
    marks: set[str] = field(default_factory=set)
    reason: str = ""  # why it is not run here
    output: str | None = None  # what a Python block prints, where the page shows it

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The README and every page somebody wrote, generated ones included."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end_of_last = 0
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        lines = [line.removeprefix(indent) for line in body.splitlines()]
        block = Block(page, text.count("\n", 0, match.start()) + 1, language, "\n".join(lines))
        between = text[end_of_last : match.start()]
        if language == "output" and found and not between.strip():
            found[-1].output = block.text
        else:
            if mark := MARK.search(between):
                _read_marks(block, mark.group(1))
            found.append(block)
        end_of_last = match.end()
    return found


def _read_marks(block: Block, words: str) -> None:
    for word in [words] if words.startswith("not here") else map(str.strip, words.split(",")):
        if word.startswith("not here"):
            block.reason = word.partition(":")[2].strip()
            assert block.reason, f"{block.name}: say why it is not run here"
        else:
            known = {"numbers vary", "avx512", "background", "slow", "short"}
            assert word in known or re.fullmatch(r"exit \d+", word), f"{block.name}: {word!r}?"
            block.marks.add(word)


def prose(page: Path) -> str:
    """The page without its fenced blocks and comments, line numbers kept."""
    text = page.read_text(encoding="utf-8")
    for pattern in (FENCE, re.compile(r"<!--.*?-->", re.DOTALL)):
        text = pattern.sub(lambda match: "\n" * match.group().count("\n"), text)
    return text


def anchors(page: Path) -> set[str]:
    """What `page.md#...` may name, by the rule of mkdocs and of most hosts."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        found.add(re.sub(r"[-\s]+", "-", words))
    return found
