"""HTTP as uvicorn reads it with httptools, which has no limits of its own, within ours."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedProtocol(HttpToolsProtocol):
    """Refuses what would fill the memory before any route sees it.

    A head may have so many bytes, and so many may come without completing a head or bringing a
    piece of a body: lines that never end, trailers, extensions of chunks.
    """

    _num_idle = 0  # bytes since there was progress
    _has_begun = False  # a request that is not complete yet

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
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._num_idle = 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limit:
            raise ValueError("the head is too large")  # which is answered with status 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_idle = 0
        self._has_begun = False
        super().on_message_complete()
