"""Every command and every block of code in the documentation, run in order, page by page.

`OUTRIDER_DOCS=all` (`make docs-test`) runs the slow ones too.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from .pages import SPAN, Block, blocks, pages, prose
from .running import Mismatch, Session, check_names, commands, compare

EVERYTHING = os.environ.get("OUTRIDER_DOCS") == "all"
LANGUAGES = {"python", "console", "sh", "json", "toml", "text"}
PAGES = pages()
RUNNABLE = [page for page in PAGES if any(b.language != "text" for b in blocks(page))]


def label(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", RUNNABLE, ids=label)
def test_what_the_page_shows_is_what_happens(page: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a reader's script closes nothing
        with Session(tmp_path, slow=EVERYTHING) as session:
            for block in blocks(page):
                session.run(block)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_nothing_escapes(page: Path) -> None:
    """Code stands in fences with a language, and inline commands name what exists."""
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.name}: which language?"
        if block.language in ("sh", "console"):
            for command, _ in commands(block):
                check_names(block, command)
    text = prose(page)
    for number, line in enumerate(text.splitlines(), 1):
        assert not re.match(r"    +(\$ |outrider |pip |make |python )", line), (
            f"{page.name}:{number}: an indented command is not run: fence it"
        )
    for match in SPAN.finditer(text):
        if match.group(1).startswith(("outrider ", "make ")):
            place = text.count("\n", 0, match.start()) + 1
            check_names(Block(page, place, "sh", match.group(1)), match.group(1))


SHOWN = Block(PAGES[0], 1, "console", "", {"numbers vary"})


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("took 3 ms", "took 17.5 ms", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nd", True),
        ("x ... z", "x y z", True),
        ("took 3 ms", "took 3 s", False),
        ("a\n...\nd", "a\nb", False),
        ("a", "a\nb", False),
    ],
)
def test_comparing(expected: str, printed: str, same: bool) -> None:
    if same:
        compare(SHOWN, expected, printed)
    else:
        with pytest.raises(Mismatch):
            compare(SHOWN, expected, printed)


@pytest.mark.parametrize("command", ["outrider serve --speling 3", "make no-such", "outrider x -k"])
def test_a_wrong_name_is_found(command: str) -> None:
    with pytest.raises(Mismatch):
        check_names(SHOWN, command)
