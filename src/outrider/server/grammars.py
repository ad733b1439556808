"""Grammars for requests: compiled off the event loop, one at a time, and kept for the next.

Compiling is the one thing a client can make us do that costs more than its bytes. It is bounded
in work (see `outrider.grammar`) and in time, and has a thread of its own, so that the worst
grammar delays other grammars and nothing else.
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
    kind: Literal["json", "regex", "choice", "lark"]
    source: str


class Grammars:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocabulary: GrammarVocabulary | None = None  # built with the first grammar
        self._kept: OrderedDict[Wanted, Grammar] = OrderedDict()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outrider-grammar")
        self._num_pending = 0

    async def compile(self, wanted: Wanted | None) -> Grammar | None:
        """The grammar, None for None. Raises RequestError or ApiError for what cannot be had."""
        if wanted is None:
            return None
        if wanted in self._kept:
            self._kept.move_to_end(wanted)
            return self._kept[wanted]
        if self._num_pending >= MAX_PENDING:
            raise ApiError(429, "too many grammars are waiting to be compiled", retry_after_s=2)
        self._num_pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._worker, self._compile, wanted)
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
        self._num_pending -= 1
        if not work.cancelled():
            work.exception()  # seen, also where nobody waits any more

    def _compile(self, wanted: Wanted) -> Grammar:
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
        return Grammar.lark(self._vocabulary, wanted.source)
