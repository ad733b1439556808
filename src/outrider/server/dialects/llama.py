"""llama-server's own routes: /completion, /infill, /props, /slots, /apply-template, /embedding."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from outrider.config import MAX_LOGPROBS
from outrider.engine.engine import Result
from outrider.server.answering import Answering
from outrider.server.asking import encode, prompt_text
from outrider.server.chat_schema import ConversationFields
from outrider.server.embedding import embed
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.grammars import Wanted
from outrider.server.infill import infill
from outrider.server.reply import Reply
from outrider.server.request import Request
from outrider.server.schema import (
    INT32,
    INT64,
    Body,
    Name,
    SpeculationBody,
    Stops,
    Text,
    TokenId,
    TolerantBody,
    dumped,
)
from outrider.server.service import Service
from outrider.server.stream import SSE, frame


class LlamaBody(TolerantBody):
    """Sampling as llama-server names it."""

    model: Name | None = None
    stream: bool = False
    n_predict: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    max_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    logit_bias: list[tuple[TokenId, float]] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False
    timings_per_token: bool | None = None
    return_progress: Literal[False] | None = None
    speculation: SpeculationBody | None = None  # not llama-server's

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [tuple(pair) if isinstance(pair, list) else pair for pair in given]

    def common(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        found = {name: getattr(self, name) for name in (*names, "ignore_eos")}
        found["repetition_penalty"] = self.repeat_penalty
        found["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        found["seed"] = None if self.seed == -1 else self.seed
        found["logprobs"] = self.n_probs or None
        if self.stop:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            found["logit_bias"] = dict(self.logit_bias)
        wanted = None
        if self.json_schema is not None:
            wanted = Wanted("json", dumped(self.json_schema))
        elif self.grammar:
            wanted = Wanted("gbnf", self.grammar)
        limit = self.n_predict if self.n_predict is not None else self.max_tokens
        return {
            "model": self.model,
            "sampling": {name: value for name, value in found.items() if value is not None},
            "max_tokens": None if limit is None or limit < 0 else max(limit, 1),
            "wanted": wanted,
            "speculation": None if self.speculation is None else self.speculation.wish(),
            "stream": self.stream,
        }


class LlamaCompletionBody(LlamaBody):
    prompt: Annotated[
        Text | list[TokenId | Text],
        Field(description="a text, or tokens and texts in a row"),
    ]

    @field_validator("prompt", mode="before")
    @classmethod
    def _some(cls, given: object) -> object:
        if isinstance(given, list) and not given:
            raise ValueError("the prompt is empty")
        return given


class LlamaInfillBody(LlamaBody):
    input_prefix: Text = ""
    input_suffix: Text = ""
    prompt: Text = ""  # the beginning of the middle
    input_extra: Annotated[list[Any], Field(max_length=0)] | None = None


class LlamaTemplateBody(ConversationFields):
    model: Name | None = None


class LlamaEmbeddingBody(Body):
    content: Text | list[Text] | None = None
    input: Text | list[Text] | None = None

    @model_validator(mode="after")
    def _one(self) -> LlamaEmbeddingBody:
        if (self.content is None) == (self.input is None):
            raise ValueError("give either content or input")
        return self


class LlamaWriter:
    media_type = SSE
    done = b""

    def __init__(self, body: LlamaBody, reply: Reply) -> None:
        self.id = f"llama-{secrets.token_hex(12)}"
        self._body, self._reply = body, reply
        self._tokens: list[int] = []
        self._finish: str | None = None

    def whole(self, results: list[Result]) -> dict[str, Any]:
        completion = results[0].completions[0]
        self._tokens, self._finish = completion.tokens, completion.finish_reason
        found = self._last(completion.text, self._tokens if self._body.return_tokens else [])
        if completion.logprobs is not None:
            found["completion_probabilities"] = self._scored(completion.logprobs)
        return found

    def _last(self, text: str, tokens: list[int]) -> dict[str, Any]:
        ask, usage = self._reply.generation.ask, self._reply.usage()
        word = self._reply.stop_text(self._tokens) if self._finish == "stop" else None
        kind = "limit" if self._finish == "length" else "eos" if word is None else "word"
        params = ask.params
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "id_slot": 0,
            "stop": True,
            "model": self._reply.model,
            "tokens_predicted": usage.num_completion_tokens,
            "tokens_evaluated": usage.num_prompt_tokens,
            "tokens_cached": usage.num_cached_tokens or 0,
            "generation_settings": {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p,
                "seed": params.seed,
                "n_predict": params.max_tokens,
                "stop": list(params.stop),
            },
            "prompt": self._reply.texts.all(ask.prompts[0]),
            "truncated": False,
            "stop_type": kind,
            "stopping_word": word or "",
            "timings": self._reply.timings(),
        }

    def _scored(self, logprobs: Any) -> list[dict[str, Any]]:
        entries = self._reply.texts.chat(logprobs)["content"]
        return [{"id": s.token, **e} for s, e in zip(logprobs, entries, strict=True)]

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        self._tokens += delta.tokens
        self._finish = delta.finish_reason
        found: dict[str, Any] = {
            "index": 0,
            "content": delta.text,
            "tokens": delta.tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": len(self._tokens),
            "tokens_evaluated": self._reply.usage().num_prompt_tokens,
        }
        if delta.logprobs:
            found["completion_probabilities"] = self._scored(delta.logprobs)
        return [found]

    def end(self) -> Sequence[dict[str, Any]]:
        return [self._last("", [])]

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return frame(payload, padded=padded)


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    async def answer(body: LlamaBody, prompt: str | list[int], http: HttpRequest) -> Response:
        request = Request(prompt=[prompt], **body.common())
        return await answering.answer(
            request, http, lambda reply: LlamaWriter(body, reply), body.ignored
        )

    @routes.post("/completion", response_model=None)
    @routes.post("/completions", response_model=None, include_in_schema=False)
    async def completion(body: LlamaCompletionBody, http: HttpRequest) -> Response:
        prompt = body.prompt
        if not isinstance(prompt, str):
            tokens: list[int] = []
            for i, part in enumerate(prompt):
                if isinstance(part, str):
                    tokens += await encode(service.served, part, "prompt", special=i == 0)
                else:
                    tokens.append(part)
            prompt = tokens  # type: ignore[assignment]
        return await answer(body, prompt, http)  # type: ignore[arg-type]

    @routes.post("/infill", response_model=None)
    async def fill(body: LlamaInfillBody, http: HttpRequest) -> Response:
        served = service.served
        prompt = await infill(served, body.input_prefix, body.input_suffix, "input_prefix")
        prompt += await encode(served, body.prompt, "prompt", special=False)
        return await answer(body, prompt, http)

    @routes.post("/apply-template", response_model=None)
    async def apply_template(body: LlamaTemplateBody) -> Response:
        answering.check_ignored(body.ignored)
        return JSONResponse({"prompt": await prompt_text(body.conversation(), service.served)})

    @routes.post("/embedding", response_model=None)
    @routes.post("/embeddings", response_model=None, include_in_schema=False)
    async def embedding(body: LlamaEmbeddingBody) -> Response:
        given = body.content if body.content is not None else body.input
        inputs = [given] if isinstance(given, str) else list(given or [])
        found = await embed(service, inputs)
        return JSONResponse(
            [{"index": i, "embedding": [vector]} for i, vector in enumerate(found.vectors)]
        )

    _add_facts(routes, service)
    return routes


def _add_facts(routes: APIRouter, service: Service) -> None:
    @routes.get("/props", response_model=None)
    async def props() -> Response:
        served = service.served
        return JSONResponse(
            {
                "default_generation_settings": {
                    "n_ctx": served.max_model_len,
                    "params": dict(served.defaults),
                },
                "total_slots": served.core.scheduler.config.max_sequences,
                "model_alias": service.config.model_name,
                "chat_template": served.template.source,
                "modalities": {"vision": False, "audio": False},
            }
        )

    @routes.get("/slots", response_model=None)
    async def slots() -> Response:
        """As many slots as sequences may run; nothing about any single request."""
        served = service.served
        num_running = len(served.core.scheduler.running)
        total = served.core.scheduler.config.max_sequences
        return JSONResponse(
            [
                {"id": i, "n_ctx": served.max_model_len, "is_processing": i < num_running}
                for i in range(total)
            ]
        )
