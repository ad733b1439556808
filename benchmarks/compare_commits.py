"""An old commit beside this tree: generation, start, import and the cost of HTTP.

    python benchmarks/compare_commits.py COMMIT [NEWER] [--rounds 12] [--only WORD] [--write]

Commits are checked out into temporary worktrees, with the kernels built there. NEWER is this tree
if it is left out; COMMIT COMMIT shows what the machine adds by itself. Each side has a worker
process that stays alive, and the two sides take turns: old, new, new, old, so that a drift of the
machine falls on both. Every ratio is of two neighbouring measurements; given are the median of all
rounds and its 95 % interval. Above 1 the newer one is better. `--only` restricts the cases to those
whose name contains WORD. A round takes about 15 seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from serving import PROMPTS, awake, bodies, outrider_server
from stream_client import ask_all

from outrider.bench.statistics import estimate

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("compare_worker.py")
DTYPES = ("bfloat16", "int8")
CHOICES = ("plain", "4", "auto")
BATCHES = {1: 192, 8: 96, 32: 64}  # sequences -> tokens of each
NUM_STREAMS, STREAM_TOKENS, STREAM_K = 8, 192, 3
NUM_WARM_UPS = 2
START = """
import json, time
began = time.perf_counter()
from outrider import LLM
imported = time.perf_counter()
LLM("bundled")
started = time.perf_counter()
print(json.dumps({"import": imported - began, "start": started - imported}))
"""


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A worktree of the commit, with its kernels built."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        subprocess.run([*git, "add", "--detach", str(tree), commit], check=True, text=True)
        try:
            build = [sys.executable, "-m", "outrider.native.build"]
            subprocess.run(build, check=True, env=environment(tree, folder), stdout=sys.stderr)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextmanager
def this_tree() -> Iterator[Path]:
    yield ROOT


def environment(tree: Path, cache: str) -> dict[str, str]:
    """Modules are compiled once, in a warm-up round, as they are where Outrider is installed."""
    return os.environ | {
        "PYTHONPATH": str(tree / "src"),
        "OUTRIDER_CACHE": cache,
        "PYTHONPYCACHEPREFIX": f"{cache}/bytecode",
        "PYTHONDONTWRITEBYTECODE": "",
    }


@dataclass
class Side:
    """One tree with its worker and its server, which is stopped while it is not asked."""

    environment: dict[str, str]
    worker: subprocess.Popen[str]
    url: str
    server: subprocess.Popen[bytes]

    def generate(self, **job: Any) -> dict[str, Any]:
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        print(json.dumps(job), file=self.worker.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self.worker.stdout.readline())
        return answer

    def start(self) -> dict[str, float]:
        """Seconds of the first import and of LLM("bundled"), in a fresh process."""
        command = [sys.executable, "-c", START]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    def stream(self, round_: int) -> tuple[float, float]:
        """Tokens per second of the engine and over HTTP, for the same requests."""
        asked = bodies(NUM_STREAMS, round_, STREAM_TOKENS)
        answer = self.generate(
            dtype="auto",
            k=str(STREAM_K),
            prompts=[body["prompt"] for body in asked],
            temperature=0.0,
            seed=0,
            max_tokens=STREAM_TOKENS,
        )
        with awake(self.server):
            over_http = ask_all(self.url, asked).rate
        return answer["tokens"] / answer["seconds"], over_http


@contextmanager
def side(tree: Path) -> Iterator[Side]:
    with ExitStack() as stack:
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        own = environment(tree, cache)
        worker = stack.enter_context(
            subprocess.Popen(
                [sys.executable, str(WORKER)],
                env=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.enter_context(changed(own))
        url, server = stack.enter_context(outrider_server("bundled", "-k", str(STREAM_K)))
        with awake(server):
            pass  # and stopped from here on
        yield Side(own, worker, url, server)


@contextmanager
def changed(wanted: dict[str, str]) -> Iterator[None]:
    """This process's environment, which the processes it starts inherit."""
    before = dict(os.environ)
    os.environ.update(wanted)
    yield
    os.environ.clear()
    os.environ.update(before)


