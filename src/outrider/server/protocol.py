"""uvicorn's HTTP protocol with limits, which httptools does not have."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedProtocol(HttpToolsProtocol):
    """Refuses input that would fill the memory or keep a connection open forever.

    The bytes of a head are limited, and so are bytes without progress, which neither complete a
    head nor bring a piece of a body: endless lines, trailers, chunk extensions. A head must be
    complete within the keep-alive time of a connection.
    """

    _num_idle = 0  # bytes since there was progress
    _has_begun = False  # a request has started and is not complete
    _head_timer: asyncio.TimerHandle | None = None  # while the head is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._be_patient()
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.transport.close)

    def _be_patient(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def data_received(self, data: bytes) -> None:
        self._num_idle += len(data)
        super().data_received(data)
        if self._has_begun and self._num_idle > self._limit and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    @property
    def _limit(self) -> int:
        return self.config.h11_max_incomplete_event_size or 0

    def on_message_begin(self) -> None:
        self._has_begun = True
        self._wait_for_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_idle = 0
        self._be_patient()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limit:
            raise ValueError("the head is too large")  # answered with status 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_idle = 0
        self._has_begun = False
        super().on_message_complete()
