"""What the memory of an idle server costs its first request.

    python benchmarks/first_request.py [--rounds 10] [--write]

Two servers of the bundled model take turns, each started afresh: one as it is, which allocates a
little of its KV memory ahead, and one that allocates all of it while it is idle. Both settle, then
answer one greedy request without drafts, then the same again. The ratios are of
neighbouring starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import report

PORT = 8766
URL = f"http://127.0.0.1:{PORT}"
ALL = "import outrider.server.memory as memory; memory.AHEAD = 1 << 62; memory.LEFT = 0; "
START = "import sys; from outrider.cli import main; sys.argv[0] = 'outrider'; sys.exit(main())"
PROMPT = "def quick_sort(values):\n    if len(values) < 2:\n        return values\n" * 8


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def settled_mb(pid: int) -> float:
    """The memory once it has not grown for a second."""
    last, since, end = 0.0, time.monotonic(), time.monotonic() + 60
    while time.monotonic() < end and time.monotonic() - since < 1:
        now = resident_mb(pid)
        if abs(now - last) > 1:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    return last


def answer_s(client: httpx.Client) -> float:
    body = {
        "prompt": PROMPT,
        "max_tokens": 256,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": str(time.time_ns()),
        "speculation": {"off": True},
    }
    started = time.perf_counter()
    client.post("/v1/completions", json=body).raise_for_status()
    return time.perf_counter() - started


def start(ahead: str) -> tuple[float, float, float]:
    """Memory of the idle server, and seconds of the first and of the second request."""
    command = [sys.executable, "-c", ahead + START, "serve", "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            with httpx.Client(base_url=URL, timeout=60) as client:
                wait(client)
                return settled_mb(server.pid), answer_s(client), answer_s(client)
        finally:
            server.terminate()


def wait(client: httpx.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true")
    report.add_out(parser)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {"": [], ALL: []}
    for i in range(given.rounds):
        for ahead in ("", ALL) if i % 2 == 0 else (ALL, ""):
            found[ahead].append(start(ahead))
    rows: list[dict[str, Any]] = []
    for name, ahead in (("as it is", ""), ("all KV memory ahead", ALL)):
        memory, first, second = (median(column) for column in zip(*found[ahead], strict=True))
        rows.append(
            {
                "server": name,
                "idle MB": memory,
                "first request s": first,
                "second request s": second,
            }
        )
    ratios = sorted(mine[1] / other[1] for mine, other in zip(found[""], found[ALL], strict=True))
    quarter = len(ratios) // 4
    notes = (
        f"{given.rounds} rounds of two fresh servers; medians. The first request as it is takes "
        f"{median(ratios):.3f} of the time with all memory ahead (quartiles "
        f"{ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f})."
    )
    if given.write:
        title = "An idle server's memory"
        report.write("first-request", title, {"Servers": rows}, notes, given.out)
    else:
        print(rows, notes)


if __name__ == "__main__":
    main()
