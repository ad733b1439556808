"""Plain against speculative decoding of one prompt, step by step.

The lane with the smaller clock moves next. So both advance as they would side by side on two
identical machines, noise of the machine falls on both alike, and drawing costs neither of them
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.engine import Engine, Result
from outrider.engine.lane import Lane, take_turns
from outrider.engine.request import Speculation
from outrider.events import StepEvent, StepReport
from outrider.policy.base import Policy
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats


class Racer(Lane):
    """One way of decoding one prompt, with its events."""

    def __init__(
        self, name: str, engine: Engine, speculation: Speculation, policy: Policy | None = None
    ) -> None:
        super().__init__(engine, policy)
        self.name = name
        self.speculation = speculation
        self.events: list[StepEvent] = []

    def step(self) -> StepReport:
        report = super().step()
        self.events += report.events
        return report

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_tokens / self.seconds if self.seconds else 0.0


Pair = tuple[Racer, Racer]


def lanes(engine: Engine) -> Pair:
    """A plain and a speculative lane, for one race."""
    plain = Speculation(num_draft_tokens=0)
    return (
        Racer("plain", engine, plain, FixedPolicy()),
        Racer("speculative", engine, engine.default),
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
    pair: Pair,
    title: str,
    prompt: str,
    params: SamplingParams,
    watch: Callable[[], None] = lambda: None,
    ids: list[int] | None = None,
) -> Outcome:
    """Runs one prompt in both lanes; `watch` is called between steps, off the clocks.

    `ids`: the prompt in the model's chat template; None: the text as it is."""
    for lane in pair:
        lane.add(prompt if ids is None else ids, params, speculation=lane.speculation)
    for _ in take_turns(pair, lambda lane: lane.seconds):
        watch()
    for lane in pair:
        lane.close()
    [plain], [speculative] = (lane.results for lane in pair)
    seconds = [lane.seconds for lane in pair]
    return Outcome(title, params.temperature, prompt, plain, speculative, *seconds)


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
