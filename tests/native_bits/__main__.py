"""Compiles the kernels for ARM, runs them on emulated processors and compares their bits."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from native_bits import Bits, DriverError, compare, compile_driver, record, run
from outrider.native import build

COMPILER, QEMU, LIBRARIES = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
# The processor that qemu emulates -> the kernels chosen there, then others to run on it.
PROCESSORS = {
    "cortex-a53": ["neon", "portable"],
    "neoverse-n1": ["dotprod", "neon"],
    "max": ["i8mm", "dotprod"],
}


def emulated(driver: Path, processor: str, isa: str = "") -> Bits:
    return run([QEMU, "-L", LIBRARIES, "-cpu", processor, str(driver)], isa)


def check_refusal(driver: Path) -> None:
    """A processor without an instruction set says in one line what it has."""
    try:
        emulated(driver, "cortex-a53", "i8mm")
    except DriverError as error:
        if str(error).endswith("neon, portable"):
            return
    raise DriverError("a cortex-a53 does not refuse i8mm as it should")


def check(driver: Path) -> None:
    for processor, names in PROCESSORS.items():
        for forced in ("", *names[1:]):
            found = emulated(driver, processor, forced)
            if found.isa != (forced or names[0]):
                raise DriverError(f"{processor} runs {found.isa}, not {forced or names[0]}")
            compare(found)
            print(f"{processor}, {found.isa}: all {len(found.hashes)} cases equal", flush=True)
    check_refusal(driver)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m native_bits")
    parser.add_argument("--write", action="store_true", help="record this machine's bits instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.write:
            library = build.HERE / build.LIBRARY
            record(compile_driver(folder, library, build.find_compiler()))
            return 0
        if not shutil.which(COMPILER) or not shutil.which(QEMU):
            packages = "g++-aarch64-linux-gnu and qemu-user"
            print(f"make arm-test: install {packages} (Debian's names)", file=sys.stderr)
            return 1
        command = [sys.executable, "-m", "outrider.native.build"]
        command += ["--output", str(folder / "outrider.so")]
        subprocess.run(command, check=True, env=os.environ | {"CXX": COMPILER})
        try:
            check(compile_driver(folder, folder / "outrider.so", [COMPILER]))
        except DriverError as error:
            print(f"make arm-test: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
