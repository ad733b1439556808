"""Grammars of requests: compiled outside the event loop, one at a time, and cached.

A small grammar can take long to compile. The work (see `outrider.grammar`) and the time are
limited, and compiling has its own thread, so that a bad grammar delays only other grammars.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from outrider.engine.engine import Engine
from outrider.errors import ConfigError, RequestError
from outrider.grammar import Grammar, GrammarVocabulary
from outrider.server.errors import ApiError

TIMEOUT_S = 5.0
NUM_KEPT = 64
MAX_PENDING = 16


class Wanted(NamedTuple):
    kind: Literal["json", "regex", "choice", "lark", "gbnf"]
    source: str


class Grammars:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocabulary: GrammarVocabulary | None = None  # built with the first grammar
        self._kept: OrderedDict[Wanted, Grammar] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outrider-grammar")
        self.num_pending = 0

    async def compile(self, wanted: Wanted | None) -> Grammar | None:
        """The grammar; None for None. Raises RequestError or ApiError if it cannot be compiled."""
        if wanted is None:
            return None
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            return self._kept[wanted]
        if self.num_pending >= MAX_PENDING:
            raise ApiError(429, "too many grammars are waiting to be compiled", retry_after_s=2)
        self.num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._worker, self.build, wanted)
        work.add_done_callback(self._compiled)
        try:
            grammar = await asyncio.wait_for(asyncio.shield(work), TIMEOUT_S)
        except TimeoutError:
            raise RequestError("the grammar takes too long to compile", "response_format") from None
        except ConfigError as error:  # no such package, no end-of-text token
            raise ApiError(400, str(error), param="response_format") from error
        self._kept[wanted] = grammar
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return grammar

    def _compiled(self, work: asyncio.Future[Grammar]) -> None:
        self.num_pending -= 1
        if not work.cancelled():
            work.exception()  # marks the exception as retrieved if the client has left

    def build(self, wanted: Wanted) -> Grammar:
        if self._vocabulary is None:
            spec = self._engine.target.spec
            self._vocabulary = GrammarVocabulary(
                self._engine.tokenizer, spec.num_tokens, spec.eos_ids
            )
        if wanted.kind == "json":
            return Grammar.json_schema(self._vocabulary, wanted.source)
        if wanted.kind == "regex":
            return Grammar.regex(self._vocabulary, wanted.source)
        if wanted.kind == "choice":
            return Grammar.choice(self._vocabulary, json.loads(wanted.source))
        if wanted.kind == "gbnf":
            return Grammar.gbnf(self._vocabulary, wanted.source)
        return Grammar.lark(self._vocabulary, wanted.source)
