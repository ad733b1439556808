"""Ways of decoding that can be timed against each other."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, cycle
from time import perf_counter
from typing import Protocol

from outrider.bench.workloads import Prompt
from outrider.contracts import ControlledView
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.engine.ahead import Ahead
from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Sequence as Sequence_
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.events import StepReport
from outrider.policy.base import Decision, Policy
from outrider.policy.fixed import FixedPolicy
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
    """One timed decoding of some prompts, so many at once.

    What is measured is decoding: the clock stands still while a prompt is read, by the target and
    by who drafts for it, up to a step behind the first token. Until then at most one token is
    drafted, so that the output is not there already. And it is decoding of a whole batch: ours puts
    the next prompt in the place of an output that ends, in the end one that it has had before.
    """

    outputs: list[list[int]]
    seconds: float
    num_tokens: int  # emitted in these seconds
    stats: SpeculationStats | None = None  # of these seconds
    steps: list[tuple[int, float]] = field(default_factory=list)  # (tokens of the pass, seconds)


class Contender(Protocol):
    name: str
    reference: str | None  # whose output it must reproduce; None: nobody's

    def run(self, jobs: Sequence[Job], batch: int = 1) -> Run: ...


class Ours:
    """One way of speculating (or none) on an engine that all our contenders share.

    Whoever adapts has a controller of its own (None: the engine's): it learns from its own steps.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        speculation: Speculation,
        controller: Policy | None = None,
    ) -> None:
        self.name = name
        self.engine = engine
        self.speculation = speculation
        self.controller = controller or engine.policy
        exact = speculation.verifier == "coupled"
        self.reference = PLAIN if exact and speculation.proposer is not None else None

    def start(self, jobs: Sequence[Job], batch: int = 1) -> Lane:
        """Reads the prompts of the first batch; the rest is for the caller to drive."""
        return Lane(self, jobs, batch)

    def run(self, jobs: Sequence[Job], batch: int = 1) -> Run:
        return race([self.start(jobs, batch)])[0]


class Reading(FixedPolicy):
    """While prompts are read: a step drafts `most` tokens at most."""

    most = 0

    def decide(self, views: Sequence[ControlledView], limits: Sequence[int], _: int) -> Decision:
        return super().decide(views, [min(limit, self.most) for limit in limits], _)


