"""The server under 1 to 32 concurrent streams: speculation auto against off, and against vLLM.

    make load                              our own server
    make load VLLM=~/vllm/bin/python       and vLLM, plain and with the draft model

Contestants take turns, cell by cell; the servers that wait are stopped. A stream asks for its next
completion at once, over the same connection. In a round each contestant has every cell twice, the
second time in reverse order, so that a machine that slows down does so for all. Figures are medians
over the rounds, ratios are taken inside a round. `auto` and `off` are the same server; the
request's `speculation` field chooses. We run two servers, one in bfloat16, as the bundled models
are stored, and one with `--dtype float32`; each is compared with vLLM in the same arithmetic. The
cost of HTTP over the engine is measured as well (`serve_overhead.py`). The result file is written
after every part, so that a run that is cut short leaves its results.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import report
import serve_overhead
from serving import TARGET, awake, bodies, median, outrider_server, quantile, vllm_server
from stream_client import Load, ask_all

Rows = list[dict[str, Any]]
DTYPES = ("bfloat16", "float32")  # the first is what our server and vLLM take by themselves
EACH = 4  # completions of every stream, one after the other
VLLM_DRAFT = json.dumps(
    {"method": "draft_model", "model": str(TARGET.parent / "draft"), "num_speculative_tokens": 4}
)


VLLM: dict[str, list[str]] = {
    "vLLM plain": [],
    "vLLM draft model": ["--speculative-config", VLLM_DRAFT],
}


class Contestant:
    def __init__(
        self, name: str, dtype: str, url: str, process: subprocess.Popen[bytes], **more: Any
    ) -> None:
        self.name, self.dtype, self._url, self._process = name, dtype, url, process
        self._more = more
        self.loads: dict[tuple[int, int], list[Load]] = {}  # by streams and round

    def run(self, num_streams: int, round_: int, max_tokens: int) -> None:
        found = self.loads.setdefault((num_streams, round_), [])
        name = f"{round_}.{len(found)}.{num_streams}"
        asked = [
            body | self._more | {"max_tokens": length(i, max_tokens)}
            for i, body in enumerate(bodies(EACH * num_streams, name, max_tokens))
        ]
        gc.collect()
        with awake(self._process):
            try:
                found.append(ask_all(self._url, asked, num_streams))
            except RuntimeError as error:
                who = f"{self.name} in {self.dtype}, {num_streams} streams: {error}"
                if self.name not in VLLM:
                    raise RuntimeError(who) from error
                print(f"{who}; once more", file=sys.stderr)
                found.append(ask_all(self._url, asked, num_streams))

    def rounds(self, num_streams: int) -> list[int]:
        return [round_ for n, round_ in self.loads if n == num_streams]

    def rate(self, num_streams: int, round_: int) -> float:
        loads = self.loads[num_streams, round_]
        return len(loads) / sum(1.0 / load.rate for load in loads)

    def texts(self, num_streams: int, round_: int) -> list[str]:
        loads = self.loads[num_streams, round_]
        return [answer.text for load in loads for answer in load.answers]

    def row(self, num_streams: int) -> dict[str, Any]:
        rounds = self.rounds(num_streams)
        loads = [load for round_ in rounds for load in self.loads[num_streams, round_]]
        answers = [answer for load in loads for answer in load.answers]
        row: dict[str, Any] = {
            "streams": num_streams,
            "server": self.name,
            "dtype": self.dtype,
            "rounds": len(rounds),
            "tokens/s": round(median([self.rate(num_streams, r) for r in rounds]), 1),
        }
        for name, values in (
            ("TTFT", [answer.ttft_s for answer in answers]),
            ("TPOT", [answer.tpot_s for answer in answers]),
        ):
            for q in (0.5, 0.9, 0.99):
                row[f"{name} p{q * 100:.0f} ms"] = round(quantile(values, q) * 1e3, 2)
        row["client CPU"] = f"{median([load.cpu_s / load.seconds for load in loads]):.1%}"
        return row


def length(index: int, usual: int) -> int:
    """Of a completion: from two thirds to four thirds, evenly. If all were as long, a server that
    does not speculate would have all streams begin and end in step, which no real one has."""
    return round(usual * (2 + 2 * (index * 0.618034 % 1)) / 3)


def ratio(ours: Contestant, other: Contestant, num_streams: int) -> float | None:
    """The median of the ratios inside each round both were in: a busy moment falls on both."""
    common = [r for r in other.rounds(num_streams) if r in ours.rounds(num_streams)]
    found = [ours.rate(num_streams, r) / other.rate(num_streams, r) for r in common]
    return median(found) if found else None


def compare(contestants: list[Contestant], dtype: str) -> Rows:
    auto, off, *others = [c for c in contestants if c.dtype == dtype]
    rows = []
    for n in sorted({n for n, _ in auto.loads}):
        row: dict[str, Any] = {"streams": n, "auto / off": _shown(ratio(auto, off, n))}
        for other in others:
            row[f"auto / {other.name}"] = _shown(ratio(auto, other, n))
        rounds = auto.rounds(n)
        row["auto's text is off's"] = all(auto.texts(n, r) == off.texts(n, r) for r in rounds)
        rows.append(row)
    return rows


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


class Run:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.started = time.monotonic()
        self.costs: Rows = []
        self.contestants: list[Contestant] = []
        self._round = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def play(self, streams: list[int]) -> None:
        """One round of all contestants, there and back; the first one changes between rounds."""
        order = self.contestants if self._round % 2 else self.contestants[::-1]
        for n in streams:
            for contestant in [*order, *order[::-1]]:
                contestant.run(n, self._round, self.asked.max_tokens)
        self._round += 1
        self.publish()

    def publish(self) -> None:
        tables = {
            f"Ratios of tokens/s in {dtype}, medians of rounds": compare(self.contestants, dtype)
            for dtype in DTYPES
        }
        if self.costs:
            tables["HTTP over the engine"] = self.costs
        contestants = self.contestants
        streams = sorted({n for c in contestants for n, _ in c.loads})
        tables["Every contestant"] = [c.row(n) for n in streams for c in contestants if c.rounds(n)]
        if not self.asked.write:
            print(*(f"{heading}: {table}" for heading, table in tables.items()), sep="\n")
            return
        notes = (
            f"Greedy, {EACH} completions one after the other in every stream, "
            f"{length(0, self.asked.max_tokens)} to {self.asked.max_tokens * 4 // 3} tokens each, "
            "the bundled 25M target. bfloat16 is `outrider serve` as it comes, "
            "float32 with `--dtype float32`. Rounds with vLLM come after those without; in a round "
            "each contestant has every cell twice, in mirrored order, and "
            "ratios are taken inside rounds. The client runs on the same cores; `client CPU` is "
            "its share of one. TTFT: from sending a request to its "
            "first text; TPOT: time per token after the first. `HTTP over the engine`: the same "
            "requests through the same engine, bfloat16, all at once, by Engine.step, by "
            "AsyncEngine in the server's process, and by HTTP to another process."
        )
        report.write("serve-load", "Concurrent streams", tables, notes)


def warm_up(contestants: list[Contestant]) -> None:
    for contestant in contestants:
        for n in (1, 8):
            contestant.run(n, -1, 16)
        contestant.loads.clear()


def rivals(stack: ExitStack, python: Path, dtypes: list[str]) -> list[Contestant]:
    """vLLM plain and with speculation; without what does not start."""
    found = []
    for dtype, (name, args) in product(dtypes, VLLM.items()):
        try:
            server = vllm_server(python, TARGET, "--dtype", dtype, *args)
            contestant = Contestant(name, dtype, *stack.enter_context(server))
            warm_up([contestant])
            found.append(contestant)
        except (SystemExit, RuntimeError, OSError) as error:
            print(f"without {name} in {dtype}: {error}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--vllm-streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--vllm-dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--vllm-rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=1500, help="no round begins after that")
    parser.add_argument("--write", action="store_true", help="write results/serve-load")
    asked = parser.parse_args()
    run = Run(asked)
    with ExitStack() as stack:
        for dtype in DTYPES:
            args = [] if dtype == DTYPES[0] else ["--dtype", dtype]
            served = stack.enter_context(outrider_server("bundled", *args))
            time.sleep(serve_overhead.SETTLING_S)  # before the next one measures the machine
            off: dict[str, Any] = {"speculation": {"off": True}}
            run.contestants.append(Contestant("outrider auto", dtype, *served))
            run.contestants.append(Contestant("outrider off", dtype, *served, **off))
        warm_up(run.contestants)
        for _ in range(asked.rounds):
            run.play(asked.streams)
        for length in serve_overhead.LENGTHS:
            run.costs += serve_overhead.rows(8, asked.rounds, length)
        run.publish()
        if asked.vllm is not None:
            run.contestants += rivals(stack, asked.vllm, asked.vllm_dtypes)
            for _ in range(asked.vllm_rounds):
                if run.seconds < asked.budget_s:
                    run.play(asked.vllm_streams)
    print(f"{run.seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
