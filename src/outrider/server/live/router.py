"""The routes of the live page: its files, the choices, the streams, the load."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from outrider.origins import Spelling, spelling
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.registry import PREDICTION
from outrider.server.answering import Answering
from outrider.server.asking import ask_of
from outrider.server.dialects.chat import ChatBody
from outrider.server.dialects.completions import CompletionBody
from outrider.server.errors import ApiError
from outrider.server.live.watch import Notebook, Watched, frames
from outrider.server.pages import HEADERS
from outrider.server.request import Request as Asked
from outrider.server.stream import EventStream

_FOLDER = Path(__file__).parent
_FILES = {
    "/live": ("live.html", "text/html"),
    "/live/live.css": ("live.css", "text/css"),
    "/live/live.js": ("live.js", "text/javascript"),
}


def live_router(answering: Answering) -> APIRouter:
    """All routes below /live. As on all routes, the guard checks keys."""
    router = APIRouter(include_in_schema=False)
    live = _Live(answering)

    for path, (name, kind) in _FILES.items():
        router.get(path, response_model=None)(_static(name, kind))

    @router.get("/live/info", response_model=None)
    async def info() -> Response:
        return JSONResponse(live.info())

    @router.get("/live/load", response_model=None)
    async def load() -> Response:
        return JSONResponse(live.load())

    @router.post("/live/completion", response_model=None)
    async def completion(body: CompletionBody, request: Request) -> Response:
        if body.echo:
            raise ApiError(400, "the live stream has no echo", param="echo")
        return await live.stream(body.request(), request)

    @router.post("/live/chat", response_model=None)
    async def chat(body: ChatBody, request: Request) -> Response:
        return await live.stream(body.request(), request)

    return router


def _static(name: str, kind: str) -> Any:
    content = (_FOLDER / name).read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return answer


class _Live:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._service = answering.service

    @cached_property
    def _notebook(self) -> Notebook:
        return Notebook(self._service.served.core)

    @cached_property
    def _spell(self) -> Spelling:
        return spelling(self._service.served.tokenizer)

    def info(self) -> dict[str, Any]:
        served = self._service.served
        default = served.core.default
        return {
            "model": self._service.config.model_name,
            "is_chat": served.has_template,
            "max_model_len": served.max_model_len,
            # The page has no input for a prediction.
            "proposers": sorted(served.proposers - {PREDICTION}),
            "proposer": default.proposer,
            "num_draft_tokens": default.num_draft_tokens,
            "max_draft_tokens": MAX_AUTO_DRAFT_TOKENS,
        }

    def load(self) -> dict[str, Any]:
        """Sums over all requests, as in /metrics; nothing about a single request."""
        engine, metrics = self._service.served.core, self._service.metrics
        return {
            "num_running": len(engine.scheduler.running),
            "num_waiting": len(engine.scheduler.waiting),
            "max_running": engine.scheduler.config.max_sequences,
            "kv_usage": engine.kv.usage,
            "kv_tokens": engine.kv.num_blocks * engine.kv.block_size,
            "num_generation_tokens": metrics.num_generation_tokens,
            "num_draft_tokens": metrics.num_draft_tokens,
            "num_accepted_tokens": metrics.num_accepted_tokens,
        }

    async def stream(self, asked: Asked, request: Request) -> Response:
        """Refuses requests that cannot be watched."""
        config = self._service.config
        salt = self._answering.admit(asked, request)
        if config.paced is not None:  # a paced server hides its steps
            raise ApiError(403, "this server hides its steps (--paced)", code="paced")
        ask = await ask_of(asked, self._service.served, salt)
        if len(ask.prompts) != 1:
            raise ApiError(400, "the live stream shows one prompt", param="prompt")
        if ask.params.n != 1:
            raise ApiError(400, "the live stream shows one completion: leave out n", param="n")
        if ask.params.logprobs is not None:
            raise ApiError(400, "the live stream has no logprobs", param="logprobs")
        stream = frames(
            Watched(self._service, ask, self._notebook, self._spell), padded=config.pads
        )
        return EventStream(stream, send_timeout_s=config.send_timeout_s)
