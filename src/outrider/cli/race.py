"""Plain against speculative decoding on one loaded pair of models, step by step.

Each lane has a clock that runs only during its own steps, and the lane whose clock is behind moves
next. So both advance as they would side by side on two identical machines, noise of the machine
falls on both alike, and whatever draws the race in between costs neither of them anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from outrider.engine.engine import Engine, Result
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Speculation
from outrider.engine.scheduler import Scheduler, SchedulerConfig
from outrider.events import StepEvent
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats


@dataclass(slots=True)
class Lane:
    """One way of decoding one prompt: its clock, its events, at the end its result."""

    name: str
    engine: Engine
    speculation: Speculation
    elapsed_s: float = 0.0
    events: list[StepEvent] = field(default_factory=list)
    num_tokens: int = 0
    result: Result | None = None
    _request_id: str = ""

    def start(self, prompt: str, params: SamplingParams) -> None:
        self._request_id = self.engine.add(
            prompt, params, speculation=self.speculation, salt=fresh_salt()
        )
        self.elapsed_s, self.num_tokens, self.events, self.result = 0.0, 0, [], None

    def step(self) -> None:
        """One pass of the target, on the clock."""
        started = perf_counter()
        report = self.engine.step()
        self.elapsed_s += perf_counter() - started
        assert report is not None, "a lane without work was asked to step"
        self.events += report.events
        self.num_tokens += sum(len(event.tokens) for event in report.events)
        if self.engine.is_finished(self._request_id):
            self.result = self.engine.collect(self._request_id)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0


def lanes(engine: Engine) -> tuple[Lane, Lane]:
    """A plain and a speculative lane over the engine's models and KV pool, scheduled apart."""
    plain = Engine(
        engine.target,
        engine.kv,
        Scheduler(engine.kv, engine.scheduler.max_positions, SchedulerConfig()),
        FixedPolicy(),
        engine.proposers,
        engine.verifiers,
        engine.tokenizer,
        engine.default,
        engine.ahead.most_steps,
    )
    return (
        Lane("plain", plain, Speculation(num_draft_tokens=0)),
        Lane("speculative", engine, engine.default),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished race."""

    title: str
    temperature: float
    prompt: str
    plain: Result
    speculative: Result
    plain_s: float
    speculative_s: float

    @property
    def num_tokens(self) -> int:
        return len(self.speculative.tokens)

    @property
    def speedup(self) -> float:
        """Ratio of the rates; the number of tokens is the same where the outputs are."""
        plain_rate = len(self.plain.tokens) / self.plain_s
        return self.num_tokens / self.speculative_s / plain_rate

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that differs; None where the outputs are identical."""
        ours, theirs = self.speculative.tokens, self.plain.tokens
        if ours == theirs and self.speculative.text == self.plain.text:
            return None
        same = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        return next(same, min(len(ours), len(theirs)))


def race(
    pair: tuple[Lane, Lane],
    title: str,
    prompt: str,
    params: SamplingParams,
    watch: Callable[[], None] = lambda: None,
) -> Outcome:
    """Runs one prompt in both lanes; `watch` is called between steps, off the clocks."""
    for lane in pair:
        lane.start(prompt, params)
    while waiting := [lane for lane in pair if lane.result is None]:
        min(waiting, key=lambda lane: lane.elapsed_s).step()
        watch()
    plain, speculative = pair
    assert plain.result is not None
    assert speculative.result is not None
    return Outcome(
        title,
        params.temperature,
        prompt,
        plain.result,
        speculative.result,
        plain.elapsed_s,
        speculative.elapsed_s,
    )


@dataclass(frozen=True, slots=True)
class Totals:
    """All races together."""

    num_tokens: int
    plain_tokens_per_s: float
    tokens_per_s: float
    stats: SpeculationStats  # of the speculative lane

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def totals(outcomes: Sequence[Outcome]) -> Totals:
    stats = SpeculationStats()
    for outcome in outcomes:
        stats.merge(outcome.speculative.stats)
    num_plain = sum(len(o.plain.tokens) for o in outcomes)
    num_tokens = sum(o.num_tokens for o in outcomes)
    return Totals(
        num_tokens,
        num_plain / sum(o.plain_s for o in outcomes),
        num_tokens / sum(o.speculative_s for o in outcomes),
        stats,
    )
