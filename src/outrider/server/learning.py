"""`outrider serve --learn`: a thread that learns while the server is idle.

It computes with one thread and a low priority, rests so that it stays within its share of a core,
and stops between two rows when a request arrives. States and swaps are commands to the engine's
thread, which runs them between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from outrider.engine.embed import states_of
from outrider.engine.engine import Engine, Result
from outrider.errors import ConfigError, EngineError, Overloaded
from outrider.learn.learner import Learner
from outrider.model.native_model import NativeModel
from outrider.proposers.eagle3 import Eagle3Proposer
from outrider.proposers.per_salt import PerSalt

if TYPE_CHECKING:
    from outrider.server.generation import Ask
    from outrider.server.service import Served, Service

logger = logging.getLogger(__name__)

QUIET_S = 0.5  # without a request, before learning goes on
LOOK_S = 0.1  # between two looks whether there is something to do
NICENESS = 10
T = TypeVar("T")


class Stopped(Exception):
    """The server ends."""


def learnable(core: Engine, *, per_key: bool) -> tuple[str, Eagle3Proposer]:
    """The proposer whose head can learn, and its name; ConfigError if there is none."""
    default = core.default.proposer
    names = [name for name in (default, *core.drafters, Eagle3Proposer.name) if name is not None]
    for name in names if not per_key else names[:1]:
        with contextlib.suppress(ConfigError):  # this target has no head of this kind
            proposer = core.proposers[name]
            if isinstance(proposer, Eagle3Proposer) and proposer.can_learn:
                return name, proposer
    raise ConfigError(
        f"{'--learn-per-key' if per_key else '--learn'} needs an EAGLE-3 head on a CPU as drafter: "
        "pass --draft-model FOLDER; 'outrider train eagle3' makes one"
    )


class Learning:
    """Connects a learner with a service; see `learn.learner.Server`."""

    def __init__(self, service: Service, served: Served, loop: asyncio.AbstractEventLoop) -> None:
        self._service, self._served, self._loop = service, served, loop
        config, core = service.config, served.core
        self._name, proposer = learnable(core, per_key=config.learn_per_key)
        self._per_key, self._share = config.learn_per_key, config.learn_cpu
        self._by_salt: PerSalt | None = None
        if self._per_key:
            self._by_salt = PerSalt(proposer)
            core.proposers[self._name] = self._by_salt
        self._stopped = threading.Event()
        self._busy_at = self._worked_s = 0.0
        self.learner = Learner(
            proposer.loaded.head,
            proposer.loaded.borrowed,
            core.target.spec.num_layers,
            self,
            every=config.learn_every,
            folder=None if config.learn_folder is None else Path(config.learn_folder),
            pause=self._pause,
        )
        self._is_native = isinstance(core.target, NativeModel)
        self._thread = threading.Thread(target=self._run, name="outrider-learn", daemon=True)
        self._thread.start()

    def see(self, ask: Ask, result: Result) -> None:
        """Collects a finished request. Shared learning leaves out requests with a salt of their
        own, which asked that nothing of them affects others."""
        if ask.is_isolated and not self._per_key:
            return
        self.learner.see(
            ask.salt if self._per_key else "",
            result.prompt_tokens,
            [completion.tokens for completion in result.completions],
            result.stats,
            temperature=ask.params.temperature,
        )

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._thread.join(timeout_s)

    # --- what the learner asks for; in its thread --------------------------------------------

    def states(self, tokens: list[int], taps: tuple[int, ...]) -> Mapping[int, Tensor]:
        while True:
            began = time.monotonic()
            with contextlib.suppress(Overloaded):  # requests need the KV cache: later
                found = self._call(lambda engine: states_of(engine, tokens, taps))
                self._worked_s += time.monotonic() - began
                return found
            self._wait(QUIET_S)

    def swap(self, scope: str, weights: Mapping[str, Tensor] | None) -> None:
        def work(engine: Engine) -> None:
            if self._by_salt is not None:
                self._by_salt.take(scope, weights)
            elif weights is not None:
                engine.replace_weights(self._name, weights)

        self._call(work)

    def _call(self, work: Callable[[Engine], T]) -> T:
        """Runs between two steps of the engine; the result."""
        future = asyncio.run_coroutine_threadsafe(self._served.engine.call(work), self._loop)
        while True:
            try:
                return future.result(LOOK_S)
            except TimeoutError:
                if future.done():  # since a moment ago, or with a TimeoutError of its own
                    return future.result()
                if self._stopped.is_set():
                    future.cancel()
                    raise Stopped from None

    # --- its time ----------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        if self._is_native:  # torch computes nothing else in this process
            torch.set_num_threads(1)
        try:
            self.learner.restore(None if self._per_key else "")
            while not self._stopped.is_set():
                if self.learner.run_next() is None:
                    self._wait(LOOK_S)
        except (Stopped, EngineError):
            pass
        except Exception:  # costs speed, never a request
            logger.exception("learning has ended; the server goes on with the weights it has")

    def _pause(self) -> None:
        """Rests for as long as the share demands, then until no request has run for a while."""
        now_s = time.thread_time()
        self._wait((now_s - self._busy_at + self._worked_s) * (1 / self._share - 1))
        service = self._service
        while not service.is_idle or time.monotonic() - service.idle_since_s < QUIET_S:
            self._wait(LOOK_S / 10)
        self._busy_at, self._worked_s = time.thread_time(), 0.0

    def _wait(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise Stopped
