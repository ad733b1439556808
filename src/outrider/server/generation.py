"""All engine requests of one HTTP request, and the tokens of their choices so far.

A slow reader needs no queue: tokens that it has not taken yet are merged, so a generation never
holds more than the output itself, in one piece per choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, cast

from outrider.engine.async_engine import Item
from outrider.engine.engine import Result
from outrider.engine.request import Speculation
from outrider.events import StepEvent, TokenLogprob
from outrider.grammar import Grammar
from outrider.registry import PREDICTION
from outrider.sampling import SamplingParams
from outrider.server.reading import Manner
from outrider.server.service import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: `params.n` choices for each prompt, with the same parameters."""

    prompts: list[list[int]]
    params: SamplingParams
    speculation: Speculation
    prediction: list[int] = field(default_factory=list)
    salt: str = ""
    is_isolated: bool = False  # by a salt of its own: nothing of it may change others' speed
    grammar: Grammar | None = None
    manner: Manner | None = None  # how to read the output; None: it is all text
    request_id: str | None = None  # for the engine, with one prompt only

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


@dataclass(slots=True)
class Delta:
    """The new tokens of a choice since the last delta; lists have one entry per token."""

    index: int  # of the choice
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None

    def add(self, events: list[StepEvent]) -> None:
        for event in events:
            self.tokens += event.tokens
            self.pieces += event.pieces
        if events[0].logprobs is not None:  # all have them, or none
            for event in events:
                self.logprobs += event.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or events[0].prompt_logprobs
        self.finish_reason = events[-1].finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class Drafting:
    """The numbers of drafted and accepted tokens of each step, for a detailed reply."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_predicted: int = 0  # of these, drafted from the caller's prediction
    num_predicted_accepted: int = 0

    def add(self, event: StepEvent) -> None:
        if event.draft_tokens:
            self.drafted.append(len(event.draft_tokens))
            self.accepted.append(len(event.path))
            if event.source == PREDICTION:
                self.num_predicted += len(event.draft_tokens)
                self.num_predicted_accepted += len(event.path)


class Generation:
    """Use it with `with`: leaving cancels what still runs. Then iterate `deltas` or await `all`.

    `listener` gets the events of one choice as they arrive, on the loop.
    """

    def __init__(
        self,
        service: Service,
        ask: Ask,
        *,
        streamed: bool,
        detailed: bool,
        listener: Callable[[list[StepEvent]], None] | None = None,
    ) -> None:
        self.ask = ask
        self.drafting = Drafting() if detailed else None
        self.results: list[Result | None] = [None] * len(ask.prompts)
        self.num_completion_tokens = 0
        self.started_s = monotonic()
        self._service = service
        self._streamed = streamed
        self._listener = listener
        self._pending: dict[int, Delta] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._last_s: dict[int, float] = {}  # when each choice last got tokens
        self._admission = service.admitted(ask.num_choices)
        self._leave: list[Callable[[], None]] = []

    def __enter__(self) -> Generation:
        served = self._service.served
        self._admission.__enter__()
        self._service.metrics.count_asked(self.ask.params.n, self.ask.params.max_tokens)
        try:
            for i, prompt in enumerate(self.ask.prompts):
                leave = served.engine.submit(
                    prompt,
                    partial(self._take, i),
                    params=self.ask.params,
                    speculation=self.ask.speculation,
                    prediction=self.ask.prediction,
                    salt=self.ask.salt,
                    grammar=self.ask.grammar,
                    request_id=self.ask.request_id,
                    queue_timeout_s=self._service.config.queue_timeout_s,
                )
                self._leave.append(leave)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: Any) -> None:
        for leave in self._leave:
            leave()
        unfinished = sum(result is None for result in self.results)
        if unfinished:
            self._service.metrics.count_finished([self.ending] * unfinished)
        if self._service.tracing is not None:
            self._service.tracing.record(self, model=self._service.config.model_name)
        self._admission.__exit__(None, None, None)

    @property
    def ending(self) -> str:
        """The state of all requests: "finished", "abort" (not all have finished) or "error"."""
        if self._error is not None:
            return "error"
        return "abort" if None in self.results else "finished"

    @property
    def is_complete(self) -> bool:
        """Whether `deltas` has handed out everything."""
        return self._error is None and None not in self.results and not self._pending

    async def all(self) -> list[Result]:
        """Waits for every result; raises the first failure."""
        while not self._is_done():
            await self._news.wait()
            self._news.clear()
        return [result for result in self.results if result is not None]

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New tokens, at most one delta per choice each time."""
        while not (self._is_done() and not self._pending):
            await self._news.wait()
            self._news.clear()
            pending, self._pending = self._pending, {}
            if pending:
                yield list(pending.values())

    def _is_done(self) -> bool:
        if self._error is not None:
            raise self._error
        return None not in self.results

    def _take(self, prompt_index: int, items: list[Item]) -> None:
        last = items[-1]  # all before it are events
        events = cast("list[StepEvent]", items if isinstance(last, StepEvent) else items[:-1])
        for index, some in self._by_choice(prompt_index, events).items():
            self._take_events(index, some)
        if isinstance(last, Result):
            self._take_result(prompt_index, last)
        elif isinstance(last, Exception):
            self._error = last
        if self._streamed or not isinstance(last, StepEvent):
            self._news.set()

    def _by_choice(self, prompt_index: int, events: list[StepEvent]) -> dict[int, list[StepEvent]]:
        num = self.ask.params.n
        if num == 1:
            return {prompt_index: events} if events else {}
        found: dict[int, list[StepEvent]] = {}
        for event in events:
            found.setdefault(prompt_index * num + event.sample_index, []).append(event)
        return found

    def _take_events(self, index: int, events: list[StepEvent]) -> None:
        """The events of several steps of one choice."""
        now, metrics = monotonic(), self._service.metrics
        num_tokens = metrics.count_steps(events)
        self.num_completion_tokens += num_tokens
        if index in self._last_s:
            metrics.count_pace(now - self._last_s[index], num_tokens)
        self._last_s[index] = now
        if self.drafting is not None:
            for event in events:
                self.drafting.add(event)
        if self._listener is not None:
            self._listener(events)
        if self._streamed:
            if index not in self._pending:
                self._pending[index] = Delta(index)
            self._pending[index].add(events)

    def _take_result(self, prompt_index: int, result: Result) -> None:
        self.results[prompt_index] = result
        metrics = self._service.metrics
        metrics.count_request(
            result.times,
            len(result.prompt_tokens),
            result.num_cached_tokens,
            [len(completion.tokens) for completion in result.completions],
        )
        if self._service.learning is not None:
            self._service.learning.see(self.ask, result)
        metrics.count_finished(completion.finish_reason for completion in result.completions)
