"""One engine for all routes, from loading to draining.

Everything here belongs to the server's event loop. The engine has its own thread, and so has
loading, so that the process answers (503) and can be stopped while it loads.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from outrider.config import SamplingParams
from outrider.contracts import HasModel
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.engine import Engine
from outrider.errors import OutriderError, RequestError
from outrider.model.chat_template import PLAIN, ChatTemplate, load_template
from outrider.model.tokenizer import Tokenizer
from outrider.model.weights import read_generation_config
from outrider.options import http_defaults
from outrider.server.errors import ApiError, overloaded
from outrider.server.grammars import Grammars
from outrider.server.memory import Populates, Populating, Store
from outrider.server.metrics import Metrics
from outrider.server.reading import HARMONY
from outrider.server.reading.formats import (
    ReasoningForm,
    ToolForm,
    reasoning_form,
    tool_form,
)
from outrider.server.texts import TokenTexts
from outrider.server.tracing import Tracing
from outrider.server_config import ServerConfig

if TYPE_CHECKING:
    from outrider.server.learning import Learning

logger = logging.getLogger(__name__)


class State(enum.Enum):
    LOADING = "the model is loading"
    READY = "ready"
    DRAINING = "the server is shutting down"
    FAILED = "the engine has stopped"


class Lifecycle:
    """The state of a server, and how many sequences are in flight."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.state = State.LOADING
        self.was_ready = False
        self.failure: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None  # the server can serve no more
        self.num_in_flight = 0
        self.idle_since_s = monotonic()
        self._idle = asyncio.Event()

    def check_ready(self) -> None:
        """Raises ApiError (503) while there is nothing to serve."""
        if self.state is not State.READY:
            raise overloaded(self.state.value, code=self.state.name.lower())

    def enter(self, num: int, limit: int) -> None:
        """Counts `num` sequences as in flight until they `leave`; ApiError (503) beyond `limit`."""
        if self.num_in_flight + num > limit:
            raise overloaded("the queue is full: try again later", code="queue_full")
        self.num_in_flight += num

    @property
    def is_idle(self) -> bool:
        return self.num_in_flight == 0

    def leave(self, num: int) -> None:
        self.num_in_flight -= num
        if self.num_in_flight == 0:
            self.idle_since_s = monotonic()
            self._idle.set()

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self.state = State.FAILED
        self.on_end()

    async def drain(self) -> bool:
        """Takes no more requests and waits for those in flight; True if all have ended."""
        self.state = State.DRAINING
        if self.num_in_flight == 0:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout_s)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True)
class Forms:
    """How the model writes reasoning and tool calls."""

    tools: ToolForm
    reasoning: ReasoningForm | None
    are_special: bool  # whether marks are tokens that texts usually leave out

    @classmethod
    def of(cls, config: ServerConfig, template: ChatTemplate, tokenizer: Tokenizer) -> Forms:
        tools = tool_form(template.source, config.tool_call_parser)
        reasoning = None
        if tools.name != HARMONY:
            reasoning = reasoning_form(template.source, config.reasoning_parser)
        marks = [*tools.marks, *tools.ends, *tools.call, *tools.around]
        if reasoning is not None:
            marks += [reasoning.opening, reasoning.closing]
        special = [text for text, id in tokenizer.added.items() if id in tokenizer.special_ids]
        found = any(text in mark for mark in marks for text in special)
        return cls(tools, reasoning, found)


@dataclass(frozen=True)
class Served:
    """What the routes use once the model is loaded."""

    engine: AsyncEngine
    core: Engine  # owned by the engine's thread: read-only here
    tokenizer: Tokenizer
    template: ChatTemplate
    texts: TokenTexts
    grammars: Grammars
    proposers: frozenset[str]  # that requests may name
    forms: Forms
    defaults: Mapping[str, Any]  # sampling parameters of requests that leave them out

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self.tokenizer.added

    @property
    def has_template(self) -> bool:
        return self.template.source != PLAIN

    @property
    def max_model_len(self) -> int:
        return self.core.scheduler.max_positions


def _defaults(config: ServerConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The sampling parameters of requests that leave them out: those of the command line, then the
    model's own, then those of the API."""
    own = {} if not config.generation_defaults else _model_defaults(tokenizer)
    return {**http_defaults(SamplingParams), **own, **config.sampling}


def _model_defaults(tokenizer: Tokenizer) -> dict[str, Any]:
    own = read_generation_config(tokenizer.folder)
    if own.get("do_sample") is False:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: own[name] for name in names if isinstance(own.get(name), (int, float))}
    try:
        SamplingParams(**given)
    except RequestError as error:
        logger.warning("generation_config.json is not used: %s", error)
        return {}
    return given


