"""The worst words stay out of the code and the pages: riddles, and requests spoken of as people.

Each entry of `WORDS` is a pattern and what to write instead. Comments, strings and names are
checked alike.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    r"purses?": "balance, budget",
    r"credits?": "balance",
    r"whoever|whomever|nobody|somebody|everybody|anybody": "what you mean: request, sequence",
    r"dear(er|est)?": "expensive",
    r"had better": "should",
    r"behind(?! (a|an|the|our|your) (proxy|gateway|balancer|front|reverse|load|TLS))": "after",
    r"told": "gets, knows, is passed",
    r"laws?": "distribution",
    r"heats?|heated": "temperature bucket",
    r"sureness": "confidence",
    r"cautions?|cautious": "stop rule",
    r"hears?|owes?|himself|herself": "gets, costs, itself",
}
# Names in `outrider prove --json`, which do not change; targets of links.
FINE = re.compile(r"sampled law|law of the output|top_law|\]\([^)]*\)", re.IGNORECASE)
PATTERNS = {re.compile(rf"(?<![a-z])(?:{word})(?![a-z])", re.I): say for word, say in WORDS.items()}
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def files() -> list[Path]:
    found = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    ]
    for folder, ends in {
        "src/outrider": (".py", ".cpp", ".h", ".js", ".html", ".css"),
        "docs": (".md", ".py"),
        "examples": (".md", ".py"),
        "family": (".md",),
    }.items():
        found += [
            path
            for path in sorted((ROOT / folder).rglob("*"))
            if path.suffix in ends and "texts" not in path.parts and "bundled" not in path.parts
        ]
    return found


def faults(text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = FINE.sub("", CAMEL.sub("_", line))
        for pattern, say in PATTERNS.items():
            if match := pattern.search(words):
                found.append(f"{number}: {match.group()!r}: write {say}")
    return found


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_plain_english(path: Path) -> None:
    found = faults(path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("whoever drafts", 1),
        ("RowDistributions and law_V", 1),
        ("a row behind the last", 1),
        ("a server behind a proxy", 0),
        ("lawn, heater, creditable, mistold", 0),
        ("self.caution = sureness", 2),
    ],
)
def test_words_are_found(text: str, num_faults: int) -> None:
    assert len(faults(text)) == num_faults
