"""The server as a process: its socket, its signals, its exit code.

0    SIGTERM, and all requests in flight have ended (or a second signal said not to wait)
1    the port is taken, or the engine died       2    the model could not be loaded
130  interrupted
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from outrider.server.app import make_app
from outrider.server.guards import Guarded
from outrider.server.protocol import LimitedProtocol
from outrider.server.service import Service, State
from outrider.server_config import ServerConfig

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005  # the longest wait of the engine's thread for the interpreter lock
GARBAGE = 20_000  # new objects between garbage collections; requests create few cycles
CLOSING_S = 1.0  # for streams to send the error of their dropped requests


class PortTaken(Exception):
    """The address is in use or not permitted."""


def bind(config: ServerConfig) -> socket.socket:
    """A listening socket, opened before the model loads. Raises PortTaken with one line."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # With an explicit protocol: asyncio sets TCP_NODELAY only if it sees TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        reasons = {
            errno.EADDRINUSE: "it is in use",
            errno.EACCES: "permission denied",
            errno.EADDRNOTAVAIL: "no such address here",
        }
        reason = reasons.get(error.errno or 0, os.strerror(error.errno or 0))
        raise PortTaken(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    listener.setblocking(False)
    return listener


class Running(Guarded, Protocol):
    """A service from loading to the end."""

    state: State
    was_ready: bool
    failure: BaseException | None
    on_end: Callable[[], None]

    async def drain(self) -> bool: ...

    async def close(self, timeout_s: float = ...) -> bool: ...


class Server(uvicorn.Server):
    """uvicorn with our shutdown: finish or drop running requests, then end."""

    def __init__(self, service: Running, app: ASGIApp) -> None:
        config = service.config
        super().__init__(
            uvicorn.Config(
                app,
                http=LimitedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
                h11_max_incomplete_event_size=config.max_header_bytes,
            )
        )
        self.service = service
        self.interrupted = False
        self._ending: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        service.on_end = self.stop

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().serve(sockets)
        await self.service.close()
        logger.info("stopped")

    def stop(self) -> None:
        """Ends the main loop, with a moment for streams to send an error."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.interrupted = self.interrupted or sig == signal.SIGINT
        loading = self.service.state is State.LOADING
        if loading or self._ending is not None or self.loop is None or self.should_exit:
            self.should_exit = True  # nothing to wait for, or a second signal
            self.force_exit = self._ending is not None
            return
        # A signal interrupts whatever runs: without a context of its own, the end would be logged
        # with the id of a request.
        self.loop.call_soon_threadsafe(self._begin_to_end, context=contextvars.Context())

    def _begin_to_end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        logger.info("shutting down", extra={"drain_s": self.service.config.drain_timeout_s})
        if not await self.service.drain():
            logger.warning("requests were dropped: they did not end in time")
            await self.service.close(CLOSING_S)  # fails the requests that still run
            await asyncio.sleep(0.05)
        self.should_exit = True


def tune_interpreter() -> None:
    """Sets the interpreter up for a process that only serves."""
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(GARBAGE)


def freeze_garbage() -> None:
    """Excludes all loaded objects from garbage collection: scanning them would delay tokens."""
    gc.collect()
    gc.freeze()


def serve(
    service: Service, listener: socket.socket, announce: Callable[[], None] = lambda: None
) -> int:
    """Serves until a signal; returns the exit code, or raises the error of loading.

    `announce` is called when the model is loaded.
    """

    def ready() -> None:
        freeze_garbage()
        if service.state is State.READY:
            announce()

    service.on_ready = ready
    return run(service, make_app(service), listener)


def run(service: Running, app: ASGIApp, listener: socket.socket) -> int:
    """Serves any service with its own app; otherwise as `serve`."""
    server = Server(service, app)
    tune_interpreter()
    server.run([listener])  # on uvloop where it is installed
    if service.failure is not None:
        if not service.was_ready:
            raise service.failure
        return 1
    return 130 if server.interrupted else 0
