"""Ways of decoding, timed against each other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

from outrider.bench.workloads import Prompt
from outrider.contracts import ControlledView
from outrider.engine.engine import Engine
from outrider.engine.lane import Lane, take_turns
from outrider.engine.request import Speculation
from outrider.errors import ConfigError
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.base import Decision, Policy
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt. Its seed makes a sampled output the same for all contenders of our engine."""

    prompt: list[int]
    params: SamplingParams
    prediction: list[int] = field(default_factory=list)
    ends: Seq[int] = ()  # ids that end an output before `max_tokens`, for other programs


@dataclass(slots=True)
class Run:
    """One timed decoding of some prompts, `batch` at once.

    The clock runs during decoding only: it stops while target and drafter read a prompt, up to the
    step after its first token. Until then a step drafts at most one token, so that most of the
    output is timed. The batch is always full: when an output ends, the next prompt takes its place;
    when all have run, the first ones run again.
    """

    outputs: list[list[int]]
    seconds: float
    num_tokens: int  # emitted in these seconds
    stats: SpeculationStats | None = None  # of these seconds
    steps: list[tuple[int, float]] = field(default_factory=list)  # (tokens of the pass, seconds)


class Contender(Protocol):
    name: str
    reference: str | None  # the contender whose output it must reproduce

    def run(self, jobs: Seq[Job], batch: int = 1) -> Run: ...


class Ours:
    """One way of speculating (or none) on an engine shared by all our contenders."""

    def __init__(
        self, name: str, engine: Engine, speculation: Speculation, policy: Policy | None = None
    ) -> None:
        """`policy`: learns from this contender's steps only; None: the engine's."""
        self.name = name
        self.engine = engine
        self.speculation = speculation
        self.policy = policy
        exact = speculation.verifier == "coupled"
        self.reference = PLAIN if exact and speculation.proposer is not None else None

    def start(self, jobs: Seq[Job], batch: int = 1) -> FullBatch:
        """Adds the first batch; the caller runs its steps."""
        return FullBatch(self, jobs, batch)

    def run(self, jobs: Seq[Job], batch: int = 1) -> Run:
        return race([self.start(jobs, batch)])[0]


class Reading(FixedPolicy):
    """While prompts are read: a step drafts at most `max_drafts` tokens for each sequence."""

    max_drafts = 0

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        decision = super().decide(views, [min(k, self.max_drafts) for k in limits], num_tokens)
        decision.valid_steps = 1  # nothing that is timed later may be computed before
        return decision


class FullBatch(Lane):
    """A contender's lane that decodes `batch` jobs at any time."""

    def __init__(self, contender: Ours, jobs: Seq[Job], batch: int = 1) -> None:
        super().__init__(contender.engine, contender.policy)
        self._speculation = contender.speculation
        self._batch = batch
        self._jobs = jobs
        self._next = cycle(jobs)
        self._max_tokens = sum(job.params.max_tokens for job in jobs)
        self._num_before = 0
        self._fill_up()

    @property
    def _is_done(self) -> bool:
        """Whether all jobs are done; other sequences only fill the batch."""
        ids = self.ids[: len(self._jobs)]
        return len(ids) == len(self._jobs) and all(map(self.engine.is_finished, ids))

    @property
    def is_finished(self) -> bool:
        return not self._reports and self._is_done

    @property
    def progress(self) -> float:
        """The share of its tokens that is decoded."""
        return (self._num_before + self.stats.num_tokens) / self._max_tokens

    def _compute(self) -> None:
        super()._compute()
        self._fill_up()

    def _fill_up(self) -> None:
        """Reads prompts until the batch is full; its other sequences wait."""
        engine = self.engine
        while not self._is_done and len(engine.scheduler.running) < self._batch:
            others, policy = engine.scheduler.running, engine.policy
            engine.scheduler.running, engine.policy = [], (reading := Reading())
            waiting = {self._add_next() for _ in range(self._batch - len(others))}
            while waiting:
                report, _ = self._timed_step()
                waiting -= {event.request_id for event in report.events}
            if engine.scheduler.running:
                reading.max_drafts = 1
                self._timed_step()  # draft models read the prompt after its first token
            self._num_before += sum(len(s.output) for s in engine.scheduler.running)
            engine.scheduler.running = others + engine.scheduler.running
            engine.policy = policy

    def _add_next(self) -> str:
        job = next(self._next)
        return self.add(
            job.prompt, job.params, speculation=self._speculation, prediction=job.prediction
        )

    def finish(self) -> Run:
        self.close()
        outputs = [result.tokens for result in self.results[: len(self._jobs)]]
        return Run(outputs, self.seconds, self.stats.num_tokens, self.stats, self.steps)


def race(lanes: Seq[FullBatch]) -> list[Run]:
    """Decodes all jobs; the contender with the least progress steps next."""
    for _ in take_turns(lanes, lambda lane: lane.progress):
        pass
    return [lane.finish() for lane in lanes]


def fit_together(contenders: Seq[Contender], jobs: Seq[Job], batch: int = 1) -> bool:
    """Whether all can decode `batch` jobs at once: one engine, and K/V room for all."""
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
    """Decoding without drafts in the same engine: the base of all comparisons."""
    return Ours(PLAIN, engine, Speculation(num_draft_tokens=0))


def make_jobs(
    engine: Engine,
    prompts: Seq[Prompt],
    max_tokens: int,
    *,
    context: int | None = None,
    seed: int = 0,
) -> list[Job]:
    """The jobs of a workload; a prompt that is too long loses its beginning.

    The answer in a chat ends where the model ends it: what small models write after that repeats
    itself. Other outputs have all their tokens.
    `context`: the number of tokens of every prompt; the next prompts lengthen a short one.
    """
    room = engine.scheduler.max_positions - max_tokens - 1
    if room < 1 or (context or 0) > room:
        raise ConfigError(f"{max_tokens} tokens more than the prompt do not fit the context")
    tokenizer = engine.tokenizer
    encoded = [prompt.ids(tokenizer) for prompt in prompts]
    jobs = []
    for i, prompt in enumerate(prompts):
        tokens = encoded[i][-room:]
        if context is not None:
            tokens = [t for more in (*encoded[i:], *encoded[:i]) for t in more]
            tokens = (tokens * (1 + context // len(tokens)))[:context]
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=prompt.temperature,
            seed=seed + i,
            ignore_eos=not prompt.messages,
        )
        guess = prompt.prediction
        jobs.append(
            Job(
                tokens,
                params,
                tokenizer.encode(guess, special=False) if guess else [],
                sorted(tokenizer.eos_ids) if prompt.messages else (),
            )
        )
    return jobs
