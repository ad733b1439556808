"""The engine in a thread of its own, for any number of asyncio clients.

All engine state belongs to that thread: clients only post commands to it and receive events on
their own loop. Leaving a stream early, by `break`, an exception or a cancelled task, cancels the
request within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from outrider.engine.engine import Engine, Result
from outrider.errors import EngineError, OutriderError
from outrider.events import StepEvent, StepReport

logger = logging.getLogger(__name__)

# Passes and clients share the cores and the interpreter's lock. Running at the same time costs both
# about twice what taking turns costs. So events are gathered, longer for more sequences, and the
# engine waits while the clients' loops handle them.
GATHER_S = 0.008  # times the sequences of a step
MAX_GATHER_S = 0.08
HANDLING_S = 0.004  # limit of that wait: a client that takes longer runs beside the next pass
# The engine waits for 8 turns of an event loop after requests begin or end: by then, answers have
# been sent and other new requests posted, so that prompts which arrive together form one batch.
TURNS = 8
ARRIVING_S = 0.012  # limit of the wait for more requests
T = TypeVar("T")
Item = StepEvent | Result | Exception
Deliver = Callable[[list[Item]], None]


@dataclass(slots=True, eq=False)
class _Client:
    loop: asyncio.AbstractEventLoop
    deliver: Deliver
    request_id: str | None = None  # the engine thread sets it
    news: list[Item] = field(default_factory=list)  # gathered by the engine thread
    left: bool = False  # its loop sets it: gone, or served; nothing is delivered any more


class AsyncEngine:
    """`on_failure` is called in the engine's thread when the engine itself has died."""

    def __init__(
        self, engine: Engine, *, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._clients: dict[str, _Client] = {}  # touched by the engine thread only
        self._sent_at = 0.0  # when events were last delivered
        self._arrived: set[asyncio.AbstractEventLoop] = set()  # with requests since the last step
        self._failure: BaseException | None = None
        self._alive_at: float | None = None  # last sign of life; None while there is no work
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: str | list[int], **request: Any
    ) -> AsyncGenerator[StepEvent, None]:
        """Yields each step's confirmed tokens. Arguments are Engine.add's."""
        async with contextlib.aclosing(self._follow(prompt, **request)) as items:
            async for item in items:
                if isinstance(item, StepEvent):
                    yield item

    async def generate(self, prompt: str | list[int], **request: Any) -> Result:
        """The finished request. Arguments are Engine.add's."""
        async with contextlib.aclosing(self._follow(prompt, **request)) as items:
            async for item in items:
                if isinstance(item, Result):
                    return item
        raise EngineError("the engine ended without a result")

    async def _follow(
        self, prompt: str | list[int], **request: Any
    ) -> AsyncGenerator[StepEvent | Result, None]:
        inbox: asyncio.Queue[list[Item]] = asyncio.Queue()
        leave = self.submit(prompt, inbox.put_nowait, **request)
        try:
            while True:
                for item in await inbox.get():
                    if isinstance(item, Exception):
                        raise item
                    yield item
                    if isinstance(item, Result):
                        return
        finally:
            leave()

    def submit(
        self, prompt: str | list[int], deliver: Deliver, **request: Any
    ) -> Callable[[], None]:
        """Starts a request; arguments are Engine.add's. Call it on a running loop.

        `deliver` is called on that loop with new items: events, and at the end a Result or an
        exception. The first and the last items come at once; others may be gathered for some
        milliseconds. Returns a function that cancels the request if it still runs; it may be called
        at any time. Raises EngineError if the engine has stopped.
        """
        client = _Client(asyncio.get_running_loop(), deliver)

        def start() -> None:
            try:
                client.request_id = self._engine.add(prompt, **request)
            except Exception as error:
                client.news.append(error)
                self._send([client])
            else:
                self._clients[client.request_id] = client
                self._arrived.add(client.loop)

        def stop() -> None:
            if client.request_id is not None and client.request_id in self._clients:
                del self._clients[client.request_id]
                self._engine.cancel(client.request_id)
                self._engine.collect(client.request_id)

        def leave() -> None:
            if not client.left:
                client.left = True
                self._post(stop)

        if self._failure is not None or not self._thread.is_alive():
            raise EngineError("the engine has stopped") from self._failure
        self._post(start)
        return leave

    async def call(self, work: Callable[[Engine], T]) -> T:
        """The result of `work(engine)`, run by the engine's thread between two steps."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(act: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if answer.done() else act())

        def run() -> None:
            try:
                result = work(self._engine)
            except Exception as error:
                failure = error
                tell(lambda: answer.set_exception(failure))
            else:
                tell(lambda: answer.set_result(result))

        self._post(run)
        while not (await asyncio.wait({answer}, timeout=1.0))[0]:
            if not self._thread.is_alive():
                raise EngineError("the engine has stopped") from self._failure
        return answer.result()

    def _post(self, command: Callable[[], None] | None) -> None:
        """Has the engine's thread run a command before its next step; None ends the thread."""
        self._commands.put(command)
        self._engine.interrupt()

    @property
    def has_commands(self) -> bool:
        """Whether the engine's thread has not yet run all commands."""
        return not self._commands.empty()

    @property
    def stalled_s(self) -> float:
        """How long the engine, having work, has shown no sign of life; 0 while it is idle."""
        alive_at = self._alive_at
        return 0.0 if alive_at is None else monotonic() - alive_at

    async def close(self, timeout_s: float | None = None) -> bool:
        """Ends the engine thread; requests still running get an EngineError.

        False if the thread has not ended within `timeout_s`: it hangs in a step.
        """
        self._post(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._obey():
                reports = [self._engine.step()]
                while self._engine.has_ready_steps:
                    reports.append(self._engine.step())
                self._dispatch([report for report in reports if report is not None])
        except BaseException as error:
            logger.exception("the engine stopped")
            self._failure = error
        finally:
            self._alive_at = None
            self._fail_all(self._failure or EngineError("the engine was closed"))
            if self._failure is not None and self._on_failure is not None:
                self._on_failure(self._failure)

    def _obey(self) -> bool:
        """Runs all posted commands, waiting for one if there is nothing else to do."""
        waited_s = 0.0
        while True:
            self._engine.resume()  # first: a command posted later interrupts again
            block = not self._engine.has_work
            self._alive_at = None if block else monotonic()
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                if not self._arrived or waited_s >= ARRIVING_S:
                    self._arrived.clear()
                    return True
                started = monotonic()
                while self._arrived:
                    _wait_for(self._arrived.pop(), TURNS)
                waited_s += monotonic() - started
                continue
            self._alive_at = monotonic()
            if command is None:
                return False
            command()

    def _dispatch(self, reports: list[StepReport]) -> None:
        urgent: list[_Client] = []
        ended: list[str] = []
        clients = self._clients
        for report in reports:
            for event in report.events:
                client = clients.get(event.request_id)
                if client is not None:
                    client.news.append(event)
                    if event.step == 1:
                        urgent.append(client)
                    if event.finish_reason is not None:
                        ended.append(event.request_id)
        # After all events: several samples of a request may end in the same step.
        for request_id in dict.fromkeys(ended):
            if self._engine.is_finished(request_id):
                client = clients.pop(request_id)
                client.news.append(self._engine.collect(request_id))
                urgent.append(client)
        for report in reports:
            for request_id, error in report.failures.items():
                client = clients.pop(request_id, None)
                if client is not None:
                    self._engine.collect(request_id)
                    client.news.append(error)
                    urgent.append(client)
        now = monotonic()
        num_sequences = len(reports[-1].events) if reports else 0
        is_due = now - self._sent_at >= min(GATHER_S * num_sequences, MAX_GATHER_S)
        num_turns = TURNS if urgent else 1
        if is_due:
            self._sent_at = now
            urgent += self._clients.values()
        self._send(urgent, num_turns)

    def _send(self, clients: Iterable[_Client], num_turns: int = 1) -> None:
        """Delivers the gathered items; wakes each loop once and waits while it handles them."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Client, list[Item]]]] = {}
        for client in clients:
            if client.news:
                by_loop.setdefault(client.loop, []).append((client, client.news))
                client.news = []
        for loop, mine in by_loop.items():
            _wait_for(loop, num_turns, partial(_deliver, mine))

    def _fail_all(self, error: BaseException) -> None:
        wrapped = error if isinstance(error, OutriderError) else EngineError(f"engine: {error}")
        for client in self._clients.values():
            client.news.append(wrapped)
        self._send(self._clients.values())
        self._clients.clear()


def _deliver(news: list[tuple[_Client, list[Item]]]) -> None:
    for client, items in news:
        if not client.left:
            # A client with its last item need not cancel, which would interrupt other passes.
            client.left = not isinstance(items[-1], StepEvent)
            client.deliver(items)


def _wait_for(
    loop: asyncio.AbstractEventLoop, num_turns: int, work: Callable[[], None] | None = None
) -> None:
    """Runs `work` on a loop and waits for `num_turns` turns of it, at most HANDLING_S."""
    done = threading.Event()

    def turn(left: int) -> None:
        if left:
            loop.call_soon(turn, left - 1)
        else:
            done.set()

    def begin() -> None:
        if work is not None:
            work()
        loop.call_soon(turn, num_turns - 1)  # after the tasks that it has woken

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(begin)
        done.wait(HANDLING_S)
