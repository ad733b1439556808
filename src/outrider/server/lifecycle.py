"""From loading to the end: the state of whatever serves, and how much of it is in flight."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable

from outrider.server.config import ServerConfig
from outrider.server.errors import overloaded


class State(enum.Enum):
    LOADING = "the model is loading"
    READY = "ready"
    DRAINING = "the server is shutting down"
    FAILED = "the engine has stopped"


class Lifecycle:
    """Belongs to the server's event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.state = State.LOADING
        self.was_ready = False
        self.failure: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None  # nothing more will be served
        self._num_in_flight = 0
        self._idle = asyncio.Event()

    def check_ready(self) -> None:
        """Raises ApiError (503) while there is nothing to serve."""
        if self.state is not State.READY:
            raise overloaded(self.state.value, code=self.state.name.lower())

    def enter(self, num: int, limit: int) -> None:
        """So many more are in flight, until they `leave`; ApiError (503) beyond `limit`."""
        if self._num_in_flight + num > limit:
            raise overloaded("the queue is full: try again later", code="queue_full")
        self._num_in_flight += num

    @property
    def is_idle(self) -> bool:
        return self._num_in_flight == 0

    def leave(self, num: int) -> None:
        self._num_in_flight -= num
        if self._num_in_flight == 0:
            self._idle.set()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.state = State.FAILED
        self.on_end()

    async def drain(self) -> bool:
        """Takes no more requests and waits for those in flight; True if all came to their end."""
        self.state = State.DRAINING
        if self._num_in_flight == 0:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout_s)
        except TimeoutError:
            return False
        return True
