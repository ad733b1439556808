"""mkdocs hooks: files of the repository that pages link to become part of the site.

The sources stay plain Markdown; their relative links work in any view of the repository. The target
of a link that leaves docs/ (`../../benchmarks/results/peers.md`) is copied under `repository/`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
AS_TEXT = {".py", ".yaml", ".service", ".toml", ".yml", ""}


def on_files(files: Files, config: Any) -> Files:
    for page in list(files.documentation_pages()):
        _adopt(page, files, config)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def rewrite(match: re.Match[str]) -> str:
        target = _outside(page.file, match.group(2))
        if target is None:
            return match.group()
        there = _name(target)
        here = PurePosixPath(page.file.src_uri).parent
        return match.group(1) + posixpath.relpath(there, str(here)) + match.group(3)

    return LINK.sub(rewrite, markdown)


def _adopt(page: File, files: Files, config: Any) -> None:
    """Adds what a page links to outside docs/, and what that links to in turn."""
    text = FENCED.sub("", page.content_string)
    for _, link, _ in LINK.findall(text):
        target = _outside(page, link)
        if target is None or files.get_file_from_path(_name(target)):
            continue
        if target.is_dir():
            listing = "\n".join(f"- {child.name}" for child in sorted(target.iterdir()))
            added = File.generated(config, _name(target), content=f"# {target.name}/\n\n{listing}")
        elif target.suffix in AS_TEXT:
            source = target.read_text(encoding="utf-8")
            language = "python" if target.suffix == ".py" else "text"
            content = f"# {target.name}\n\n````{language}\n{source}\n````\n"
            added = File.generated(config, _name(target), content=content)
        else:
            added = File.generated(config, _name(target), abs_src_path=str(target))
        files.append(added)
        if target.suffix == ".md":
            _adopt(added, files, config)


def _outside(page: File, link: str) -> Path | None:
    """The file of the repository a link means, if it is not one of docs/."""
    if ":" in link or link.startswith("/"):
        return None
    if page.src_uri.startswith("repository/"):
        source = ROOT / page.src_uri.removeprefix("repository/")
    else:
        source = ROOT / "docs" / page.src_uri
    target = (source.parent / link).resolve()
    if not target.exists() or not target.is_relative_to(ROOT):
        return None  # mkdocs will say so
    inside = target.is_relative_to(ROOT / "docs")
    return None if inside and not page.src_uri.startswith("repository/") else target


def _name(target: Path) -> str:
    """The path of a repository file in the site; code becomes a page."""
    path = target.relative_to(ROOT)
    if path.parts[0] == "docs":
        return str(PurePosixPath(*path.parts[1:]))
    name = f"repository/{path.as_posix()}"
    return (
        f"{name}/index.md"
        if target.is_dir()
        else name + (".md" if target.suffix in AS_TEXT else "")
    )
