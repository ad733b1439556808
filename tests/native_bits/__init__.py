"""The bits that the kernels compute: hashes of `driver.cpp`, compared with `recorded.json`.

The driver computes whole steps of small decoders in every type of weights, and samples, through
the C interface. It also checks that a row has the same bits in passes of every width and in trees.
All instruction sets with fused multiply-adds have one set of bits, on x86-64 and on ARM, with the
exception of four types of blocks under AVX-512; the portable kernels have another set.

    PYTHONPATH=src:tests python -m native_bits     compile for ARM and run under qemu: make arm-test
    ... -m native_bits --write                     record the bits of this machine's kernels
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from outrider.native import build

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"


class DriverError(Exception):
    """The driver failed, or its bits are others than those recorded."""


@dataclass(frozen=True)
class Bits:
    isa: str
    hashes: dict[str, str]  # by case


def expected_of(isa: str, recorded: dict[str, dict[str, str]]) -> dict[str, str]:
    if isa == "portable":
        return recorded["portable"]
    # Codes of a byte are unsigned there, which costs a float operation more.
    return recorded["fused"] | (recorded["avx512"] if isa.startswith("avx512") else {})


def compile_driver(folder: Path, library: Path, compiler: list[str]) -> Path:
    target = folder / "driver"
    command = [*compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra"]
    command += [f"-I{build.HERE}", str(HERE / "driver.cpp"), str(library)]
    command += [f"-Wl,-rpath,{library.parent}", "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def run(command: list[str], isa: str = "") -> Bits:
    environment = os.environ | {"OUTRIDER_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DriverError((done.stdout + done.stderr).strip())
    first, *lines = done.stdout.splitlines()
    return Bits(first.removeprefix("isa "), dict(line.rsplit(" ", 1) for line in lines))


def compare(found: Bits) -> None:
    expected = expected_of(found.isa, json.loads(RECORDED.read_text()))
    names = sorted(expected.keys() | found.hashes.keys())
    different = [name for name in names if found.hashes.get(name) != expected.get(name)]
    if different:
        raise DriverError(f"{found.isa}: other bits than recorded: {', '.join(different)}")


def record(driver: Path) -> None:
    """Writes the bits of AVX2, AVX-512 (where they differ) and the portable kernels."""
    found = {isa: run([str(driver)], isa).hashes for isa in ("avx2", "avx512", "portable")}
    fused = found["avx2"]
    own = {name: hash for name, hash in found["avx512"].items() if hash != fused[name]}
    bits = {"fused": fused, "avx512": own, "portable": found["portable"]}
    RECORDED.write_text(json.dumps(bits, indent=1) + "\n")
