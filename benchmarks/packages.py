"""What a stranger installs: built artefacts, in fresh environments, without a network at run time.

    python benchmarks/packages.py [--uv UV] [--pipx PIPX] [--only WORD] [--write]

Builds the source archive of HEAD and, from the unpacked archive, a wheel with the kernels, one
without them and one without the bundled models. Each is installed with its dependencies into an
environment of its own, with and without a compiler, also as a tool by uv and pipx. There
`outrider --version` and `outrider generate` run without a network (Linux; `unshare`). It fails if
a file is larger than 112 MB, if the kernels are others than expected, or if one text differs. Some
minutes on a quiet machine. `make package-test` installs uv and pipx and runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

ROOT = Path(__file__).parents[1]
MOST_MB = 112
COMPILERS = ("c++", "g++", "clang++")
BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"
GENERATE = ["-p", "def add(a, b):", "--max-tokens", "16", "-t", "0"]
NO_MODELS = "none in this installation"


class PackageError(Exception):
    """An artefact or an installation is not as it should be."""


@dataclass(frozen=True)
class Installation:
    name: str
    artefact: str
    has_compiler: bool
    kernels: str  # what `outrider --version` says first about them
    tool: str = ""  # installs as a command of its own
    has_models: bool = True


INSTALLATIONS = [
    Installation("wheel with kernels", "wheel", False, "native"),
    Installation("pure-Python wheel", "pure", False, "torch"),
    Installation("source, compiler", "source", True, "native"),
    Installation("source, no compiler", "source", False, "torch"),
    Installation("wheel without models", "core", False, "torch", has_models=False),
    Installation("uv tool install", "wheel", False, "native", tool="uv"),
    Installation("pipx install", "wheel", False, "native", tool="pipx"),
]


def run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        why = (done.stdout + done.stderr).strip()
        raise PackageError(f"{' '.join(command)} failed:\n{why}")
    output: str = done.stdout
    return output


def build(folder: Path) -> dict[str, Path]:
    """The artefacts by name."""
    tree, unpacked = folder / "tree", folder / "unpacked"
    tree.mkdir()
    run(["git", "-C", str(ROOT), "archive", "-o", str(folder / "head.tar"), "HEAD"])
    with tarfile.open(folder / "head.tar") as tar:
        tar.extractall(tree, filter="data")
    found = {"source": built("sdist", tree, folder / "source", {})}
    with tarfile.open(found["source"]) as tar:
        tar.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    settings = {
        "wheel": {"OUTRIDER_NATIVE": "require"},
        "pure": {"OUTRIDER_NATIVE": "off"},
        "core": {"OUTRIDER_NATIVE": "off", "OUTRIDER_BUNDLED": "off"},
    }
    for name, environment in settings.items():
        found[name] = built("wheel", source, folder / name, environment)
        shutil.rmtree(source / "build", ignore_errors=True)
    return found


def built(kind: str, tree: Path, target: Path, environment: dict[str, str]) -> Path:
    command = [sys.executable, "-c", BUILD.format(kind, str(target))]
    run(command, cwd=tree, env=os.environ | environment)
    (artefact,) = target.iterdir()
    return artefact


def artefact_rows(artefacts: dict[str, Path]) -> list[dict[str, Any]]:
    rows = []
    for name, path in artefacts.items():
        size = path.stat().st_size / 1e6
        if size > MOST_MB:
            raise PackageError(f"{path.name} has {size:.0f} MB, more than {MOST_MB}")
        names = zipfile.ZipFile(path).namelist() if path.suffix == ".whl" else []
        rows.append(
            {
                "artefact": name,
                "file": path.name,
                "MB": round(size, 1),
                "kernels": "native/_outrider.so" in " ".join(names),
                "models": name == "source" or any("/bundled/target/" in n for n in names),
            }
        )
    expected = {"wheel": r"py3-none-(?!any)\w+", "pure": "py3-none-any", "core": "py3-none-any"}
    for name, tag in expected.items():
        if not re.search(rf"-{tag}\.whl$", artefacts[name].name):
            raise PackageError(f"{artefacts[name].name}: another tag than {tag}")
    return rows


@contextmanager
def without_compiler(environment: dict[str, str], *programs: str) -> Iterator[dict[str, str]]:
    """A search path with everything that is on it now, but no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        for place in reversed(environment["PATH"].split(os.pathsep)):
            for program in Path(place).glob("*") if Path(place).is_dir() else ():
                link = Path(folder, program.name)
                link.unlink(missing_ok=True)
                if not re.search(r"(\+\+|^cc|gcc|clang)[-.\d]*$", program.name):
                    link.symlink_to(program)
        kept = {name: value for name, value in environment.items() if name != "CXX"}
        yield kept | {"PATH": folder}


