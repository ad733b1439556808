"""Groups of requests: decoded together, or stepped apart from others with a clock of their own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from secrets import token_hex
from time import perf_counter
from typing import Self, TypeVar

from outrider.engine.engine import Engine, Result
from outrider.engine.request import Speculation
from outrider.events import StepReport
from outrider.grammar import Grammar
from outrider.policy.base import Policy
from outrider.sampling import SamplingParams
from outrider.statistics import SpeculationStats

AnyLane = TypeVar("AnyLane", bound="Lane")


def fresh_salt() -> str:
    """A salt that no request had before.

    A measurement decodes the same prompts again and again. Under one salt a proposer would draft
    from the outputs of earlier rounds, and the prefix cache would skip their prompts.
    """
    return token_hex(8)


class Group:
    """Requests that are decoded and collected together.

        with Group(engine) as group:
            group.add("def f(")
            for report in group: ...
        group.results

    Leaving the block ends what still runs. `results` are in the order of `add`, and are there after
    an exception, too.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.ids: list[str] = []
        self.results: list[Result] = []

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | list[int] = "",
        salt: str = "",
        grammar: Grammar | None = None,
    ) -> str:
        """See `Engine.add`."""
        request_id = self.engine.add(
            prompt,
            params,
            speculation=speculation,
            prediction=prediction,
            salt=salt,
            grammar=grammar,
        )
        self.ids.append(request_id)
        return request_id

    def __iter__(self) -> Iterator[StepReport]:
        """Steps until all are finished; raises the EngineError that one of them failed with."""
        return self.engine.run(self.ids)

    def run(self) -> list[Result]:
        """Decodes to the end."""
        with self:
            for _ in self:
                pass
        return self.results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs and collects all."""
        for request_id in self.ids:
            self.engine.cancel(request_id)
        self.results = [self.engine.collect(request_id) for request_id in self.ids]


class Lane(Group):
    """A group that is scheduled and timed apart from the engine's other requests.

    It shares models and KV pool with them. Its clock runs during its own steps only; steps that one
    call computes count as equally long. No prompt runs twice under one salt: neither a lane nor a
    repeat drafts from an earlier output of the same prompt. Different prompts of a lane share a
    salt, as the requests of one tenant do.
    """

    def __init__(self, engine: Engine, policy: Policy | None = None) -> None:
        """`policy`: None shares the engine's."""
        super().__init__(engine.fork(policy))
        self.seconds = 0.0
        self.steps: list[tuple[int, float]] = []  # (tokens of the pass, seconds)
        self.stats = SpeculationStats()  # of these steps
        self._reports: deque[tuple[StepReport, float]] = deque()
        self._salt = fresh_salt()
        self._num_runs: Counter[str | tuple[int, ...]] = Counter()  # of each prompt

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        speculation: Speculation | None = None,
        prediction: str | list[int] = "",
        salt: str | None = None,
        grammar: Grammar | None = None,
    ) -> str:
        key = prompt if isinstance(prompt, str) else tuple(prompt)
        self._num_runs[key] += 1
        return super().add(
            prompt,
            params,
            speculation=speculation,
            prediction=prediction,
            salt=f"{self._salt} {self._num_runs[key]}" if salt is None else salt,
            grammar=grammar,
        )

    @property
    def is_finished(self) -> bool:
        return not self._reports and not self.engine.has_work

    def step(self) -> StepReport:
        """The next step, on the clock."""
        if not self._reports:
            self._compute()
        report, took = self._reports.popleft()
        self.seconds += took
        self.steps.append((report.timing.num_tokens, took))
        self.stats.add_report(report)
        return report

    def _compute(self) -> None:
        """All steps of the engine's next call."""
        found = [self._timed_step()]
        while self.engine.has_ready_steps:
            found.append(self._timed_step())
        mean_s = sum(took for _, took in found) / len(found)
        self._reports.extend((report, mean_s) for report, _ in found)

    def _timed_step(self) -> tuple[StepReport, float]:
        started = perf_counter()
        report = self.engine.step()
        took = perf_counter() - started
        assert report is not None, "a lane without work was asked to step"
        for failure in report.failures.values():
            raise failure
        return report, took


def take_turns(
    lanes: Sequence[AnyLane], progress: Callable[[AnyLane], float]
) -> Iterator[tuple[AnyLane, StepReport]]:
    """Steps all lanes to their ends, the one with the least progress next.

    A busy moment of the machine then falls on all of them.
    """
    moving = list(lanes)
    while moving := [lane for lane in moving if not lane.is_finished]:
        lane = min(moving, key=progress)
        yield lane, lane.step()
