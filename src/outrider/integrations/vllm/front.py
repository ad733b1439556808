"""The HTTP server before vLLM, with our health, drain and error conventions.

It forwards requests and answers unchanged. It also answers while vLLM loads, drains on SIGTERM,
ends every stream with an error if vLLM dies, starts vLLM again if that is allowed, and refuses what
vLLM would ignore.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider import __version__
from outrider.errors import EngineError, OutriderError
from outrider.integrations.vllm.child import Child
from outrider.integrations.vllm.mailbox import Mailbox
from outrider.server.answering import until_disconnect
from outrider.server.errors import ApiError, ClientLeft, api_error
from outrider.server.guards import Guard
from outrider.server.service import Lifecycle, State
from outrider.server.stream import DONE, EventStream, frame
from outrider.server_config import ServerConfig

logger = logging.getLogger(__name__)

POLL_S = 0.2
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
PASSED = GENERATING | {"/v1/models", "/tokenize", "/detokenize"}


def stopped() -> ApiError:
    return ApiError(
        502,
        "vLLM stopped before this request was complete",
        kind="server_error",
        code="engine_stopped",
    )


class Front(Lifecycle):
    """vLLM from loading to draining; the counterpart of `server.service.Service`."""

    def __init__(
        self,
        config: ServerConfig,
        make_child: Callable[[], Child],
        url: str,
        *,
        max_requests: int,
        restarts: int = 0,
        mailbox: Mailbox | None = None,
        no_sampling: str | None = None,
    ) -> None:
        """`url`: where the child will listen; `restarts`: how often it may be started again.

        `no_sampling` says why requests that sample are refused.
        """
        super().__init__(config)
        self.make_child = make_child
        self._child: Child | None = None
        self.max_requests = max_requests
        self.restarts_left = restarts
        self._mailbox = mailbox
        self._no_sampling = no_sampling
        self._client = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
        self._supervisor: asyncio.Task[None] | None = None

    # --- from loading to the end -------------------------------------------------------------

    def start(self) -> None:
        """Begins to load. Call it on the running loop."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        while True:
            child = self._child = self.make_child()
            try:
                await child.start()
            except OSError as error:
                self.fail(EngineError(f"vLLM cannot be started: {error.strerror}"))
                return
            ended = asyncio.create_task(child.wait())
            ready = asyncio.create_task(self._prepare())
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and not ended.done() and self.state is State.LOADING:
                self.state, self.was_ready = State.READY, True
                logger.info("ready", extra={"model": self.config.model_name})
            code = await ended
            ready.cancel()
            if self.state is State.DRAINING:
                return
            how = f"signal {-code}" if code < 0 else f"code {code}"
            logger.error("vLLM ended", extra={"how": how, "reason": child.reason()})
            if not self.was_ready or self.restarts_left == 0:
                self.fail(EngineError(f"vLLM ended with {how}: {child.reason()}"))
                return
            self.restarts_left -= 1
            self.state = State.LOADING

    async def _prepare(self) -> None:
        while not await self._is_healthy(1.0):
            await asyncio.sleep(POLL_S)

    async def _is_healthy(self, timeout_s: float) -> bool:
        try:
            return (await self._client.get("/health", timeout=timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self, timeout_s: float = 10.0) -> bool:
        """Ends vLLM and all requests that still run there."""
        if self.state is not State.FAILED:
            self.state = State.DRAINING
        if self._child is not None:
            await self._child.stop(timeout_s)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        return True

    # --- for the routes ------------------------------------------------------------------------

    @property
    def served(self) -> object:
        """Raises ApiError (503) while there is nothing to serve."""
        self.check_ready()
        return None

    async def health(self, request: Request) -> Response:
        trouble = None if self.state is State.READY else self.state.value
        if trouble is None and not await self._is_healthy(self.config.stall_timeout_s):
            trouble = "the engine does not answer"
        if trouble is not None:
            raise ApiError(503, trouble, kind="service_unavailable", code="not_ready")
        return JSONResponse({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__, "backend": "vllm"})

    async def metrics(self, request: Request) -> Response:
        _ = self.served
        return await self._pass_on(request)

    async def forward(self, request: Request) -> Response:
        path = request.url.path
        if path not in PASSED and not path.startswith("/v1/models/"):
            raise ApiError(404, "there is no such route", code="not_found")
        if path not in GENERATING or request.method != "POST":
            return await self._pass_on(request)
        self.enter(1, self.max_requests)
        letters: list[Path] = []

        async def leave() -> None:
            self.leave(1)
            for letter in letters:
                letter.unlink(missing_ok=True)

        try:
            content = await self._translated(path, await request.body(), letters)
            return await self._pass_on(request, content, leave)
        except BaseException:
            await leave()
            raise

    async def _pass_on(
        self,
        request: Request,
        content: bytes | None = None,
        leave: Callable[[], Any] | None = None,
    ) -> Response:
        """vLLM's answer. `leave` is awaited when a request that did not raise has ended."""
        if content is None:
            content = await request.body()
        asked = self._client.build_request(
            request.method,
            request.url.path,
            content=content,
            headers={"content-type": "application/json"},
        )
        try:
            sending = self._client.send(asked, stream=True)
            response = await until_disconnect(request, sending)
        except httpx.HTTPError:
            raise stopped() from None
        kind = response.headers.get("content-type", "application/json")
        if kind.startswith("text/event-stream"):
            stream = self._frames(response, leave)
            return EventStream(stream, send_timeout_s=self.config.send_timeout_s)
        try:
            body = await until_disconnect(request, response.aread())
        except httpx.HTTPError:
            raise stopped() from None
        finally:
            await response.aclose()
        if leave is not None:
            await leave()
        return Response(body, response.status_code, media_type=kind)

    async def _frames(
        self, response: httpx.Response, leave: Callable[[], Any] | None
    ) -> AsyncGenerator[bytes, None]:
        """vLLM's events, each whole; if they break off, an error and the end."""
        rest, is_over, begun = b"", False, False
        try:
            with contextlib.suppress(httpx.HTTPError):
                async for piece in response.aiter_bytes():
                    whole, cut, rest = (rest + piece).rpartition(b"\n\n")
                    if cut:
                        begun = True
                        is_over = is_over or DONE.strip() in whole
                        yield whole + cut
            if not begun:
                raise stopped()
            if not is_over:
                yield frame(stopped().body()) + DONE
        finally:
            await response.aclose()
            if leave is not None:
                await leave()

    # --- what vLLM does not know ---------------------------------------------------------------

    async def _translated(self, path: str, content: bytes, letters: list[Path]) -> bytes:
        """The body for vLLM, without our own fields; ApiError for what vLLM would ignore."""
        try:
            body = json.loads(content)
        except ValueError:
            return content  # vLLM explains the error
        if not isinstance(body, dict):
            return content
        if body.get("speculation") is not None:
            raise ApiError(
                400, "vLLM drafts alike for all requests: leave it out", param="speculation"
            )
        if self._no_sampling is not None and body.get("temperature") != 0:
            raise ApiError(400, self._no_sampling, param="temperature")
        prediction = body.pop("prediction", None)
        if prediction is None:
            return content
        if self._mailbox is None:
            raise ApiError(
                400,
                "this server does not draft from predictions: --proposer prediction does",
                param="prediction",
            )
        prompts = await self._prompts(path, body)
        guess = await self._tokens(
            {"prompt": predicted_text(prediction), "add_special_tokens": False}
        )
        letters += [self._mailbox.put(prompt, guess) for prompt in prompts]
        return json.dumps(body).encode()

    async def _prompts(self, path: str, body: dict[str, Any]) -> list[list[int]]:
        if path == "/v1/chat/completions":
            about = {"messages": body.get("messages")}
            for name in ("chat_template", "chat_template_kwargs", "tools"):
                if name in body:
                    about[name] = body[name]
            return [await self._tokens(about)]
        prompt = body.get("prompt")
        prompts: list[Any] = prompt if isinstance(prompt, list) else [prompt]
        if prompts and all(isinstance(part, int) for part in prompts):
            return [prompts]
        return [
            part if isinstance(part, list) else await self._tokens({"prompt": part})
            for part in prompts
        ]

    async def _tokens(self, about: dict[str, Any]) -> list[int]:
        try:
            answer = await self._client.post(
                "/tokenize", json={"model": self.config.model_name, **about}
            )
            tokens: list[int] = answer.json()["tokens"]
        except httpx.HTTPError:
            raise stopped() from None
        except (ValueError, KeyError, TypeError):
            raise ApiError(400, "the prompt cannot be tokenised", param="prompt") from None
        return tokens


def predicted_text(prediction: object) -> str:
    """The text of OpenAI's `prediction`: a string, or parts with a text each."""
    content = prediction.get("content") if isinstance(prediction, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, "prediction.content must be text", param="prediction")
    return "".join(map(str, texts))


def make_front(front: Front) -> Guard:
    """The ASGI application over one front, which it starts."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        front.start()
        yield

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientLeft):
            return Response(status_code=499)
        found = api_error(error)
        return JSONResponse(found.body(), status_code=found.status, headers=found.headers())

    kinds: list[type[Exception]] = [Exception, ApiError, ClientLeft, OutriderError]
    app = Starlette(
        routes=[
            Route("/health", front.health),
            Route("/version", front.version),
            Route("/metrics", front.metrics),
            Route("/{path:path}", front.forward, methods=["GET", "POST"]),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys(kinds, answer),
    )
    return Guard(app, front)
