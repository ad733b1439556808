"""The checks of every request before its route: key, host, size and time of the body.

They read the raw path and headers of the connection, never a URL built from them, so that a strange
Host header cannot make one route look like another.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable
from hmac import compare_digest
from time import monotonic
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server import logs
from outrider.server.errors import ApiError, api_error
from outrider.server.tracing import traceparent
from outrider.server_config import ServerConfig

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ping"})  # need no key
ALWAYS_PATHS = OPEN_PATHS | {"/metrics", "/version"}  # also while loading or draining
# Of the API, what the chat page uses. A page of another site cannot: it may not send JSON here.
PAGE_PATHS = frozenset({"/v1/chat/completions", "/v1/models"})
# SageMaker has one route: a field of the body says which of ours is meant.
INVOCATIONS = "/invocations"
INVOKED = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "documents": "/v1/rerank",
    "input": "/v1/embeddings",
}
SHORT_PATHS = frozenset(
    {
        *("/chat/completions", "/models", "/responses", "/messages"),
        *("/chat/completions/input_tokens", "/responses/input_tokens", "/messages/count_tokens"),
    }
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?", re.IGNORECASE)
_LOCAL_ORIGIN = re.compile(rf"https?://{_LOCAL_HOST.pattern}", re.IGNORECASE)
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
]


class Guarded(Protocol):
    """The service that the routes use."""

    @property
    def config(self) -> ServerConfig: ...

    @property
    def served(self) -> object:
        """Raises ApiError (503) while there is nothing to serve."""
        ...


class Guard:
    """An ASGI app around the routes. Sets `state["key"]` and `state["request_id"]` of the scope."""

    def __init__(
        self,
        app: ASGIApp,
        service: Guarded,
        error_body: Callable[[str, ApiError], dict[str, Any]] | None = None,
    ) -> None:
        """`error_body` writes an error as the clients of a path expect it."""
        self._app = app
        self._error_body = error_body or (lambda path, error: error.body())
        self._service = service
        self._keys = [key.encode() for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no web sockets: the connection is closed
        scope = self._within_root(scope)
        started = monotonic()
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        logs.request_id.set(request_id)
        traceparent.set(_latin(headers.get(b"traceparent", b"")))
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        cors = self._cors(headers.get(b"origin"))
        is_head = scope["method"] == "HEAD"

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.body" and is_head:
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = {name for name, _ in message["headers"]}
                extra = [(name, value) for name, value in _HEADERS if name not in sent]
                own = [*message["headers"], *extra, *cors]
                own.append((b"x-request-id", request_id.encode()))
                message = {**message, "headers": own}
            await send(message)

        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _preflight(headers, answer, allowed=bool(cors))
            return
        try:
            scope["state"]["key"] = self._check(scope, headers)
            routed = {**scope, "path": _tidy(scope["path"])}
            routed["raw_path"] = routed["path"].encode()
            if is_head:
                routed["method"] = "GET"
            body, replayed = await self._read_body(headers, receive)
            if routed["path"] == INVOCATIONS:
                routed["path"] = _invoked(body)
        except ApiError as error:
            await self._refuse(scope, error, answer)
        else:
            try:
                await self._app(routed, replayed, answer)
            except (
                Exception
            ) as error:  # the app has logged it, and answered it if there is a status
                if not status:
                    await self._refuse(scope, api_error(error), answer)
        finally:
            self._log(scope, status, monotonic() - started)

    def _within_root(self, scope: Scope) -> Scope:
        """Without the part of the path that belongs to a proxy before this server."""
        root = (self._service.config.root_path or "").rstrip("/")
        path = scope["path"]
        if not root or not path.startswith(f"{root}/"):
            return scope
        return {**scope, "path": path[len(root) :]}

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
        """The key of the request; ApiError if the request is not allowed."""
        path, method = scope["path"], scope["method"]
        if path in OPEN_PATHS:
            return None
        key = self._key(_authorization(headers), path)
        # A web page in a browser can reach a local port under a domain name of its own.
        if not self._keys and not self._is_known(_latin(headers.get(b"host", b""))):
            raise ApiError(
                403,
                "this server answers to local names only; start it with --allow-host NAME "
                "or with a key (OUTRIDER_API_KEY)",
                code="forbidden_host",
            )
        if path not in ALWAYS_PATHS:
            _ = self._service.served  # 503 while there is nothing to serve
        if method == "POST":
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind != b"application/json" and not _is_lenient(path, headers):
                raise ApiError(415, "the body must be application/json", code="unsupported_media")
            if kind != b"application/json":
                others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
                scope["headers"] = [*others, (b"content-type", b"application/json")]
        return key

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if re.search(r":\d{1,5}$", host) else host
        return bool(_LOCAL_HOST.fullmatch(host)) or name in self._service.config.allow_hosts

    def _key(self, authorization: bytes, path: str) -> str | None:
        if not self._keys:
            return None
        scheme, _, given = authorization.partition(b" ")
        given = given.strip()
        if scheme.lower() == b"basic" and (_is_live(path) or path in PAGE_PATHS):
            scheme, given = b"bearer", _password(given)
        # Compares with every key in constant time, so that timing reveals nothing about keys.
        matches = [compare_digest(given, key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
            )
        return given.decode("ascii")

    async def _read_body(
        self, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[bytes, Receive]:
        """Reads the whole body, within limits; returns it with a `receive` that replays it."""
        limit = self._service.config.max_body_bytes
        too_large = ApiError(413, f"the body may have {limit} bytes", code="body_too_large")
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > limit:
            raise too_large
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._service.config.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        break  # the client has left: the route will notice
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise ApiError(408, "the body took too long to arrive", code="body_timeout") from None
        body = b"".join(pieces)
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal whole
            if whole is not None:
                message, whole = whole, None
                return message
            return await receive()

        return body, replay

    def _cors(self, origin: bytes | None) -> list[tuple[bytes, bytes]]:
        """The headers that let a web page of this origin read the answer; none: it may not."""
        allowed, name = self._service.config.cors_origins, _latin(origin or b"")
        is_local = "localhost" in allowed and _LOCAL_ORIGIN.fullmatch(name)
        if origin is None or not (is_local or "*" in allowed or name in allowed):
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"origin")]

    async def _refuse(self, scope: Scope, error: ApiError, send: Send) -> None:
        """Answers a request that reaches no route."""
        path = scope["path"]
        scope["state"].setdefault("log", {})["error"] = error.message
        content = json.dumps(self._error_body(path, error)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *((name.encode(), value.encode()) for name, value in error.headers().items()),
        ]
        if error.status == 401:
            headers.append((b"www-authenticate", _challenge(path)))
        if error.status in (408, 413):  # the rest of the body stays unread
            headers.append((b"connection", b"close"))
        start = {"type": "http.response.start", "status": error.status, "headers": headers}
        with contextlib.suppress(OSError):
            await send(start)
            await send({"type": "http.response.body", "body": content, "more_body": False})

    def _log(self, scope: Scope, status: int, duration_s: float) -> None:
        state = scope["state"]
        # Load balancers and dashboards ask every few seconds.
        is_poll = scope["path"] in (*OPEN_PATHS, "/metrics") and status == 200
        logger.log(
            logging.DEBUG if is_poll else logging.INFO,
            "request",
            extra={
                "request_id": state["request_id"],
                "method": scope["method"],
                "path": _printable(scope["path"]),
                "status": status,
                "duration_s": round(duration_s, 4),
                **state.get("log", {}),
            },
        )


def _tidy(path: str) -> str:
    """Without double and trailing slashes, and with /v1 where llama-server needs none."""
    path = "/" + re.sub(r"/+", "/", path).strip("/")
    return f"/v1{path}" if path in SHORT_PATHS else path


def _invoked(body: bytes) -> str:
    """The route that a body for SageMaker is meant for."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(body)
        if isinstance(given, dict):
            return next((path for name, path in INVOKED.items() if name in given), INVOCATIONS)
    return INVOCATIONS


