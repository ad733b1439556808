"""Runs a request of any dialect and answers it, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from outrider.engine.engine import Result
from outrider.server.asking import ask_of, check_model
from outrider.server.errors import ApiError, ClientLeft
from outrider.server.generation import Generation
from outrider.server.reply import Reply, Writer
from outrider.server.request import Request
from outrider.server.service import Service
from outrider.server.stream import EventStream, disconnected, frames

logger = logging.getLogger(__name__)
T = TypeVar("T")
W = TypeVar("W", bound=Writer)


class Answering:
    """What the routes of all dialects share."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def check_ignored(self, ignored: Sequence[str]) -> None:
        """Refuses harmless fields if the server is strict, else logs them."""
        if ignored and self.service.config.strict:
            raise ApiError(400, f"{ignored[0]}: it has no effect here", param=ignored[0])
        if ignored:
            logger.debug("fields without effect", extra={"fields": ",".join(ignored)})

    def admit(self, request: Request, http: HttpRequest) -> str:
        """Checks the model; returns the salt of the client."""
        check_model(request.model, self.service.config)
        return self.service.salt(http.state.key, request.cache_salt)

    async def begin(
        self,
        request: Request,
        http: HttpRequest,
        make: Callable[[Reply], W],
        ignored: Sequence[str] = (),
    ) -> tuple[Generation, W]:
        """What the request asks of the engine, not started yet, and the writer of its reply."""
        self.check_ignored(ignored)
        config, served = self.service.config, self.service.served
        ask = await ask_of(request, served, self.admit(request, http))
        log = _log_of(http)
        log |= {"prompts": len(ask.prompts), "n": ask.params.n}
        if config.log_prompts:
            log["text"] = [served.texts.all(prompt) for prompt in ask.prompts]
        generation = Generation(
            self.service,
            ask,
            streamed=request.stream,
            detailed=bool(ask.prediction) or request.metrics == "detailed",
        )
        reply = Reply(
            generation,
            request,
            served.texts,
            model=config.model_name,
            paced=config.paced is not None,
        )
        writer = make(reply)
        log |= {"id": writer.id}
        return generation, writer

    async def answer(
        self,
        request: Request,
        http: HttpRequest,
        make: Callable[[Reply], Writer],
        ignored: Sequence[str] = (),
    ) -> Response:
        generation, writer = await self.begin(request, http, make, ignored)
        log = _log_of(http)
        if request.stream:
            stream = self._stream(request, generation, writer, log)
            return EventStream(
                stream,
                send_timeout_s=self.service.config.send_timeout_s,
                media_type=writer.media_type,
            )

        async def whole() -> list[Result]:
            with generation:
                return await generation.all()

        results = await until_disconnect(http, whole())
        found = writer.whole(results)
        log |= {"tokens": generation.num_completion_tokens}
        return JSONResponse(found)

    async def _stream(
        self, request: Request, generation: Generation, writer: Writer, log: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        config = self.service.config
        padded = config.pads or config.paced is not None
        if request.obfuscated is not None and config.paced is None:
            padded = request.obfuscated
        with generation:
            async with aclosing(
                frames(generation, writer, padded=padded, rate=config.paced)
            ) as stream:
                async for part in stream:
                    log["tokens"] = generation.num_completion_tokens
                    yield part


def _log_of(http: HttpRequest) -> dict[str, Any]:
    """What the log line of this request will say."""
    found: dict[str, Any] = http.state._state.setdefault("log", {})
    return found


async def until_disconnect(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Cancels it and raises ClientLeft if the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
