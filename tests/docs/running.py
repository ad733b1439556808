"""Runs the blocks of a page in a folder of its own, and compares what they print."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from outrider import native
from outrider.cli.app import app, canonical
from outrider.cli.errors import run as run_outrider

from .pages import ROOT, Block

NO_CODE = {"text", "mermaid", "markdown", ""}
SHELL = set("|<>$;&*`")
NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
WIDTH = "120"
RAN: dict[str, tuple[int, str]] = {}  # what takes a minute and leaves no file: once for all pages


class Mismatch(AssertionError):
    """A page that says something else than its commands do."""


class Session:
    """One page: its working folder, its Python names, its servers."""

    def __init__(self, folder: Path, slow: bool) -> None:
        self.folder, self.slow = folder, slow
        self.port = _free_port()
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.servers: list[subprocess.Popen[bytes]] = []
        furnish(folder)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.names.clear()
        gc.collect()
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait(60)

    def run(self, block: Block) -> None:
        """Raises Mismatch with the page and line where reality differs."""
        if block.language in NO_CODE or ("slow" in block.marks and not self.slow):
            return
        if block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language in ("sh", "console"):
            for command, expected in commands(block):
                self._command(block, command, expected)
        elif block.language == "python":
            if block.reason:
                compile(block.text, block.name, "exec")
                return
            printed = self._python(block)
            if block.output is not None:
                compare(block, block.output, printed)
        else:
            raise Mismatch(f"{block.name}: no way to check a block of {block.language!r}")

    def _python(self, block: Block) -> str:
        text = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), inside(self.folder):
            exec(compile(text, block.name, "exec"), self.names)
        return printed.getvalue()

    def _command(self, block: Block, command: str, expected: str | None) -> None:
        check_names(block, command)
        if block.reason or command.startswith(("make ", "pip ", "git ", "sudo ", "cd ")):
            return
        command = command.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        if "short" in block.marks:
            command = shorter(command)
        if "background" in block.marks:
            self._serve(block, command)
            return
        wanted = next((int(m.split()[1]) for m in block.marks if m.startswith("exit")), 0)
        if command in RAN:
            code, printed = RAN[command]
        elif command.startswith("outrider ") and not SHELL & set(re.sub(r"'[^']*'", "", command)):
            code, printed = in_process(shlex.split(command, comments=True)[1:], self.folder)
            if command.startswith(("outrider doctor my/", "outrider prove my/")):
                RAN[command] = code, printed
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=environment(self.folder),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=600,
            )
            code, printed = done.returncode, done.stdout
        if code != wanted:
            raise Mismatch(f"{block.name}: exit code {code}, not {wanted}:\n{command}\n{printed}")
        if expected is not None:
            compare(block, expected, printed)

    def _serve(self, block: Block, command: str) -> None:
        arguments = shlex.split(command, comments=True)
        assert arguments[:2] == ["outrider", "serve"], block.name
        program = [sys.executable, "-m", *arguments, "--port", str(self.port)]
        log = (self.folder / "server.log").open("wb")
        server = subprocess.Popen(
            program, cwd=self.folder, env=environment(self.folder), stdout=log, stderr=log
        )
        self.servers.append(server)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if server.poll() is not None:
                break
            with contextlib.suppress(OSError):  # not there yet, or too busy
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            time.sleep(0.2)
        raise Mismatch(f"{block.name}: no server:\n{(self.folder / 'server.log').read_text()}")


def commands(block: Block) -> Iterator[tuple[str, str | None]]:
    """The commands of a block, continued lines joined, each with the output shown for it."""
    if block.language == "sh":
        for line in _joined(block.text.splitlines()):
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip(), None
        return
    command: list[str] = []
    output: list[str] = []
    for line in [*block.text.splitlines(), "$ "]:
        if line.startswith("$ "):
            if command:
                yield "\n".join(command), "\n".join(output) if "".join(output).strip() else None
            command, output = [line[2:]], []
        elif command and command[-1].endswith("\\") and not output:
            command.append(line)
        else:
            output.append(line)


def shorter(command: str) -> str:
    """The same measurement or training, but less of it."""
    if command.startswith("outrider bench"):
        return f"{command} -n 1 -m 8 -r 1" + (" --values 1,2" if "--axis batch" in command else "")
    if command.startswith("outrider train"):
        command = re.sub(r" --minutes \d+", "", command)
        return f"{re.sub(r' --own-tokens [0-9]+', '', command)} --steps 2 --batch 2 --length 64"
    return command


def _joined(lines: list[str]) -> list[str]:
    joined: list[str] = []
    for line in lines:
        if joined and (joined[-1].endswith("\\") or joined[-1].count("'") % 2):
            joined[-1] += "\n" + line
        else:
            joined.append(line)
    return joined


def in_process(arguments: list[str], folder: Path) -> tuple[int, str]:
    """`outrider ...` without a new interpreter: what it prints, both streams together."""
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        inside(folder),
    ):
        code = run_outrider(app, arguments)
    return code, printed.getvalue()


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """In this folder, with the terminal and the cache of a page."""
    before, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(COLUMNS=WIDTH, NO_COLOR="1")
    os.environ.pop("OUTRIDER_DEBUG", None)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(variables)


def environment(folder: Path) -> dict[str, str]:
    tools = folder / ".bin"
    if not tools.exists():
        tools.mkdir()
        for name, what in (("outrider", "-m outrider"), ("python", "")):
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
            (tools / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "COLUMNS": WIDTH,
        "NO_COLOR": "1",
    }


def compare(block: Block, expected: str, printed: str) -> None:
    if "avx512" in block.marks and not (native.available() and native.isa().startswith("avx512")):
        return
    loose = "numbers vary" in block.marks
    wanted, got = _lines(expected, loose), _lines(printed, loose)
    pattern = r"\n".join(
        r"(?:.*\n?)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*")
        for line in wanted
    ).replace(r"(?:.*\n?)*?\n", r"(?:.*\n)*?")
    if not re.fullmatch(pattern, "\n".join(got)):
        raise Mismatch(f"{block.name} shows\n{expected}\n\nbut what was printed is\n{printed}")


def _lines(text: str, loose: bool) -> list[str]:
    lines = "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()
    if loose:
        lines = [NUMBER.sub("#", line) for line in lines]
        lines = [re.sub(r"([━─═])\1+", r"\1", line) for line in lines]
        lines = [re.sub(r"\s+", " ", line).strip() for line in lines]
    return lines


def options() -> dict[str, set[str]]:
    """Every command, "train draft" for one of a group, with the options it knows."""
    found: dict[str, set[str]] = {}

    def visit(path: str, command: Any) -> None:
        found[path] = {"--help", "-h"}
        for param in command.params:
            found[path] |= {*param.opts, *param.secondary_opts}
        for name, child in getattr(command, "commands", {}).items():
            below = f"{path} {name}".strip()
            visit(below, child)
            if path:  # "outrider bench --out" speaks of what the group's commands know
                found[path] |= found[below]

    visit("", typer.main.get_command(app))
    return found


OPTIONS = options()
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def check_names(block: Block, command: str) -> None:
    """Commands, options, make targets and extras that a page names must exist."""
    command = re.sub(r"\\\n\s*", " ", command)
    for target in re.findall(r"(?:^|&& )make ([\w-]+)", command):
        if target not in TARGETS:
            raise Mismatch(f"{block.name}: the Makefile has no target {target!r}")
    for extras in re.findall(r"outrider\[([\w,]+)\]", command):
        if unknown := set(extras.split(",")) - set(EXTRAS):
            raise Mismatch(f"{block.name}: no such extra: {unknown}")
    for call in re.findall(r"(?:^|[\s/;|]|-m )outrider ([^|>;#]+)", command):
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", call).split()
        path = ""
        while words and f"{path} {words[0]}".strip() in OPTIONS:
            path = f"{path} {words.pop(0)}".strip()
        for word in words:
            if word.startswith("-") and len(word) > 1 and not re.match(r"-\d", word):
                dashes = "--" if word.startswith("--") else "-"
                name = dashes + canonical(word.lstrip("-").partition("=")[0])
                if name not in OPTIONS[path]:
                    raise Mismatch(f"{block.name}: outrider {path} has no option {name}")


def furnish(folder: Path) -> None:
    """The files that pages speak of: models, prompts, texts to train on."""
    bundled = ROOT / "src" / "outrider" / "bundled"
    (folder / "my").mkdir()
    for name in ("target", "draft"):
        (folder / "my" / name).symlink_to(bundled / name)
    prompts = ["def add(a, b):", "class Stack:", "import json\n\ndef load(path):", "def main():"]
    (folder / "prompts.txt").write_text("\n".join(p.splitlines()[0] for p in prompts) + "\n")
    (folder / "my-prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    old = (
        'def area(width, height):\n    """The area of a rectangle."""\n    return width * height\n'
    )
    (folder / "old.py").write_text(old * 3)
    (folder / "corpus").mkdir()
    for source in sorted((ROOT / "src" / "outrider" / "theory").glob("*.py")):
        (folder / "corpus" / f"{source.stem}.txt").write_text(source.read_text())
    for name in ("examples", "benchmarks", "docs", "src", "tests"):
        (folder / name).symlink_to(ROOT / name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
