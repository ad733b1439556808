"""Every figure of the controller, the doctor and the engine, and their pictures: one command.

    python benchmarks/figures.py [--quick] [--only NAME,...]

Runs the measurements below one after the other (about an hour on two quiet cores; --quick: a
few prompts each, into a folder that is not committed), writes benchmarks/results/NAME.json and
NAME.md, then draws docs/plots from all results there are (`docs/tools/figures.py`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results")
CLI = ["-m", "outrider"]
DECODE = [*CLI, "bench", "decode"]
SWEEP = [*CLI, "bench", "sweep"]
KINDS = "mixed,code,prose,edit,json,summary,hot,long"

# name -> command, and what makes it short
RECIPES: dict[str, tuple[list[str], list[str]]] = {
    "auto-by-workload": (
        [*DECODE, "-w", KINDS, "-k", "2,3,4,6,8,auto", "-n", "24", "-m", "64", "-r", "5",
         "--title", "K = auto against every fixed K"],
        ["-w", "mixed,code", "-n", "2", "-m", "32", "-r", "1"],
    ),
    "auto-duel": (["benchmarks/auto_duel.py"], ["--quick"]),
    "auto-by-batch": (
        [*SWEEP, "--axis", "batch", "--values", "1,2,4,8,16,32", "-k", "4,auto", "-n", "8",
         "-m", "128", "-r", "20", "--title", "K = auto against plain decoding, by batch size"],
        ["--values", "1,8", "-n", "2", "-m", "32", "-r", "1"],
    ),
    "junk": (
        [*SWEEP, "--axis", "batch", "--values", "1,8", "--proposers", "synthetic:0@draft-model",
         "-k", "auto", "-n", "8", "-m", "128", "-r", "10",
         "--title", "A drafter that is never right, K = auto"],
        ["-n", "2", "-m", "32", "-r", "1"],
    ),
    "efficiency": (
        ["benchmarks/efficiency.py"],
        ["--prompts", "1", "--tokens", "48", "--turns", "5"],
    ),
    "speedup-by-k": (
        [*SWEEP, "--axis", "k", "-k", "1,2,3,4,6,8,12,auto", "-n", "6", "-m", "64", "-r", "4",
         "--title", "Speedup by draft length"],
        ["-n", "2", "-m", "32", "-r", "1"],
    ),
    "temperature": (
        [*SWEEP, "--axis", "temperature", "--values", "0,0.3,0.6,0.8,1,1.3", "-k", "4,auto",
         "-n", "6", "-m", "64", "-r", "2", "--title", "Acceptance and speedup by temperature"],
        ["--values", "0,1", "-n", "2", "-m", "32", "-r", "1"],
    ),
    "doctor-prediction": (["benchmarks/doctor_check.py"], ["--workloads", "code", "--quick"]),
}  # fmt: skip


def measure(name: str, folder: Path, quick: bool) -> bool:
    command, short = RECIPES[name]
    out = ["-o", f"{folder / name}"]
    started = perf_counter()
    done = subprocess.run(
        [sys.executable, *command, *(short if quick else []), *out], cwd=ROOT, check=False
    )
    print(f"{name}: {perf_counter() - started:.0f} s, exit code {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="try everything out; keep nothing")
    parser.add_argument("--only", default=",".join(RECIPES), help="these; 'none': draw only")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name != "none"]
    for name in names:
        if name not in RECIPES:
            parser.error(f"there is no {name!r}: {', '.join(RECIPES)}")
    if not options.quick:
        failed = [name for name in names if not measure(name, RESULTS, quick=False)]
        subprocess.run([sys.executable, "docs/tools/figures.py"], cwd=ROOT, check=True)
    else:
        with tempfile.TemporaryDirectory() as folder:
            failed = [name for name in names if not measure(name, Path(folder), quick=True)]
            drawn = [
                f"{path}"
                for path in Path(folder).glob("*.json")
                if path.stem not in ("doctor-prediction", "auto-duel")  # tables alone
            ]
            command = [*CLI, "plot", *sorted(drawn), "-o", f"{folder}/plots"]
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
