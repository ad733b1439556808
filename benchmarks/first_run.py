"""A new user's first run, timed: clone, `make demo` to its first token, `make test` to its end.

    python benchmarks/first_run.py                      clones this repository and does all of it
    python benchmarks/first_run.py --measured 3 11.5    writes minutes taken with a watch

Both times count from the clone; the tests use what the demo has installed.
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


def measure() -> tuple[float, float]:
    """Minutes to the demo's first line of text and to the end of the tests."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PIP_NO_CACHE_DIR"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        subprocess.run(["git", "clone", "-q", str(ROOT), folder], check=True)
        demo = subprocess.Popen(
            ["make", "demo"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        first = 0.0
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("──") and not first:  # the heading of the first race
                first = time.monotonic() - started
        assert demo.wait() == 0
        assert first, "the demo printed no race"
        subprocess.run(["make", "test"], cwd=folder, env=environment, check=True)
        return first / 60, (time.monotonic() - started) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", nargs=2, type=float, metavar=("DEMO", "TESTS"))
    given = parser.parse_args().measured
    demo, tests = given if given is not None else measure()
    rows = [
        {"what": "first token of make demo", "minutes": demo},
        {"what": "end of make test", "minutes": tests},
    ]
    notes = "Minutes from the clone, nothing cached, packages from an index nearby."
    report.write("first-run", "From a fresh clone", {"Minutes": rows}, notes)


if __name__ == "__main__":
    main()
