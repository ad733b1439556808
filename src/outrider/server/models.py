"""Several models in one process: loaded when a request names them, unloaded when nothing does.

Each model is a whole service with its own routes. This application picks one by the `model` of
the body, loads it if need be, and hands the request on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.server.app import card, error_body, make_routes
from outrider.server.errors import ApiError, api_error, overloaded
from outrider.server.guards import OPEN_PATHS, Guard
from outrider.server.pages import home_page, page_file
from outrider.server.service import Lifecycle, Service, State
from outrider.server_config import ServerConfig

logger = logging.getLogger(__name__)

Load = Callable[[Path], Engine]
CHECK_S = 0.25  # between two looks for idle models
WAIT_S = 0.02  # between two looks whether a model is loaded


@dataclass(slots=True, eq=False)
class Entry:
    """A model that is loaded or loading."""

    service: Service
    routes: FastAPI
    num_bytes: int
    num_active: int = 0  # requests
    used_at: float = 0.0
    gone: bool = False


def find_models(folder: Path) -> dict[str, Path]:
    """Name -> folder or file of every model in a folder; ConfigError if there is none."""
    if not folder.is_dir():
        raise ConfigError(f"--models-dir: there is no folder {folder}")
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "config.json").is_file():
            found[path.name] = path
        elif path.suffix == ".gguf":
            found[path.stem] = path
    if not found:
        raise ConfigError(f"{folder} holds no models: folders with config.json, or .gguf files")
    return found


def size_of(path: Path) -> int:
    """The bytes of a model's weights."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


class Models(Lifecycle):
    """All models of a folder, as one service for the guard and the process."""

    def __init__(self, config: ServerConfig, models: Mapping[str, Path], load: Load) -> None:
        super().__init__(config)
        self.state = State.READY
        self.was_ready = True
        self.paths = dict(models)
        self.started_at = int(time.time())
        self._load = load
        self._entries: dict[str, Entry] = {}
        self._changing = asyncio.Lock()  # one model is loaded or unloaded at a time
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def served(self) -> object:
        self.check_ready()
        return self

    @property
    def loaded(self) -> list[str]:
        return list(self._entries)

    def start(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def close(self, timeout_s: float = 2.0) -> bool:
        if self._sweeper is not None:
            self._sweeper.cancel()
        names = list(self._entries)
        return all([await self._unload(name, timeout_s) for name in names])

    # --- one model ---------------------------------------------------------------------------

    def name_of(self, asked: str | None) -> str:
        """The model that a request means; without a name, the one that was used last."""
        if asked is not None:
            for name in (asked, asked.removesuffix(":latest")):
                if name in self.paths:
                    return name
            if not self.config.any_model_name:
                raise ApiError(
                    404,
                    f"the model {asked!r} is not served here; /v1/models lists what is",
                    kind="not_found_error",
                    param="model",
                    code="model_not_found",
                )
        last = max(self._entries, key=lambda name: self._entries[name].used_at, default=None)
        return last or next(iter(self.paths))

    @contextlib.asynccontextmanager
    async def using(self, name: str) -> Any:
        """The entry of a model, loaded; it stays so within the block."""
        async with self._changing:
            entry = self._entries.get(name) or await self._begin(name)
            entry.num_active += 1
        try:
            while entry.service.state is State.LOADING:
                await asyncio.sleep(WAIT_S)
            if self._has_failed(entry):
                if entry.service.failure is not None and not entry.service.was_ready:
                    logger.error("cannot load %s: %s", name, entry.service.failure)
                raise ApiError(503, f"the model {name!r} cannot be loaded", code="model_failed")
            yield entry
        finally:
            entry.num_active -= 1
            entry.used_at = monotonic()
            if self._has_failed(entry) and not entry.gone:
                await self._unload(name, 0.0)

    @staticmethod
    def _has_failed(entry: Entry) -> bool:
        return entry.service.state is State.FAILED

    async def _begin(self, name: str) -> Entry:
        num_bytes = size_of(self.paths[name])
        limit = self.config.models_memory
        if limit is not None:
            if num_bytes > limit:
                raise ApiError(503, f"the model {name!r} is larger than --models-memory")
            await self._make_room(limit - num_bytes)
        path = self.paths[name]
        config = replace(self.config, model_name=name, any_model_name=True)
        service = Service(config, lambda: self._load(path))
        entry = Entry(service, make_routes(service), num_bytes, used_at=monotonic())
        self._entries[name] = entry
        service.start()
        return entry

    async def _make_room(self, limit: int) -> None:
        """Unloads idle models, the longest unused first, until the others have `limit` bytes."""
        idle = sorted(
            (name for name, entry in self._entries.items() if not entry.num_active),
            key=lambda name: self._entries[name].used_at,
        )
        while sum(entry.num_bytes for entry in self._entries.values()) > limit:
            if not idle:
                raise overloaded("other models are in use and fill the memory", "memory_full")
            await self._unload(idle.pop(0))

    async def _unload(self, name: str, timeout_s: float = 2.0) -> bool:
        entry = self._entries.pop(name)
        entry.gone = True
        closed = await entry.service.close(timeout_s)
        del entry
        gc.collect()
        logger.info("unloaded", extra={"model": name})
        return closed

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            async with self._changing:
                oldest = monotonic() - self.config.model_idle_s
                for name, entry in list(self._entries.items()):
                    is_loading = entry.service.state is State.LOADING
                    if not entry.num_active and entry.used_at < oldest and not is_loading:
                        await self._unload(name)

    # --- all models --------------------------------------------------------------------------

    def cards(self) -> list[dict[str, Any]]:
        found = []
        for name in self.paths:
            entry = self._entries.get(name)
            is_ready = entry is not None and entry.service.state is State.READY
            facts: dict[str, Any] = {"id": name, "object": "model", "owned_by": "outrider"}
            facts["created"] = self.started_at
            if entry is not None and is_ready:
                facts = card(entry.service, name)
            found.append(facts | {"loaded": is_ready})
        return found

    def metrics(self) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Merged(entry.service for entry in self._entries.values()))
        return generate_latest(registry)


