"""A new user's first run, timed: clone, `make demo` to its first token, `make test` to its end.

    python benchmarks/first_run.py                      clones this repository and does all of it
    python benchmarks/first_run.py --measured 3 11.5    writes minutes taken with a watch

All times count from the clone, and nothing is cached: neither packages nor measured costs. The
tests use what the demo has installed. About a quarter of an hour.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path

import report

ROOT = Path(__file__).parents[1]
FOREIGN = ("PYTHONPATH", "VIRTUAL_ENV", "OMP_NUM_THREADS")  # no new user has set these
INSTALLED, DEMO, TESTS = "everything installed", "first token of make demo", "end of make test"


def measure() -> dict[str, float]:
    """Minutes to the end of the installation, the demo's first race and the end of the tests."""
    environment = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        environment |= {"PIP_NO_CACHE_DIR": "1", "XDG_CACHE_HOME": f"{folder}/cache"}
        started = time.time()

        def minutes(now: float) -> float:
            return (now - started) / 60

        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        with subprocess.Popen(
            ["make", "demo"], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True
        ) as demo:
            assert demo.stdout is not None
            races = [time.time() for line in demo.stdout if line.startswith("──")]  # headings
        assert demo.returncode == 0, "make demo failed"
        assert races, "the demo printed no race"
        subprocess.run(["make", "test"], cwd=clone, env=environment, check=True)
        installed = (clone / ".venv" / ".installed").stat().st_mtime
        return {
            INSTALLED: minutes(installed),
            DEMO: minutes(races[0]),
            TESTS: minutes(time.time()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measured", nargs=2, type=float, metavar=("DEMO", "TESTS"))
    given = parser.parse_args().measured
    found = measure() if given is None else dict(zip((DEMO, TESTS), given, strict=True))
    rows = [{"what": what, "minutes": minutes} for what, minutes in found.items()]
    notes = "Minutes from the clone, nothing cached, packages from an index nearby."
    report.write("first-run", "From a fresh clone", {"Minutes": rows}, notes)


if __name__ == "__main__":
    main()
