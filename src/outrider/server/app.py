"""The ASGI application and its routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.errors import OutriderError
from outrider.server.answering import Answering
from outrider.server.asking import check_model
from outrider.server.dialects import (
    chat,
    completions,
    embeddings,
    llama,
    messages,
    ollama,
    ranking,
    responses,
    sglang,
    tokens,
)
from outrider.server.errors import ApiError, ClientLeft, api_error, validation_error
from outrider.server.guards import Guard
from outrider.server.live.router import live_router
from outrider.server.pages import pages_router
from outrider.server.service import Service

DIALECTS = (
    *(completions, chat, responses, messages, ollama, llama, sglang),
    *(embeddings, ranking, tokens),
)
ERRORS: dict[str, Callable[[ApiError], dict[str, Any]]] = {  # by the beginning of the path
    "/v1/messages": messages.error_body,
    "/api/": ollama.error_body,
}


def make_app(service: Service) -> Guard:
    """The ASGI application of a service; it starts the service."""
    return Guard(make_routes(service), service, error_body)


def make_routes(service: Service) -> FastAPI:
    """The same without a guard, for an application that has one."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield

    app = FastAPI(
        title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _add_error_handlers(app)
    _add_status_routes(app, service)
    answering = Answering(service)
    for dialect in DIALECTS:
        app.include_router(dialect.router(answering))
    app.include_router(live_router(answering))
    app.include_router(pages_router(service))
    return app


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """An error as the clients of this path expect it."""
    form = next((form for start, form in ERRORS.items() if path.startswith(start)), None)
    return error.body() if form is None else form(error)


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=None)
    async def health() -> Response:
        trouble = service.trouble
        if trouble is not None:
            raise ApiError(503, trouble, kind="service_unavailable", code="not_ready")
        return JSONResponse({"status": "ok"})

    app.get("/ping", response_model=None)(health)  # SageMaker's name

    @app.get("/load", response_model=None)
    async def load() -> Response:
        return JSONResponse(
            {"server_load": service.metrics.num_running + service.metrics.num_waiting}
        )

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        started = {"Process-Start-Time-Unix": str(service.started_at)}
        return Response(
            service.metrics.text(), media_type="text/plain; version=0.0.4", headers=started
        )

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        names = (service.config.model_name, *service.config.model_aliases)
        return JSONResponse({"object": "list", "data": [card(service, name) for name in names]})

    @app.get("/v1/models/{model:path}", response_model=None)
    async def model(model: str) -> Response:
        check_model(model, service.config)
        return JSONResponse(card(service, model))


def card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "outrider",
        "root": service.config.model_name,
        "max_model_len": service.served.max_model_len,
        "sampling_defaults": dict(service.served.defaults),
    }


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientLeft):
            return Response(status_code=499)  # the client has left; only the log shows it
        found = _translated(error)
        request.state._state.setdefault("log", {})["error"] = found.message
        body = error_body(request.url.path, found)
        return JSONResponse(body, status_code=found.status, headers=found.headers())

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