async def _preflight(headers: dict[bytes, bytes], send: Send, *, allowed: bool) -> None:
    """A browser asks whether a page of another origin may send a request."""
    wanted = headers.get(b"access-control-request-headers", b"content-type")
    found = [(b"content-length", b"0")]
    if allowed:
        found += [
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", wanted),
            (b"access-control-max-age", b"600"),
        ]
    await send({"type": "http.response.start", "status": 200, "headers": found})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _authorization(headers: dict[bytes, bytes]) -> bytes:
    """Anthropic's clients send the key in a header of its own."""
    key = headers.get(b"x-api-key")
    return headers.get(b"authorization", b"") if key is None else b"Bearer " + key


def _is_lenient(path: str, headers: dict[bytes, bytes]) -> bool:
    """Ollama's users leave out the content type. A web page of another site could do so as well,
    but a browser says where a request comes from."""
    return path.startswith("/api/") and not {b"origin", b"sec-fetch-site"} & headers.keys()


def _is_live(path: str) -> bool:
    """Whether a path is for browsers, which send a password instead of a bearer token."""
    is_page = path in ("/", "/live", "/docs", "/openapi.json")
    return is_page or path.startswith(("/live/", "/page/"))


def _challenge(path: str) -> bytes:
    return b'Basic realm="outrider: the password is an API key"' if _is_live(path) else b"Bearer"


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _request_id(given: bytes) -> str:
    text = _latin(given)
    return text if _REQUEST_ID.fullmatch(text) else secrets.token_hex(12)


def _latin(value: bytes) -> str:
    return value.decode("latin-1")


def _printable(path: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in path[:128])
