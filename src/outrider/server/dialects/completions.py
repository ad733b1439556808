"""OpenAI's /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from outrider.config import MAX_LOGPROBS
from outrider.engine.engine import Completion, Result
from outrider.events import TokenLogprob
from outrider.server.answering import Answering
from outrider.server.generation import Delta
from outrider.server.infill import infill
from outrider.server.limits import MAX_BEST_OF, MAX_PROMPTS
from outrider.server.openai_format import OpenAIWriter
from outrider.server.reply import Reply
from outrider.server.request import Request
from outrider.server.schema import GenerationBody, Text, TokenId

DEFAULT_TOKENS = 16  # OpenAI's


class CompletionBody(GenerationBody):
    prompt: Annotated[
        Text | list[TokenId] | list[Text] | list[list[TokenId]],
        Field(description="a text, token ids, or a list of either"),
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Text | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _few(cls, prompt: object) -> object:
        if isinstance(prompt, list):
            if not prompt:
                raise ValueError("give at least one prompt")
            if not isinstance(prompt[0], int) and len(prompt) > MAX_PROMPTS:
                raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(prompt)}")
        return prompt

    @model_validator(mode="after")
    def _best(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < self.num_shown:
            raise ValueError(f"best_of must be at least n: {self.num_shown}")
        if self.stream and (self.best_of or 0) > self.num_shown:
            raise ValueError("best_of above n goes without stream")
        if self.limit == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens of 0 goes with echo: true, and without stream")
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            raise ValueError("suffix goes with one prompt of text, and without echo")
        return self

    @property
    def num_shown(self) -> int:
        """Choices of a prompt in the reply."""
        return self.n or 1

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else list(given)

    def request(self) -> Request:
        common = self.common()
        limit = DEFAULT_TOKENS if self.limit is None else self.limit
        common["sampling"]["logprobs"] = self.logprobs
        if (self.best_of or 1) > self.num_shown:
            common["sampling"] |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.prompt_logprobs is None:
            common["sampling"]["prompt_logprobs"] = self.logprobs
        return Request(prompt=self.prompts, **common, max_tokens=max(limit, 1))


class CompletionWriter(OpenAIWriter):
    """`echo` puts the prompt before its completion, and its log-probabilities before theirs."""

    name = "text_completion"
    chunk_name = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, reply: Reply) -> None:
        super().__init__(body, reply)
        self._ask = reply.generation.ask
        self._num_shown = body.num_shown
        self._scores = body.logprobs is not None
        self._echo: list[str] | None = None
        if body.echo:
            self._echo = [
                one if isinstance(one, str) else self._texts.all(one) for one in body.prompts
            ]
        self._echo_only = body.limit == 0
        self._offsets: dict[int, int] = {}  # of the next token of each streamed choice
        self._begun: set[int] = set()

    def whole(self, results: list[Result]) -> dict[str, Any]:
        if self._echo_only:
            self._reply.generation.num_completion_tokens = 0
        return super().whole([self._best(result) for result in results])

    def _best(self, result: Result) -> Result:
        """The result with those completions that have the highest log-probability per token."""
        if len(result.completions) == self._num_shown:
            return result
        ranked = sorted(result.completions, key=_mean_logprob, reverse=True)
        return replace(result, completions=ranked[: self._num_shown])

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        logprobs, tokens = completion.logprobs or [], completion.tokens
        text, reason = completion.text, completion.finish_reason
        if self._echo_only:
            logprobs, tokens, text, reason = [], [], "", "length"
        return self._worded(index, text, tokens, logprobs, result.prompt_logprobs, reason)

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        worded = self._worded(
            delta.index,
            delta.text,
            delta.tokens,
            delta.logprobs,
            delta.prompt_logprobs,
            delta.finish_reason,
        )
        return [worded]

    def _worded(
        self,
        index: int,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        prompt_logprobs: list[TokenLogprob] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        first = index not in self._begun
        self._begun.add(index)
        scored: list[TokenLogprob | None] = [*logprobs]
        if self._echo is not None and first:
            prompt = self._ask.prompts[index // self._num_shown]
            text = self._echo[index // self._num_shown] + text
            tokens = [*prompt, *tokens]
            # The first token has no score. Later samples share the scores of the prompt.
            before: list[TokenLogprob | None] = [None] * len(prompt)
            before[1:] = prompt_logprobs or before[1:]
            scored = [*before, *scored]
        legacy = None
        if self._scores:
            offset = self._offsets.get(index, 0)
            legacy = self._texts.legacy(scored, tokens, offset)
            self._offsets[index] = offset + sum(map(len, legacy["tokens"]))
        return {"index": index, "text": text, "logprobs": legacy, "finish_reason": finish_reason}


def _mean_logprob(completion: Completion) -> float:
    scores = [token.logprob for token in completion.logprobs or ()]
    return sum(scores) / max(len(scores), 1)


def router(answering: Answering) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, http: HttpRequest) -> Response:
        request = body.request()
        if body.suffix:
            prefix = str(body.prompt)
            served = answering.service.served
            request.prompt = [await infill(served, prefix, body.suffix, "suffix")]
        return await answering.answer(
            request, http, lambda reply: CompletionWriter(body, reply), body.ignored
        )

    return routes