class Lane:
    """Some requests that move when they are told to; meanwhile the engine serves other lanes.

    `batch` of them decode at any time. Its sequences keep their place in the KV cache, but are
    scheduled in its own steps only. A prompt never runs twice under one salt: no lane and no repeat
    drafts from an earlier output of the same prompt. Different prompts of one lane share a salt, as
    the requests of one tenant do.
    """

    def __init__(self, contender: Ours, jobs: Sequence[Job], batch: int = 1) -> None:
        self._engine = contender.engine
        self._speculation = contender.speculation
        self._batch = batch
        self._running: list[Sequence_] = []
        self._waiting: deque[Sequence_] = deque()
        self._stats = SpeculationStats()
        self.steps: list[tuple[int, float]] = []  # (tokens of the pass, seconds)
        self._reports: deque[tuple[StepReport, float]] = deque()
        self._most_tokens = sum(job.params.max_tokens for job in jobs)
        self._num_before = 0
        self._next = chain(jobs, cycle(jobs))
        self._num_jobs = len(jobs)
        self._salt = fresh_salt()
        self._num_runs: Counter[tuple[int, ...]] = Counter()  # of each prompt
        self._ids: list[str] = []  # the first are the jobs', the others only fill the batch
        self._controller: Policy = contender.controller
        self._ahead = Ahead(self._engine.ahead.most_steps)
        self._fill_up()

    def _fill_up(self) -> None:
        """Reads prompts until the batch is whole; nobody else moves meanwhile."""
        while not self._is_done and len(self._running) < self._batch:
            others, controller, ahead = self._running, self._controller, self._ahead
            self._running, self._controller = [], (reading := Reading())
            self._ahead = Ahead()  # nothing that is timed later may be computed before
            with self._on_stage():
                waiting = {self._add() for _ in range(self._batch - len(others))}
            while waiting:
                report, _ = self._step()
                waiting -= {event.request_id for event in report.events}
            if self._running:
                reading.most = 1
                self._step()  # draft models read the prompt behind its first token
            self._num_before += sum(len(s.output) for s in self._running)
            self._running = others + self._running
            self._controller, self._ahead = controller, ahead

    def _add(self) -> str:
        job = next(self._next)
        prompt = tuple(job.prompt)
        self._num_runs[prompt] += 1
        self._ids.append(
            self._engine.add(
                job.prompt,
                job.params,
                speculation=self._speculation,
                prediction=job.prediction,
                salt=f"{self._salt} {self._num_runs[prompt]}",
            )
        )
        return self._ids[-1]

    @property
    def _is_done(self) -> bool:
        """Whether all jobs are."""
        ids = self._ids[: self._num_jobs]
        return len(ids) == self._num_jobs and all(map(self._engine.is_finished, ids))

    @property
    def is_finished(self) -> bool:
        return not self._reports and self._is_done

    @property
    def progress(self) -> float:
        """The share of its tokens that is there."""
        return (self._num_before + self._stats.num_tokens) / self._most_tokens

    def step(self) -> StepReport:
        """Steps computed in one go have taken the same time each."""
        if not self._reports:
            found = [self._step()]
            while not self._ahead.is_empty:
                found.append(self._step())
            mean_s = sum(took for _, took in found) / len(found)
            self._reports.extend((report, mean_s) for report, _ in found)
            self._fill_up()
        report, took = self._reports.popleft()
        self._stats.add_report(report)
        self.steps.append((report.timing.num_tokens, took))
        return report

    def finish(self) -> Run:
        with self._on_stage():
            for request_id in self._ids[self._num_jobs :]:
                self._engine.cancel(request_id)
        results = [self._engine.collect(request_id) for request_id in self._ids]
        outputs = [result.tokens for result in results[: self._num_jobs]]
        seconds = sum(took for _, took in self.steps)
        return Run(outputs, seconds, self._stats.num_tokens, self._stats, self.steps)

    def _step(self) -> tuple[StepReport, float]:
        with self._on_stage():
            started = perf_counter()
            report = self._engine.step()
            took = perf_counter() - started
        assert report is not None
        for failure in report.failures.values():
            raise failure
        return report, took

    @contextmanager
    def _on_stage(self) -> Iterator[None]:
        engine = self._engine
        scheduler = engine.scheduler
        before = scheduler.running, scheduler.waiting, engine.policy, engine.ahead
        scheduler.running, scheduler.waiting = self._running, self._waiting
        engine.policy, engine.ahead = self._controller, self._ahead
        try:
            yield
        finally:
            self._running, self._waiting = scheduler.running, scheduler.waiting
            scheduler.running, scheduler.waiting, engine.policy, engine.ahead = before


def take_turns(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, StepReport]]:
    """Steps all lanes to their ends, whoever is furthest behind first.

    A busy moment of the machine then falls on all of them.
    """
    moving = list(lanes)
    while moving := [lane for lane in moving if not lane.is_finished]:
        lane = min(moving, key=lambda lane: lane.progress)
        yield lane, lane.step()


def race(lanes: Sequence[Lane]) -> list[Run]:
    """Seconds are those of a lane's own steps."""
    for _ in take_turns(lanes):
        pass
    return [lane.finish() for lane in lanes]


def fit_together(contenders: Sequence[Contender], jobs: Sequence[Job], batch: int = 1) -> bool:
    """Whether all can decode so many of these at once: one engine, room for everybody's K/V."""
    engines = {id(c.engine) if isinstance(c, Ours) else None for c in contenders}
    if len(engines) != 1 or None in engines:
        return False
    [engine] = {id(c.engine): c.engine for c in contenders if isinstance(c, Ours)}.values()
    kv = engine.kv
    sizes = sorted(
        2 + (len(job.prompt) + job.params.max_tokens + MAX_AUTO_DRAFT_TOKENS) // kv.block_size
        for job in jobs
    )
    return sum(sizes[-batch:]) * len(contenders) <= kv.num_blocks


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
    room = engine.scheduler.max_positions - max_tokens - 1
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
