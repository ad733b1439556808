"""Compiles the native engine with the machine's C++ compiler.

    python -m outrider.native.build            into the package's own folder, if out of date
    python -m outrider.native.build --sanitize with AddressSanitizer and UBSan, beside it

$CXX names the compiler, also one for another processor (then with --output).

The package build loads this file by path and calls `compile_library` before anything is installed,
so this module imports the standard library only. Every instruction set is a translation unit with
its own flags; the library chooses one at run time. There is no -ffast-math, and no fused operation
that the source does not contain: the order of a row's sums is part of the contract.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "_outrider.so"
SANITIZED = "_outrider_sanitized.so"
SOURCES = (
    "cycles.cpp",
    "dispatch.cpp",
    "draft.cpp",
    "grow.cpp",
    "kernels_avx2.cpp",
    "kernels_avx512.cpp",
    "kernels_dotprod.cpp",
    "kernels_i8mm.cpp",
    "kernels_neon.cpp",
    "kernels_portable.cpp",
    "model.cpp",
    "ngram.cpp",
    "pack.cpp",
    "plan.cpp",
    "pool.cpp",
    "route.cpp",
    "sample.cpp",
    "states.cpp",
    "step.cpp",
    "stored.cpp",
    "suffix.cpp",
)
# Flags of the files for one kind of processor, by the first word of the compiler's target. For
# other processors these files compile to nothing.
X86 = {
    "kernels_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "kernels_avx512.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ],
}
ARM = {
    "kernels_dotprod.cpp": ["-march=armv8.2-a+dotprod"],
    "kernels_i8mm.cpp": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
}
FLAGS_OF = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
]
SANITIZE = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
]


class BuildError(Exception):
    """There is no compiler, or it cannot compile the sources; the message says which."""


def find_compiler() -> list[str]:
    """$CXX, or the first usual name that exists."""
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return [path]
    raise BuildError("no C++ compiler found (looked for $CXX, c++, g++, clang++)")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")
    return done.stdout


def compile_library(target: Path, *, sanitize: bool = False) -> Path:
    """Compiles and links everything into `target`, atomically. Raises `BuildError`."""
    compiler = find_compiler()
    target_machine = _run([*compiler, "-dumpmachine"]).split("-")[0].strip()
    extra = FLAGS_OF.get(target_machine, {})
    flags = FLAGS + (SANITIZE if sanitize else [])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder) / (Path(name).stem + ".o")) for name in SOURCES]
        commands = [
            [*compiler, *flags, *extra.get(name, []), "-c", str(HERE / name), "-o", out]
            for name, out in zip(SOURCES, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        linked = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            _run([*compiler, *flags, "-shared", *objects, "-o", str(linked)])
            linked.replace(target)
        finally:
            linked.unlink(missing_ok=True)
    return target


def is_current(target: Path) -> bool:
    """Whether the library is newer than all of its sources."""
    if not target.is_file():
        return False
    made_from = [*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]
    return target.stat().st_mtime >= max(path.stat().st_mtime for path in made_from)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outrider.native.build")
    parser.add_argument("--sanitize", action="store_true", help="AddressSanitizer and UBSan")
    parser.add_argument("--output", type=Path, help="where to put the library")
    parser.add_argument("--force", action="store_true", help="even if it is up to date")
    options = parser.parse_args()
    target = options.output or HERE / (SANITIZED if options.sanitize else LIBRARY)
    if is_current(target) and not options.force:
        return 0
    try:
        built = compile_library(target, sanitize=options.sanitize)
    except BuildError as error:
        print(f"outrider: native engine not built: {error}", file=sys.stderr)
        return 1
    print(f"outrider: built {built}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