# A case measures one side in one round: names -> figures that are better when larger.
Case = Callable[[Side, int], dict[str, float]]


def generation(dtype: str, k: str, batch: int, digests: dict[tuple[int, str], set[str]]) -> Case:
    label = "plain" if k == "plain" else f"draft-model K={k}"
    name = f"{label}, {dtype}, batch {batch}"

    def measure(one: Side, round_: int) -> dict[str, float]:
        answer = one.generate(
            dtype=dtype,
            k=k,
            prompts=[f"# {round_}.{i}\n{PROMPTS[i % len(PROMPTS)]}" for i in range(batch)],
            temperature=0.7,
            seed=round_ + NUM_WARM_UPS,
            max_tokens=BATCHES[batch],
        )
        digests[round_, name].add(answer["digest"])
        return {name: answer["tokens"] / answer["seconds"]}

    return measure


def start(one: Side, round_: int) -> dict[str, float]:
    found = one.start()
    return {
        "from outrider import LLM": 1 / found["import"],
        'LLM("bundled"), costs in the cache': 1 / found["start"],
        "both": 1 / (found["import"] + found["start"]),
    }


def served(one: Side, round_: int) -> dict[str, float]:
    engine, over_http = one.stream(round_)
    return {
        f"HTTP tokens/s, {NUM_STREAMS} streams": over_http,
        f"HTTP over engine, {NUM_STREAMS} streams": over_http / engine,
    }


def compare(old: Side, new: Side, cases: list[Case], rounds: int) -> dict[str, list[float]]:
    """New over old for every figure, by round; the warm-up rounds are left out."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for round_ in range(-NUM_WARM_UPS, rounds):
        print(f"round {round_ + 1} of {rounds}", file=sys.stderr)
        for case in cases:
            order = (new, old) if round_ % 2 else (old, new)
            found = {one is new: case(one, round_) for one in order}
            for name, figure in found[True].items():
                if round_ >= 0:
                    ratios[name].append(figure / found[False][name])
    return ratios


def all_cases(only: str) -> tuple[list[Case], dict[tuple[int, str], set[str]]]:
    digests: dict[tuple[int, str], set[str]] = defaultdict(set)
    named: list[tuple[str, Case]] = [
        (f"{dtype} {k} batch {batch}", generation(dtype, k, batch, digests))
        for dtype in DTYPES
        for batch in BATCHES
        for k in CHOICES
    ]
    named += [("start import", start), ("http", served)]
    return [case for name, case in named if only in name], digests


def rows(ratios: dict[str, list[float]]) -> list[dict[str, Any]]:
    found = []
    for name, values in ratios.items():
        ratio = estimate(values)
        found.append(
            {
                "measured": name,
                "new over old": f"{ratio.value:.3f}",
                "95 % interval": f"{ratio.low:.3f} to {ratio.high:.3f}",
                "rounds": len(values),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("commit", help="the old commit")
    parser.add_argument("newer", nargs="?", help="another commit; left out: this tree")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this in their name")
    parser.add_argument("--write", action="store_true", help="keep the result as house-compare")
    report.add_out(parser)
    options = parser.parse_args()
    cases, digests = all_cases(options.only)
    newer = checkout(options.newer) if options.newer else this_tree()
    with checkout(options.commit) as tree, newer as other, side(tree) as old, side(other) as new:
        table = rows(compare(old, new, cases, options.rounds))
    different = sorted({name for (_, name), found in digests.items() if len(found) > 1})
    notes = (
        f"{options.newer or 'This tree'} over {options.commit}; above 1 the newer one is better. "
    )
    notes += f"Different tokens: {', '.join(different)}." if different else "All tokens are equal."
    if options.write:
        title = "This tree beside an older commit"
        report.write("house-compare", title, {"Ratios": table}, notes, options.out)
        return
    print(notes)
    for row in table:
        print("  ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
