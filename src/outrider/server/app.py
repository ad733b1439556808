"""The ASGI application and its routes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.engine.engine import Result
from outrider.errors import OutriderError
from outrider.server.asking import chat_ask, chat_prompt, check_model, completion_ask
from outrider.server.errors import ApiError, ClientLeft, api_error, validation_error
from outrider.server.generation import Ask, Generation
from outrider.server.guards import Guard
from outrider.server.live.router import live_router
from outrider.server.reply import ChatDialect, CompletionDialect, Dialect, Reply
from outrider.server.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    TokenizeBody,
)
from outrider.server.service import Service
from outrider.server.stream import EventStream, disconnected, frames

T = TypeVar("T")


def make_app(service: Service) -> Guard:
    """The ASGI application of a service; it starts the service."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield

    app = FastAPI(
        title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _add_error_handlers(app)
    _add_status_routes(app, service)
    _add_generating_routes(app, Handlers(service))
    _add_token_routes(app, service)
    app.include_router(live_router(service))
    return Guard(app, service)


class Handlers:
    """The handlers of the generating routes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def chat(self, body: ChatBody, request: Request) -> Response:
        served = self.service.served
        ask = await chat_ask(body, served, self._salt(body, request))
        dialect = ChatDialect(served.texts, logprobs=bool(body.logprobs))
        return await self._answer(body, request, ask, dialect, "chatcmpl")

    async def completion(self, body: CompletionBody, request: Request) -> Response:
        served = self.service.served
        ask, texts = await completion_ask(body, served, self._salt(body, request))
        dialect = CompletionDialect(
            served.texts, ask, echo=texts if body.echo else None, echo_only=body.max_tokens == 0
        )
        return await self._answer(body, request, ask, dialect, "cmpl")

    def _salt(self, body: GenerationBody, request: Request) -> str:
        check_model(body.model, self.service.config.model_name)
        return self.service.salt(request.state.key, body.cache_salt)

    async def _answer(
        self, body: GenerationBody, request: Request, ask: Ask, dialect: Dialect, prefix: str
    ) -> Response:
        metrics = body.speculation.metrics if body.speculation is not None else None
        predicted = bool(ask.prediction)
        id = f"{prefix}-{secrets.token_hex(12)}"
        log = request.state._state.setdefault("log", {})
        log |= {"id": id, "prompts": len(ask.prompts), "n": ask.params.n}
        if self.service.config.log_prompts:
            decode = self.service.served.tokenizer.decode
            log["text"] = [decode(prompt, skip_special=False) for prompt in ask.prompts]
        generation = Generation(
            self.service,
            ask,
            streamed=bool(body.stream),
            detailed=predicted or metrics == "detailed",
        )
        reply = Reply(
            dialect,
            generation,
            id=id,
            model=self.service.config.model_name,
            metrics=metrics,
            predicted=predicted,
        )
        if body.stream:
            stream = self._stream(body.stream_options or StreamOptions(), generation, reply, log)
            return EventStream(stream, send_timeout_s=self.service.config.send_timeout_s)

        async def whole() -> list[Result]:
            with generation:
                return await generation.all()

        results = await until_disconnect(request, whole())
        if body.max_tokens == 0:
            generation.num_completion_tokens = 0
        log |= {"tokens": generation.num_completion_tokens}
        return JSONResponse(reply.whole(results))

    async def _stream(
        self, options: StreamOptions, generation: Generation, reply: Reply, log: dict[str, Any]
    ) -> AsyncGenerator[bytes, None]:
        config = self.service.config
        padded = config.pads or config.paced is not None
        if options.include_obfuscation is not None and config.paced is None:
            padded = options.include_obfuscation
        with generation:
            async with aclosing(
                frames(
                    generation,
                    reply,
                    usage=options.include_usage,
                    continuous_usage=options.continuous_usage_stats,
                    padded=padded,
                    rate=config.paced,
                )
            ) as stream:
                async for part in stream:
                    log["tokens"] = generation.num_completion_tokens
                    yield part


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
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


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        trouble = service.trouble
        if trouble is not None:
            raise ApiError(503, trouble, kind="service_unavailable", code="not_ready")
        return JSONResponse({"status": "ok"})

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_card(service)]})

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Response:
        check_model(model, service.config.model_name)
        return JSONResponse(_card(service))


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model_name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": service.served.max_model_len,
    }


def _add_generating_routes(app: FastAPI, handlers: Handlers) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await handlers.completion(body, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await handlers.chat(body, request)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(body.model, service.config.model_name)
        served = service.served
        if body.messages is not None:
            tokens = await chat_prompt(
                body.messages, served, add_generation_prompt=body.add_generation_prompt
            )
        else:
            tokens = await asyncio.to_thread(
                served.tokenizer.encode, body.prompt or "", special=body.add_special_tokens
            )
        spelled = [served.tokenizer.token(t) for t in tokens] if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": served.max_model_len,
                "tokens": tokens,
                "token_strs": spelled,
            }
        )

    @app.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody) -> Response:
        check_model(body.model, service.config.model_name)
        served = service.served
        num_tokens = served.core.target.spec.num_tokens
        if any(token >= num_tokens for token in body.tokens):
            raise ApiError(400, f"token ids must be below {num_tokens}", param="tokens")
        text = await asyncio.to_thread(served.tokenizer.decode, body.tokens, skip_special=False)
        return JSONResponse({"prompt": text})


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientLeft):
            return Response(status_code=499)  # the client has left; only the log shows it
        found = _translated(error)
        return JSONResponse(found.body(), status_code=found.status, headers=found.headers())

    kinds: list[type[Exception]] = [Exception, HTTPException, RequestValidationError]
    for kind in [*kinds, ApiError, ClientLeft, OutriderError]:
        app.add_exception_handler(kind, answer)


def _translated(error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors())
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return ApiError(404, "there is no such route", code="not_found")
        if error.status_code == 405:
            return ApiError(405, "this route has another method", code="method_not_allowed")
        return ApiError(error.status_code, "the body cannot be read", code="bad_request")
    return api_error(error)
