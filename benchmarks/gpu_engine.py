"""Times the engine on a GPU with any pair of models: one stream and batches.

Compares the outputs with plain decoding's. The other benchmarks for GPUs use it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

BATCHES = (1, 4, 16, 64)
PLAIN = Speculation(num_draft_tokens=0)

Prompt = list[int]
STARTED = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f}]", *words, flush=True)


@dataclass
class Run:
    """`rate`: tokens per second while all sequences decoded, drafters' prompt passes included."""

    outputs: list[list[int]]
    rate: float
    stats: SpeculationStats

    @property
    def drafts_per_step(self) -> float:
        return self.stats.num_drafted / max(1, self.stats.num_steps)


def decode(
    made: Engine,
    prompts: Sequence[Prompt],
    speculation: Speculation,
    *,
    max_tokens: int,
    temperature: float = 0.0,
) -> Run:
    """All prompts at once; no model and no proposer knows them from an earlier run."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=True)
    salt = fresh_salt()
    requests = [made.add(p, params, speculation=speculation, salt=salt) for p in prompts]
    begun: set[str] = set()
    start = stop = 0.0
    count = 0
    for step in made.run(requests):
        if len(begun) == len(prompts) and not stop:
            count += sum(len(event.tokens) for event in step.events)
            if any(event.finish_reason for event in step.events):
                stop = time.perf_counter()
        elif len(begun) < len(prompts):
            begun |= {event.request_id for event in step.events}
            start = time.perf_counter()
    results = [made.collect(request) for request in requests]
    stats = SpeculationStats()
    for result in results:
        stats.merge(result.stats)
    return Run([result.tokens for result in results], count / (stop - start), stats)


def same_as_plain(
    made: Engine, prompts: Sequence[Prompt], plain: Run, other: Run
) -> dict[str, Any]:
    """How many sequences are plain decoding's, and how close the call was where they part."""
    margins = []
    for prompt, ours, theirs in zip(prompts, plain.outputs, other.outputs, strict=True):
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            margins.append(_margin(made, prompt + ours[:at]))
    equal = len(prompts) - len(margins)
    return {
        "sequences as plain": f"{equal} of {len(prompts)}",
        "largest margin where they part": max(margins) if margins else "-",
    }


def _margin(made: Engine, tokens: Prompt) -> float:
    """Log-probability of the first choice minus that of the second."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2, ignore_eos=True)
    request = made.add(tokens, params, speculation=PLAIN)
    for _ in made.run([request]):
        pass
    [entry] = made.collect(request).completions[0].logprobs or []
    first, second = sorted(entry.top.values(), reverse=True)[:2]
    return first - second


def one_stream(
    made: Engine,
    prompts: Sequence[Prompt],
    max_tokens: int,
    drafts: Sequence[int],
    *,
    warm_up: bool = True,
) -> list[dict[str, Any]]:
    """One sequence at a time, by temperature and K, in turns: the engine's proposer and plain."""
    rows = []
    kinds: dict[str, Speculation] = {"0": PLAIN}
    kinds |= {str(k): replace(made.default, num_draft_tokens=k) for k in drafts}
    if made.default.num_draft_tokens == "auto":
        kinds["auto"] = made.default
    for temperature in (0.0, 1.0):
        write = partial(decode, made, max_tokens=max_tokens, temperature=temperature)
        for prompt in prompts[:2] if warm_up else ():
            for speculation in kinds.values():
                write([prompt], speculation)
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for prompt in prompts:
            for kind, speculation in kinds.items():
                runs[kind].append(write([prompt], speculation))
        plain = runs["0"]
        for kind, found in runs.items():
            ratios = [a.rate / b.rate for a, b in zip(found, plain, strict=True)]
            equal = sum(a.outputs == b.outputs for a, b in zip(found, plain, strict=True))
            steps = sum(run.stats.num_steps for run in found)
            rows.append({
                "temperature": temperature, "K": kind,
                "tokens/s": statistics.median(run.rate for run in found),
                "over plain": statistics.median(ratios),
                "drafts a step": sum(run.stats.num_drafted for run in found) / steps,
                "tokens a step": sum(run.stats.num_tokens for run in found) / steps,
                "outputs as plain": f"{equal} of {len(found)}",
            })  # fmt: skip
            say(rows[-1])
    return rows


def auto_rows(
    made: Engine,
    prompts: Callable[[int], Sequence[Prompt]],
    *,
    max_tokens: int,
    rounds: int = 3,
) -> list[dict[str, Any]]:
    """`auto` against plain decoding, in turns, in the same engine."""
    rows = []
    kinds = {"plain": PLAIN, "auto": made.default}
    for size in BATCHES:
        some = prompts(size)
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for _ in range(rounds + 1):  # the first warms up
            for kind, speculation in kinds.items():
                run = decode(made, some, speculation, max_tokens=max_tokens)
                runs[kind].append(run)
        plain, auto = ([run.rate for run in runs[kind][1:]] for kind in kinds)
        ratios = [b / a for a, b in zip(plain, auto, strict=True)]
        rows.append({
            "batch": size, "plain tokens/s": statistics.median(plain),
            "auto tokens/s": statistics.median(auto),
            "auto over plain": statistics.median(ratios),
            "each round": ", ".join(f"{ratio:.3f}" for ratio in ratios),
            "drafts a step": runs["auto"][-1].drafts_per_step,
            **same_as_plain(made, some, runs["plain"][-1], runs["auto"][-1]),
        })  # fmt: skip
        say(rows[-1])
    return rows