class Service(Lifecycle):
    def __init__(self, config: ServerConfig, load: Callable[[], Engine]) -> None:
        """`load` builds the engine; it is called once, in a thread of its own, by `start`."""
        super().__init__(config)
        self.metrics = Metrics(config.model_name)
        self.tracing = None if config.otlp_endpoint is None else Tracing(config.otlp_endpoint)
        self.on_ready: Callable[[], None] = lambda: None  # everything is loaded
        self.loader: threading.Thread | None = None
        self.started_at = int(time.time())
        self._load = load
        self._served: Served | None = None
        self._populating: Populating | None = None
        self.learning: Learning | None = None

    # --- from loading to the end -------------------------------------------------------------

    def start(self) -> None:
        """Begins to load. Call it on the running loop."""
        loop = asyncio.get_running_loop()
        started = monotonic()

        def load() -> None:
            try:
                core = self._load()
                if self.config.learn:
                    from outrider.server.learning import learnable

                    learnable(core, per_key=self.config.learn_per_key)
                for name in self.config.proposers:
                    core.proposers[name]  # built now, not during a request
                template, own = load_template(core.tokenizer, self.config.chat_template)
                texts = TokenTexts(core.tokenizer)
                forms = Forms.of(self.config, template, core.tokenizer)
            except BaseException as error:
                loop.call_soon_threadsafe(self.fail, error)
                return
            if not own:
                logger.warning("no chat template: chat messages are joined into plain text")
            loop.call_soon_threadsafe(
                self._loaded, core, template, forms, texts, monotonic() - started
            )

        self.loader = threading.Thread(target=load, name="outrider-load", daemon=True)
        self.loader.start()

    def _loaded(
        self,
        core: Engine,
        template: ChatTemplate,
        forms: Forms,
        texts: TokenTexts,
        load_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        named = {*self.config.proposers, *core.drafters}
        if core.default.proposer is not None:
            named.add(core.default.proposer)
        self.metrics.watch(core)

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(self.fail, error)

        engine = AsyncEngine(core, on_failure=failed)
        self._served = Served(
            engine=engine,
            core=core,
            tokenizer=core.tokenizer,
            template=template,
            texts=texts,
            grammars=Grammars(core),
            proposers=frozenset(named),
            forms=forms,
            defaults=_defaults(self.config, core.tokenizer),
        )
        drafters = [core.proposers[name] for name in sorted(named)]
        models = [d.model for d in drafters if isinstance(d, HasModel)]
        num_slots = core.kv.num_blocks * core.kv.block_size
        stores = [
            Store(model, num_slots * model.spec.kv_bytes_per_token)
            for model in (core.target, *models)
            if model is not None and isinstance(model, Populates)
        ]
        self._populating = Populating(
            stores, core.kv.starts, lambda: core.kv.fill, lambda: self.is_idle
        )
        if self.config.learn:
            from outrider.server.learning import Learning

            try:
                self.learning = Learning(self, self._served, loop)
            except OutriderError as error:  # a folder that cannot be used
                self.fail(error)
                return
            self.metrics.learner = self.learning.learner
        self.was_ready = True
        if self.state is State.LOADING:
            self.state = State.READY
        self.on_ready()
        logger.info("ready", extra={"model": self.config.model_name, "load_s": round(load_s, 3)})

    async def close(self, timeout_s: float = 2.0) -> bool:
        """Ends the engine; False if its thread could not be ended."""
        if self._populating is not None:
            self._populating.stop()
        if self.learning is not None:
            await asyncio.to_thread(self.learning.stop, timeout_s)
        closed = self._served is None or await self._served.engine.close(timeout_s)
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        return closed

    # --- for the routes ------------------------------------------------------------------------

    @property
    def served(self) -> Served:
        """Raises ApiError (503) while there is nothing to serve."""
        self.check_ready()
        assert self._served is not None
        return self._served

    @property
    def trouble(self) -> str | None:
        """Why /health fails; None: it does not."""
        if self.state is not State.READY or self._served is None:
            return self.state.value
        if self._served.engine.stalled_s > self.config.stall_timeout_s:
            return "the engine does not answer"
        return None

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Admits that many sequences while the block runs; ApiError if there is no room."""
        max_running = self.served.core.scheduler.config.max_sequences
        limit = max_running + self.config.max_queue
        if num_sequences > limit:
            raise ApiError(
                400, f"at most {limit} completions at once, not {num_sequences}", param="n"
            )
        self.enter(num_sequences, limit)
        try:
            yield
        finally:
            self.leave(num_sequences)

    def salt(self, key: str | None, own: str | None) -> str:
        """Separates the cached prefixes and stores of one tenant from those of others.

        A digest, so that no key is kept beside the data that it protects.
        """
        if key is None and own is None:
            return ""
        parts = "\0".join([key or "", own or ""])
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()