def clean_environment(folder: Path) -> dict[str, str]:
    foreign = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return kept | {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR", str(ROOT / "build" / "uv-cache")),
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "PIPX_HOME": str(folder / "pipx"),
        "PIPX_BIN_DIR": str(folder / "bin"),
    }


def install(
    how: Installation, artefact: Path, folder: Path, env: dict[str, str], options: Any
) -> Path:
    """Installs the artefact with its dependencies; returns the command `outrider`."""
    if how.tool == "pipx":
        run([options.pipx, "install", "--python", sys.executable, str(artefact)], env=env)
        return folder / "bin" / "outrider"
    if how.tool == "uv":
        run([options.uv, "tool", "install", "--python", sys.executable, str(artefact)], env=env)
        return folder / "bin" / "outrider"
    venv = folder / "venv"
    run([options.uv, "venv", "--python", sys.executable, str(venv)], env=env)
    python = str(venv / "bin" / "python")
    run([options.uv, "pip", "install", "--python", python, str(artefact)], env=env)
    return venv / "bin" / "outrider"


def check(how: Installation, command: Path, env: dict[str, str]) -> tuple[str, str]:
    """What `--version` says about the kernels, and the generated text."""
    cut = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    cut = [] if sys.platform != "linux" else cut
    version = run([*cut, str(command), "--version"], env=env)
    kernels = re.search(r"^kernels +(.*)$", version, re.MULTILINE)
    if not kernels or not kernels[1].startswith(how.kernels):
        raise PackageError(f"{how.name}: the kernels are not {how.kernels}:\n{version}")
    if not re.search(r"^optional ", version, re.MULTILINE):
        raise PackageError(f"{how.name}: --version does not name the optional parts:\n{version}")
    generate = [*cut, str(command), "generate"]
    model = "bundled"
    if not how.has_models:
        refused = subprocess.run(
            [*generate, model, *GENERATE], env=env, capture_output=True, text=True, check=False
        )
        if refused.returncode == 0 or NO_MODELS not in refused.stderr:
            raise PackageError(f"{how.name}: no clear answer without models:\n{refused.stderr}")
        model = str(ROOT / "src" / "outrider" / "bundled" / "target")
    text = run([*generate, model, *GENERATE], env=env)
    return kernels[1].split(";")[0].split(" (_out")[0], text


def moved(artefact: Path, folder: Path) -> Path:
    """A copy at a path of its own: uv remembers what it has built from a path."""
    return Path(shutil.copy2(artefact, folder / artefact.name))


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    texts: dict[str, str] = {}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        artefacts = build(Path(name))
        artefact_table = artefact_rows(artefacts)
        for how in (one for one in INSTALLATIONS if options.only in one.name):
            print(how.name, file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as place:
                env = clean_environment(Path(place))
                artefact = moved(artefacts[how.artefact], Path(place))
                with without_compiler(env) as hidden:
                    env = env if how.has_compiler else hidden
                    if bool(shutil.which(COMPILERS[0], path=env["PATH"])) != how.has_compiler:
                        raise PackageError(f"{how.name}: the compiler is not as expected")
                    command = install(how, artefact, Path(place), env, options)
                    kernels, texts[how.name] = check(how, command, env)
            rows.append(
                {
                    "installed": how.name,
                    "compiler": "yes" if how.has_compiler else "no",
                    "kernels": kernels,
                    "outrider generate": "answers" if how.has_models else "answers, own folder",
                }
            )
    if len(set(texts.values())) != 1:
        raise PackageError(f"the texts differ: {texts}")
    return artefact_table, rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--pipx", default="pipx")
    parser.add_argument("--only", default="", metavar="WORD", help="installations with this name")
    parser.add_argument("--write", action="store_true", help="keep the result as packages")
    report.add_out(parser)
    options = parser.parse_args()
    try:
        artefacts, installations = measure(options)
    except PackageError as error:
        print(f"packages: {error}", file=sys.stderr)
        return 1
    if options.write:
        notes = (
            "Each row is a fresh environment with all dependencies. `outrider generate` ran "
            f"without a network; all {len(installations)} texts are equal."
        )
        tables = {"Artefacts": artefacts, "Installations": installations}
        report.write("packages", "Built artefacts, installed", tables, notes, options.out)
    for row in installations:
        print("  ".join(str(value) for value in row.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
