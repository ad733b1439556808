"""Ways of decoding that can be timed against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from outrider.bench.workloads import Prompt
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. Its seed makes a sampled output the same for every contender that can."""

    prompt: list[int]
    params: SamplingParams
    prediction: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """One timed decoding of a group of prompts, all at once.

    The clock starts when every prompt has its first token: what is measured is decoding.
    """

    outputs: list[list[int]]
    seconds: float
    num_tokens: int  # emitted in these seconds
    stats: SpeculationStats | None = None  # of these seconds
    steps: list[tuple[int, float]] = field(default_factory=list)  # (tokens of the pass, seconds)


class Contender(Protocol):
    name: str
    reference: str | None  # whose output it must reproduce; None: nobody's

    def run(self, jobs: Sequence[Job]) -> Run: ...


class Ours:
    """One way of speculating (or none) on an engine that all our contenders share."""

    def __init__(self, name: str, engine: Engine, speculation: Speculation) -> None:
        self.name = name
        self.engine = engine
        self.speculation = speculation
        exact = speculation.verifier == "coupled"
        self.reference = PLAIN if exact and speculation.proposer is not None else None

    def run(self, jobs: Sequence[Job]) -> Run:
        engine = self.engine
        ids = [
            engine.add(
                job.prompt, job.params, speculation=self.speculation, prediction=job.prediction
            )
            for job in jobs
        ]
        waiting = set(ids)
        stats = SpeculationStats()
        steps: list[tuple[int, float]] = []
        started = perf_counter()
        for report in engine.run(ids):
            if waiting:
                waiting -= {event.request_id for event in report.events}
                started = perf_counter()
            else:
                stats.add_report(report)
                timing = report.timing
                took = timing.draft_s + timing.verify_s + timing.other_s
                steps.append((timing.num_tokens, took))
        seconds = perf_counter() - started
        outputs = [engine.collect(request_id).tokens for request_id in ids]
        return Run(outputs, seconds, stats.num_tokens, stats, steps)


def plain(engine: Engine) -> Ours:
    """Decoding without drafts in the same engine: what everything is compared with."""
    return Ours(PLAIN, engine, Speculation(num_draft_tokens=0))


def make_jobs(
    engine: Engine,
    prompts: Sequence[Prompt],
    max_tokens: int,
    *,
    context: int | None = None,
    seed: int = 0,
) -> list[Job]:
    """A prompt that is too long loses its beginning.

    `context`: every prompt has exactly so many tokens, with those that follow it where it is short.
    """
    room = engine.parts.scheduler.max_positions - max_tokens - 1
    if room < 1 or (context or 0) > room:
        raise ConfigError(f"{max_tokens} tokens more than the prompt do not fit the context")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    encoded = [engine.tokenizer.encode(prompt.text) for prompt in prompts]
    jobs = []
    for i, prompt in enumerate(prompts):
        tokens = encoded[i][-room:]
        if context is not None:
            tokens = [t for more in (*encoded[i:], *encoded[:i]) for t in more]
            tokens = (tokens * (1 + context // len(tokens)))[:context]
        guess = prompt.prediction
        jobs.append(
            Job(
                tokens,
                replace(params, temperature=prompt.temperature, seed=seed + i),
                engine.tokenizer.encode(guess, special=False) if guess else [],
            )
        )
    return jobs
