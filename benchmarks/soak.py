"""A server under a mixed load for a long time: what it holds must not grow.

    make soak                                   20 minutes on the bundled family
    python benchmarks/soak.py --seconds 60      shorter

One request in ten is left in the middle. Every few seconds memory and open files of the server
are read, and a fixed greedy question must get the answer it got at the start. Fails (exit code
1) if the second half needs more than the first, if anything is left running, or on any 5xx.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import report
from serving import PROMPTS, median, outrider_server

PROBE = {"prompt": "def probe(", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
NUM_CLIENTS = 8
MAX_GROWTH = 0.03  # of the memory, from the first half to the second, once warm


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def wish(draw: random.Random) -> dict[str, Any]:
    """One of everything: lengths, sampling, proposers, structure, streams and mistakes."""
    body: dict[str, Any] = {
        "prompt": "\n\n".join(draw.sample(PROMPTS, draw.randint(1, 3))),
        "max_tokens": draw.randint(1, 64),
        "temperature": draw.choice([0, 0.7, 1.0]),
        "n": draw.choice([1, 1, 1, 3]),
        "stream": draw.random() < 0.6,
    }
    body |= draw.choice(
        [
            {},
            {},
            {"speculation": {"off": True}},
            {"speculation": {"proposer": "ngram"}},
            {"speculation": {"proposer": "suffix", "num_draft_tokens": 6}},
            {"structured_outputs": {"regex": f"[a-z]{{3,{draw.randint(4, 20)}}}"}},
            {"logprobs": 3, "echo": True},
            {"stop": ["\n"]},
            {"max_tokens": -1},  # a mistake: 400
        ]
    )
    return body


class Soak:
    def __init__(self, url: str, pid: int, seed: int) -> None:
        self.url, self.pid = url, pid
        self.draw = random.Random(seed)
        self.statuses: dict[str, int] = {}
        self.samples: list[tuple[float, float, int]] = []  # seconds, MB, files

    def count(self, what: object) -> None:
        self.statuses[str(what)] = self.statuses.get(str(what), 0) + 1

    async def client(self, until: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            while time.monotonic() < until:
                leaves = self.draw.random() < 0.1
                try:
                    async with asyncio.timeout(self.draw.random() * 0.2 if leaves else 60):
                        response = await client.post("/v1/completions", json=wish(self.draw))
                    self.count(response.status_code)
                except TimeoutError:
                    self.count("left" if leaves else "timed out")

    async def watch(self, until: float, every_s: float) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            expected = await self.probe(client)
            started = time.monotonic()
            while time.monotonic() < until:
                await asyncio.sleep(every_s)
                if await self.probe(client) != expected:
                    self.count("changed answers")
                now = time.monotonic() - started
                self.samples.append((now, resident_mb(self.pid), open_files(self.pid)))

    @staticmethod
    async def probe(client: httpx.AsyncClient) -> str:
        found: str = (await client.post("/v1/completions", json=PROBE)).json()["choices"][0]["text"]
        return found

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        clients = (self.client(until) for _ in range(NUM_CLIENTS))
        await asyncio.gather(*clients, self.watch(until, min(5.0, seconds / 24)))

    def left_over(self) -> list[str]:
        """What still shows in /metrics a moment after the last client has gone."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for _ in range(50):
            lines = httpx.get(f"{self.url}/metrics").text.splitlines()
            found = [line for line in lines if line.startswith(tuple(f"vllm:{n}" for n in names))]
            busy = [line for line in found if float(line.rsplit(" ", 1)[1])]
            if not busy:
                return []
            time.sleep(0.1)
        return busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write results/soak")
    parser.add_argument("serve", nargs="*", help="further arguments of outrider serve")
    asked = parser.parse_args()
    with outrider_server(asked.model, *asked.serve) as (url, process):
        files_before = open_files(process.pid)
        soak = Soak(url, process.pid, asked.seed)
        asyncio.run(soak.run(asked.seconds))
        left_over = soak.left_over()
        files_after = open_files(process.pid)
    # The first quarter warms up: caches fill, allocators settle.
    warm = soak.samples[len(soak.samples) // 4 :]
    half = len(warm) // 2
    first, second = (median([mb for _, mb, _ in part]) for part in (warm[:half], warm[half:]))
    rows = [
        {
            "seconds": asked.seconds,
            "requests": sum(soak.statuses.values()),
            "left in the middle": soak.statuses.get("left", 0),
            "MB first half": round(first, 1),
            "MB second half": round(second, 1),
            "growth": f"{second / first - 1:+.2%}",
            "files before": files_before,
            "files after": files_after,
        }
    ]
    failures = [f"{what}: {n}" for what, n in soak.statuses.items() if what not in GOOD]
    failures += left_over
    if second > first * (1 + MAX_GROWTH):
        failures.append(f"memory grew from {first:.1f} to {second:.1f} MB")
    if files_after > files_before + 2:
        failures.append(f"{files_before} open files became {files_after}")
    print(rows[0], soak.statuses)
    if asked.write:
        answers = [{"answer": what, "count": n} for what, n in sorted(soak.statuses.items())]
        memory = [
            {"s": round(s), "MB": round(mb, 1), "files": n} for s, mb, n in soak.samples[::12]
        ]
        tables = {"Soak": rows, "Answers": answers, "Over time": memory}
        report.write("soak", f"Soak: {NUM_CLIENTS} clients, one request in ten abandoned", tables)
    if failures:
        sys.exit("soak failed: " + "; ".join(failures))


GOOD = {"200", "400", "left"}

if __name__ == "__main__":
    main()
