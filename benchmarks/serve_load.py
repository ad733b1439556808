"""The server under 1 to 32 concurrent streams: speculation auto against off, and against vLLM.

    python benchmarks/serve_load.py --vllm ~/vllm/bin/python --write

All contestants are up during the whole run and take turns, cell by cell, with the same prompts
(whoever waits is stopped); figures are medians over the rounds. `auto` and `off` are the same
server, told by the request's own `speculation` field. Besides: what the server costs over the
bare engine, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import report
from serving import (
    PROMPTS,
    TARGET,
    Answer,
    awake,
    median,
    outrider_server,
    quantile,
    together,
    vllm_server,
)

from outrider.engine.build import EngineConfig, build
from outrider.sampling import SamplingParams

VLLM_DRAFT = '{"method": "draft_model", "model": "%s", "num_speculative_tokens": 4}' % (
    TARGET.parent / "draft"
)
Process = subprocess.Popen[bytes]
Cell = tuple[float, list[Answer]]  # seconds and answers of all streams


def bodies(num_streams: int, round_: int, max_tokens: int) -> list[dict[str, Any]]:
    """Every stream and round has a prompt of its own: no prefix cache can help."""
    return [
        {
            "prompt": f"# {round_}.{num_streams}.{i}\n" + PROMPTS[i % len(PROMPTS)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for i in range(num_streams)
    ]


class Contestant:
    def __init__(self, name: str, url: str, process: Process, **more: Any) -> None:
        self.name, self._url, self._process, self._more = name, url, process, more
        self.cells: dict[int, list[Cell]] = {}
        self.texts: dict[tuple[int, int], list[str]] = {}

    def run(self, num_streams: int, round_: int, max_tokens: int) -> None:
        asked = [body | self._more for body in bodies(num_streams, round_, max_tokens)]
        gc.collect()
        with awake(self._process):
            seconds, answers = asyncio.run(together(self._url, asked))
        self.cells.setdefault(num_streams, []).append((seconds, answers))
        self.texts[num_streams, round_] = [answer.text for answer in answers]

    def rates(self, num_streams: int) -> list[float]:
        """Tokens per second, round by round."""
        cells = self.cells[num_streams]
        return [sum(a.num_tokens for a in answers) / seconds for seconds, answers in cells]

    def row(self, num_streams: int) -> dict[str, Any]:
        answers = [answer for _, cell in self.cells[num_streams] for answer in cell]
        row: dict[str, Any] = {
            "streams": num_streams,
            "server": self.name,
            "tokens/s": round(median(self.rates(num_streams)), 1),
        }
        for name, values in (
            ("TTFT", [answer.ttft_s for answer in answers]),
            ("TPOT", [answer.tpot_s for answer in answers]),
        ):
            for q in (0.5, 0.9, 0.99):
                row[f"{name} p{q * 100:.0f} ms"] = round(quantile(values, q) * 1e3, 2)
        return row


def ratios(ours: Contestant, other: Contestant, num_streams: int) -> float:
    """The median of the ratios inside each round both were in: a busy moment falls on both."""
    theirs = other.rates(num_streams)
    pairs = zip(ours.rates(num_streams)[-len(theirs) :], theirs, strict=True)
    return median([a / b for a, b in pairs])


def compare(contestants: list[Contestant], streams: list[int]) -> list[dict[str, Any]]:
    auto, off, *others = contestants
    rows = []
    for n in streams:
        row: dict[str, Any] = {"streams": n, "auto / off": round(ratios(auto, off, n), 3)}
        for other in others:
            row[f"auto / {other.name}"] = round(ratios(auto, other, n), 2)
        rounds = [key for key in auto.texts if key[0] == n]
        row["auto's text is off's"] = all(auto.texts[key] == off.texts[key] for key in rounds)
        rows.append(row)
    return rows


def bare_engine(max_tokens: int, wish: str) -> Callable[[int, int], float]:
    """The engine alone, in this process: tokens per second for the same prompts."""
    engine = build(EngineConfig(num_draft_tokens="auto" if wish == "auto" else 0))

    def run(num_streams: int, round_: int) -> float:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        prompts = [body["prompt"] for body in bodies(num_streams, round_, max_tokens)]
        gc.collect()
        started = time.perf_counter()
        ids = [engine.add(prompt, params) for prompt in prompts]
        for _ in engine.run(ids):
            pass
        num_tokens = sum(len(engine.collect(i).tokens) for i in ids)
        return num_tokens / (time.perf_counter() - started)

    return run


def overhead(
    contestants: list[Contestant], rounds: int, max_tokens: int, num_streams: int
) -> list[dict[str, Any]]:
    rows = []
    for contestant, wish in zip(contestants, ("auto", "off"), strict=True):
        engine = bare_engine(max_tokens, wish)
        engine(num_streams, -1)
        found: list[tuple[float, float]] = []
        for round_ in range(100, 100 + rounds):
            contestant.run(num_streams, round_, max_tokens)
            found.append((engine(num_streams, round_), contestant.rates(num_streams)[-1]))
        rows.append(
            {
                "speculation": wish,
                "streams": num_streams,
                "engine tokens/s": round(median([bare for bare, _ in found]), 1),
                "server tokens/s": round(median([served for _, served in found]), 1),
                "overhead": f"{median([bare / served for bare, served in found]) - 1:.1%}",
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=300, help="no round with vLLM after that")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--write", action="store_true", help="write results/serve_load")
    asked = parser.parse_args()
    with ExitStack() as stack:
        url, process = stack.enter_context(outrider_server("bundled"))

        def servings() -> list[Contestant]:
            return [
                Contestant("outrider auto", url, process),
                Contestant("outrider off", url, process, speculation={"off": True}),
            ]

        contestants = servings()
        warm_up(contestants)
        num_rounds = 0

        def play() -> None:
            nonlocal num_rounds
            for n in asked.streams:
                for contestant in contestants:
                    contestant.run(n, num_rounds, asked.max_tokens)
            num_rounds += 1
            publish(contestants, costs, asked)  # a long run that is cut short was not in vain

        costs: list[dict[str, Any]] = []
        for _ in range(asked.rounds):
            play()
        costs = overhead(servings(), asked.rounds + 1, 2 * asked.max_tokens, 8)
        publish(contestants, costs, asked)
        if asked.vllm is not None:
            contestants += rivals(stack, asked.vllm)
            started = time.monotonic()
            for _ in range(asked.rounds):
                if time.monotonic() - started < asked.budget_s:
                    play()


def warm_up(contestants: list[Contestant]) -> None:
    for contestant in contestants:
        for n in (1, 8):
            contestant.run(n, -1, 16)
        contestant.cells.clear()
        contestant.texts.clear()


def rivals(stack: ExitStack, python: Path) -> list[Contestant]:
    """vLLM plain and with the bundled draft model; without what does not start."""
    found = []
    for name, args in (
        ("vLLM plain", []),
        ("vLLM draft model", ["--speculative-config", VLLM_DRAFT]),
    ):
        try:
            url, process = stack.enter_context(vllm_server(python, TARGET, *args))
            contestant = Contestant(name, url, process)
            warm_up([contestant])
            found.append(contestant)
        except (SystemExit, RuntimeError, OSError) as error:
            print(f"without {name}: {error}")
    return found


def publish(
    contestants: list[Contestant], costs: list[dict[str, Any]], asked: argparse.Namespace
) -> None:
    tables = {"Ratios, medians of rounds": compare(contestants, asked.streams)}
    if costs:
        tables["Server over engine"] = costs
    tables["Every contestant"] = [c.row(n) for n in asked.streams for c in contestants]
    if not asked.write:
        for heading, table in tables.items():
            print(heading, *table, sep="\n")
        return
    notes = (
        f"Greedy, {asked.max_tokens} tokens a stream, the bundled 25M target. Rounds come in two "
        "parts, first without and then with vLLM; ratios are taken inside rounds. The client runs "
        "on the same cores. TPOT: time per token after the first."
    )
    report.write("serve_load", "Concurrent streams", tables, notes)


if __name__ == "__main__":
    main()