class _Merged:
    """The metrics of several services, one family of each name."""

    def __init__(self, services: Iterable[Service]) -> None:
        self._services = list(services)

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for service in self._services:
            for family in service.metrics.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        yield from found.values()


class Switch:
    """The ASGI application: hands each request to the routes of its model."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        models = self._models
        try:
            models.enter(1, 1 << 30)
            try:
                await self._route(scope, receive, send)
            finally:
                models.leave(1)
        except ApiError as error:
            await _answer_error(scope, error)(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._models.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        models, path = self._models, scope["path"]
        own = self._own(path)
        if own is not None:
            await own(scope, receive, send)
            return
        models.check_ready()
        message = await receive()  # the guard has the whole body
        name = models.name_of(_model_in(message.get("body", b""), path))
        replayed = False

        async def replay() -> Any:
            nonlocal replayed
            if not replayed:
                replayed = True
                return message
            return await receive()

        async with models.using(name) as entry:
            scope["app"] = entry.routes
            await entry.routes(scope, replay, send)

    def _own(self, path: str) -> Response | None:
        """What concerns all models."""
        models = self._models
        if path in OPEN_PATHS:
            models.check_ready()
            return JSONResponse({"status": "ok", "loaded": models.loaded})
        if path == "/metrics":
            return Response(models.metrics(), media_type="text/plain; version=0.0.4")
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": models.cards()})
        if path == "/api/tags":
            names = [{"name": name, "model": name} for name in models.paths]
            return JSONResponse({"models": names})
        if path == "/":
            return home_page({"Models": ", ".join(models.paths)})
        return page_file(path)


def _answer_error(scope: Scope, error: ApiError) -> Response:
    body = error_body(scope["path"], api_error(error))
    return JSONResponse(body, status_code=error.status, headers=error.headers())


def _model_in(body: bytes, path: str) -> str | None:
    """The model that a body names, or the path."""
    if path.startswith("/v1/models/"):
        return path.removeprefix("/v1/models/")
    try:
        found = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return None
    name = found.get("model") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def make_models_app(models: Models) -> Guard:
    return Guard(Switch(models), models, error_body)
