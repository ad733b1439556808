"""Throughput against latency of our server, with and without speculation: the front's figures.

python benchmarks/serve_front.py [--clients 1,2,4,8,16] [-o FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from serving import outrider_server

from outrider.bench.serve import bench_server
from outrider.bench.workloads import load_workload
from outrider.options import read_numbers

RESULTS = Path(__file__).parent / "results"
NAMES = {"the server": "auto", "plain": "plain"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", default="1,2,4,8,16")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "serve-front")
    options = parser.parse_args()
    counts = [int(n) for n in read_numbers(options.clients, "--clients")]
    work = load_workload("code", options.prompts)
    with outrider_server("bundled") as (url, _):
        title = "Serving the bundled pair: throughput against latency"
        found = bench_server(url, work, counts, options.tokens, None, title)
    found.settings.pop("server")  # a port that happened to be free
    for row in found.rows:
        row["contender"] = NAMES[row["contender"]]
    print(found.markdown())
    found.write(options.out)


if __name__ == "__main__":
    main()
