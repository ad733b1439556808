"""Server-sent events: one frame per chunk, `[DONE]` at the end, and protection from eavesdroppers.

The number of tokens of a step depends on how predictable the text is, so sizes and times of frames
reveal something about the text, even if encrypted. Two options hide it:

    padded   frames have one of few sizes: 512, 1024, 2048, ... bytes
    paced    padded, with a constant number of tokens per frame, on a clock: if the engine is
             faster than the clock, sizes and times do not depend on accepted drafts
"""

from __future__ import annotations

import asyncio
import json
import secrets
import string
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.server.errors import ClientLeft, api_error
from outrider.server.generation import Delta, Generation
from outrider.server.reply import Writer

DONE = b"data: [DONE]\n\n"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
SMALLEST_FRAME = 512  # a token with all fields around it
MAX_FRAMES_PER_S = 20.0
_NOISE = "".join(secrets.choice(string.ascii_letters) for _ in range(1 << 16))


class Last(bytes):
    """The last piece of a stream, which is sent together with the end of the body."""


def frame(payload: dict[str, Any], *, padded: bool = False) -> bytes:
    """One event. Padding goes into the field that OpenAI's clients ignore."""
    if padded:
        bare = len(_encode(payload | {"obfuscation": ""}))
        payload = payload | {"obfuscation": _NOISE[: bucket(bare) - bare]}
    return _encode(payload)


def event_frame(payload: dict[str, Any], *, padded: bool) -> bytes:
    """An event with a name: the payload's type. Padding is a comment, which clients skip."""
    event = b"event: %b\n%b" % (str(payload["type"]).encode(), _encode(payload))
    if not padded:
        return event
    return b": %b\n" % _noise(bucket(len(event) + 3) - len(event) - 3) + event


def line_frame(payload: dict[str, Any], *, padded: bool) -> bytes:
    """A line of JSON. Padding is white space."""
    line = _to_json(payload).encode("utf-8", "replace")
    return line.ljust(bucket(len(line) + 1) - 1 if padded else 0) + b"\n"


def _noise(size: int) -> bytes:
    return _NOISE[:size].encode()


def bucket(size: int) -> int:
    """The next size of padded frames."""
    allowed = SMALLEST_FRAME
    while allowed < size:
        allowed *= 2
    return allowed


_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _encode(payload: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _to_json(payload).encode("utf-8", "replace")


async def frames(
    generation: Generation, writer: Writer, *, padded: bool, rate: float | None
) -> AsyncGenerator[bytes, None]:
    """All frames of a stream with its end; frames that are ready together are one piece.

    An error before the first frame is raised; a later one becomes the last event.
    """
    begun = False
    ready: list[bytes] = []
    deltas = generation.deltas() if rate is None else paced(generation, rate)
    try:
        async for batch in deltas:
            for delta in batch:
                ready += [writer.frame(one, padded=padded) for one in writer.delta(delta)]
            if not ready or (rate is None and generation.is_complete):
                continue  # it is sent together with the end of the stream
            yield b"".join(ready)
            begun = True
            ready.clear()
        ready += [writer.frame(one, padded=padded) for one in writer.end()]
    except Exception as error:
        if not begun and not ready:
            raise
        ready.append(writer.frame(writer.failure(api_error(error)), padded=padded))
    yield Last(b"".join([*ready, writer.done]))


async def paced(generation: Generation, rate: float) -> AsyncIterator[list[Delta]]:
    """The deltas at `rate` tokens per second and choice: a constant number on each tick.

    A tick without enough tokens sends an empty delta, so that every tick has a frame.
    """
    per_tick = max(1, round(rate / MAX_FRAMES_PER_S))
    tick_s = per_tick / rate
    held: dict[int, Delta] = {}
    open_choices = set(range(generation.ask.num_choices))
    ended = asyncio.Event()
    failure: list[Exception] = []

    async def fill() -> None:
        try:
            async for batch in generation.deltas():
                for delta in batch:
                    _append(held.setdefault(delta.index, Delta(delta.index)), delta)
        except Exception as error:
            failure.append(error)
        finally:
            ended.set()

    filler = asyncio.create_task(fill())
    try:
        # Nothing is sent yet: wait, so that an early failure can still be an HTTP status.
        while not held and not ended.is_set():
            await asyncio.sleep(min(tick_s, 0.02))
        loop = asyncio.get_running_loop()
        next_tick = loop.time()
        while open_choices:
            if failure:
                raise failure[0]
            batch = []
            for index in sorted(open_choices):
                delta = _take(held.setdefault(index, Delta(index)), per_tick)
                if delta.finish_reason is not None:
                    open_choices.discard(index)
                batch.append(delta)
            yield batch
            next_tick += tick_s
            await asyncio.sleep(next_tick - loop.time())
        await ended.wait()  # the results follow the last event
    finally:
        filler.cancel()


def _append(held: Delta, more: Delta) -> None:
    held.tokens += more.tokens
    held.pieces += more.pieces
    held.logprobs += more.logprobs
    held.prompt_logprobs = held.prompt_logprobs or more.prompt_logprobs
    held.finish_reason = more.finish_reason


def _take(held: Delta, num_tokens: int) -> Delta:
    """Removes and returns the first `num_tokens` held tokens; none if there are fewer and more will
    come."""
    if len(held.tokens) < num_tokens and held.finish_reason is None:
        return Delta(held.index)
    is_last = len(held.tokens) <= num_tokens
    taken = Delta(
        held.index,
        held.tokens[:num_tokens],
        held.pieces[:num_tokens],
        held.logprobs[:num_tokens],
        held.prompt_logprobs,
        held.finish_reason if is_last else None,
    )
    del held.tokens[:num_tokens], held.pieces[:num_tokens], held.logprobs[:num_tokens]
    held.prompt_logprobs = None
    return taken


class EventStream(Response):
    """Sends frames until they end, the client leaves, or it stops reading.

    The status is sent with the first frame: earlier errors, and ClientLeft, are raised.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        send_timeout_s: float,
        media_type: str = SSE,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._frames = frames
        self._send_timeout_s = send_timeout_s
        self._begun = False
        self._num_sent = 0
        self._is_sending = False
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        leaving = asyncio.create_task(disconnected(receive))
        try:
            while True:
                num_sent = self._num_sent
                ended, _ = await asyncio.wait(
                    {sending, leaving},
                    timeout=self._send_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                # A write waits only while the buffer is full of bytes that the client has not read.
                if ended or (self._is_sending and self._num_sent == num_sent):
                    break
        finally:
            if not self._is_over:
                sending.cancel()
            leaving.cancel()
            outcome, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._frames.aclose()
        if isinstance(outcome, BaseException) and not self._begun:
            raise ClientLeft if isinstance(outcome, asyncio.CancelledError) else outcome

    async def _send_all(self, send: Send) -> None:
        async for body in self._frames:
            if not self._begun:
                self._begun = True
                head = {"type": "http.response.start", "status": self.status_code}
                await send({**head, "headers": self.raw_headers})
            is_last = isinstance(body, Last)
            self._is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._is_sending = False
            self._is_over = is_last
            self._num_sent += 1
        if not self._is_over:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def disconnected(receive: Receive) -> None:
    """Returns when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
