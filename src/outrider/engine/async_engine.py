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
from collections.abc import AsyncGenerator, Callable
from typing import Any

from outrider.engine.engine import Engine, Result
from outrider.errors import EngineError, OutriderError
from outrider.events import StepEvent, StepReport

logger = logging.getLogger(__name__)

_Deliver = Callable[[StepEvent | Result | BaseException], None]


class AsyncEngine:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._clients: dict[str, _Deliver] = {}  # touched by the engine thread only
        self._failure: BaseException | None = None
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
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[StepEvent | Result | BaseException] = asyncio.Queue()

        def deliver(item: StepEvent | Result | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the client's loop is closed: nobody listens
                loop.call_soon_threadsafe(inbox.put_nowait, item)

        request_id: str | None = None

        def start() -> None:
            nonlocal request_id
            try:
                request_id = self._engine.add(prompt, **request)
            except Exception as error:
                deliver(error)
            else:
                self._clients[request_id] = deliver

        def stop() -> None:
            if request_id is not None and self._clients.pop(request_id, None) is not None:
                self._engine.cancel(request_id)
                self._engine.collect(request_id)

        self._post(start)
        try:
            while True:
                item = await inbox.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Result):
                    return
        finally:
            if self._thread.is_alive():
                self._commands.put(stop)

    async def close(self) -> None:
        """Ends the engine thread; requests still running get an EngineError."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _post(self, command: Callable[[], None]) -> None:
        if self._failure is not None or not self._thread.is_alive():
            raise EngineError("the engine has stopped") from self._failure
        self._commands.put(command)

    def _run(self) -> None:
        try:
            while self._obey():
                report = self._engine.step()
                if report is not None:
                    self._dispatch(report)
        except BaseException as error:
            logger.exception("the engine stopped")
            self._failure = error
        finally:
            self._fail_everybody(self._failure or EngineError("the engine was closed"))

    def _obey(self) -> bool:
        """Runs all posted commands, waiting for one if there is nothing else to do."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = not self._engine.has_work

    def _dispatch(self, report: StepReport) -> None:
        for event in report.events:
            deliver = self._clients.get(event.request_id)
            if deliver is None:
                continue
            deliver(event)
            if event.finish_reason is not None and self._engine.is_finished(event.request_id):
                del self._clients[event.request_id]
                deliver(self._engine.collect(event.request_id))

    def _fail_everybody(self, error: BaseException) -> None:
        wrapped = error if isinstance(error, OutriderError) else EngineError(f"engine: {error}")
        for deliver in self._clients.values():
            deliver(wrapped)
        self._clients.clear()
