"""How probable each of some tokens is after a text: SGLang's /v1/score with `label_token_ids`, and
vLLM's /generative_scoring. One step of the model for each item."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from outrider.engine.engine import Result
from outrider.server.asking import encode
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.limits import MAX_PROMPTS
from outrider.server.reply import Reply
from outrider.server.request import Request
from outrider.server.schema import Name, Text, TokenId, TokenIds, TolerantBody
from outrider.server.service import Served
from outrider.server.stream import SSE, frame

Ids = list[TokenId]


class LabelsBody(TolerantBody):
    model: Name | None = None
    query: Text | Ids
    items: (
        Text
        | Annotated[list[Text], Field(max_length=MAX_PROMPTS)]
        | Annotated[list[Ids], Field(max_length=MAX_PROMPTS)]
    )
    label_token_ids: Annotated[TokenIds, Field(min_length=1)]
    apply_softmax: bool = False
    item_first: bool = False

    @property
    def each(self) -> list[str | list[int]]:
        return [self.items] if isinstance(self.items, str) else [*self.items]

    async def request(self, served: Served) -> Request:
        prompts: list[str | list[int]] = []
        query = await _tokens(self.query, served, "query", special=not self.item_first)
        for item in self.each:
            tokens = await _tokens(item, served, "items", special=self.item_first)
            prompt = tokens + query if self.item_first else query + tokens
            served.core.check_prompt(prompt, "items")  # now: a long query repeats with each item
            prompts.append(prompt)
        sampling = {"logprobs": 0, "logprob_ids": tuple(self.label_token_ids), "temperature": 0}
        return Request(prompt=prompts, model=self.model, sampling=sampling, max_tokens=1)


async def _tokens(
    given: str | list[int], served: Served, param: str, *, special: bool
) -> list[int]:
    if isinstance(given, str):
        return await encode(served, given, param, special=special)
    return list(given)


class LabelsWriter:
    """The scores of all items, as lists."""

    media_type = SSE
    done = b""

    def __init__(self, body: LabelsBody, reply: Reply) -> None:
        self.id = f"score-{secrets.token_hex(12)}"
        self._body, self._reply = body, reply

    def whole(self, results: list[Result]) -> dict[str, Any]:
        num_tokens = sum(len(result.prompt_tokens) for result in results)
        return scored([self.row(result) for result in results], self._reply.model, num_tokens)

    def row(self, result: Result) -> list[float]:
        """The probability of each label: among all tokens, or with softmax among the labels."""
        entry = (result.completions[0].logprobs or [])[0]
        found = [math.exp(entry.top[label]) for label in self._body.label_token_ids]
        total = sum(found) if self._body.apply_softmax else 1.0
        return [p / total if total else 1 / len(found) for p in found]

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        return []

    def end(self) -> Sequence[dict[str, Any]]:
        return []

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return frame(payload, padded=padded)


class GenerativeBody(LabelsBody):
    """vLLM's: the share of the first label."""

    items: Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)]
    apply_softmax: bool = True


class GenerativeWriter(LabelsWriter):
    def whole(self, results: list[Result]) -> dict[str, Any]:
        usage = self._reply.usage()
        return {
            "id": f"generative-scoring-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": self._reply.model,
            "data": [
                {"index": i, "object": "score", "score": self.row(result)[0]}
                for i, result in enumerate(results)
            ],
            "usage": {
                "prompt_tokens": usage.num_prompt_tokens,
                "completion_tokens": usage.num_completion_tokens,
                "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
            },
        }


def scored(rows: list[list[float]], model: str, num_tokens: int) -> dict[str, Any]:
    return {
        "object": "scoring",
        "model": model,
        "scores": rows,
        "usage": {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
        },
    }
