"""Links lead somewhere, words are spelt, and nothing is fetched from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import DOCS, LINK, ROOT, anchors, pages, prose

PAGES = pages()
NAMES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
OTHERS = [*(ROOT / name for name in NAMES), *sorted(ROOT.glob("[!.]*/README.md"))]


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith(("http://127.0.0.1", "https://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{page.name}: {link} leads nowhere"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leaves the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pictures_are_local(page: Path) -> None:
    assert not re.search(r"!\[[^\]]*\]\(https?:", page.read_text(encoding="utf-8"))


def test_every_page_is_reachable() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        assert str(page.relative_to(DOCS)) in menu, f"{page} is not in the menu of mkdocs.yml"


def test_spelling() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *map(str, [*PAGES, *OTHERS, ROOT / "examples"])],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_numbers_have_files() -> None:
    """A page that speaks of speedups links to the result files they come from."""
    for page in PAGES:
        if re.search(r"\b\d\.\d+ ?(×|x plain|times plain)", prose(page)):
            assert "benchmarks/results/" in page.read_text(encoding="utf-8") or "theory" in str(
                page.read_text(encoding="utf-8")
            ), page
