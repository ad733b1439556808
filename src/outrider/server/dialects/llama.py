"""llama-server's own routes: /completion, /infill, /props, /slots, /apply-template, /embedding."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.config import MAX_LOGPROBS
from outrider.engine.engine import Result
from outrider.events import TokenLogprob
from outrider.server.answering import Answering
from outrider.server.asking import encode, prompt_text
from outrider.server.chat_schema import ConversationFields
from outrider.server.embedding import embed
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.grammars import Wanted
from outrider.server.infill import infill
from outrider.server.limits import MAX_LOGIT_BIAS, MAX_PROMPTS
from outrider.server.llama_format import facts
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
from outrider.server.service import Served, Service
from outrider.server.stream import SSE, frame

Bias = float | Literal[False]


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
    # Pairs or an object: a token's id, or a text whose tokens are meant; false forbids them.
    logit_bias: (
        Annotated[list[tuple[TokenId | Text, Bias]], Field(max_length=MAX_LOGIT_BIAS)]
        | Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)]
        | None
    ) = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | None = None
    return_tokens: bool = False
    response_fields: Annotated[list[Text], Field(max_length=64)] | None = None
    timings_per_token: bool | None = None
    return_progress: Literal[False] | None = None
    speculation: SpeculationBody | None = None  # not llama-server's

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        return [tuple(pair) if isinstance(pair, list) else pair for pair in given]

    def common(self, served: Served) -> dict[str, Any]:
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        found = {name: getattr(self, name) for name in (*names, "ignore_eos")}
        found["repetition_penalty"] = self.repeat_penalty
        found["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        found["seed"] = None if self.seed == -1 else self.seed
        found["logprobs"] = self.n_probs or None
        if self.stop:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            found["logit_bias"] = _bias(self.logit_bias, served)
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


class Prompt(Body):
    """A prompt as an object; llama-server takes images beside the text."""

    prompt_string: Text


class LlamaCompletionBody(LlamaBody):
    prompt: Annotated[
        Text
        | Prompt
        | list[TokenId | Text]
        | Annotated[list[Text | Prompt | list[TokenId | Text]], Field(max_length=MAX_PROMPTS)],
        Field(description="a text; tokens and texts in a row; or a list of prompts"),
    ]

    @field_validator("prompt", mode="before")
    @classmethod
    def _some(cls, given: object) -> object:
        if given == [] or (isinstance(given, list) and [] in given):
            raise ValueError("the prompt is empty")
        return given

    @property
    def prompts(self) -> list[str | list[str | int]]:
        """Each a text, or tokens and texts in a row. A list with a token in it is one prompt."""
        given: Any = self.prompt
        if isinstance(given, Prompt):
            return [given.prompt_string]
        if isinstance(given, str) or any(isinstance(part, int) for part in given):
            return [given]
        return [part.prompt_string if isinstance(part, Prompt) else part for part in given]

    @property
    def is_list(self) -> bool:
        """Whether the reply is a list."""
        return len(self.prompts) > 1


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


def _bias(
    given: list[tuple[int | str, Bias]] | dict[str, Bias], served: Served
) -> dict[int, float]:
    pairs: list[tuple[int | str, Bias]] = given if isinstance(given, list) else [*given.items()]
    found: dict[int, float] = {}
    for what, bias in pairs:
        value = -100.0 if bias is False else bias
        if isinstance(what, str):
            is_id = isinstance(given, dict) and what.isascii() and what.isdigit()
            tokens = [int(what)] if is_id else served.tokenizer.encode(what, special=False)
        else:
            tokens = [what]
        found |= dict.fromkeys(tokens, value)
    return found


class LlamaWriter:
    media_type = SSE
    done = b""

    def __init__(self, body: LlamaBody, reply: Reply, *, is_list: bool = False) -> None:
        self.id = f"llama-{secrets.token_hex(12)}"
        self._body, self._reply, self._is_list = body, reply, is_list
        num_prompts = len(reply.generation.ask.prompts)
        self._tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self._texts = [""] * num_prompts
        self._finish: list[str | None] = [None] * num_prompts

    def whole(self, results: list[Result]) -> Any:
        found = []
        for index, result in enumerate(results):
            completion = result.completions[0]
            self._tokens[index], self._texts[index] = completion.tokens, completion.text
            self._finish[index] = completion.finish_reason
            shown = completion.tokens if self._body.return_tokens else []
            one = self._last(index, completion.text, shown)
            if completion.logprobs is not None:
                one["completion_probabilities"] = self._scored(completion.logprobs)
            found.append(self._chosen(one))
        return found if self._is_list else found[0]

    def _chosen(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The fields of a reply that the request wants, each under its path."""
        found = {}
        for path in self._body.response_fields or ():
            value: Any = reply
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found if self._body.response_fields else reply

    def _last(self, index: int, text: str, tokens: list[int]) -> dict[str, Any]:
        """The end of a choice. `text`, `tokens`: what a stream has not shown yet."""
        found = facts(
            self._reply, index, self._texts[index], self._tokens[index], self._finish[index]
        )
        return found | {"content": text, "tokens": tokens}

    def _scored(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        entries = self._reply.texts.chat(logprobs)["content"]
        for scored, entry in zip(logprobs, entries, strict=True):
            entry["id"] = scored.token
            for token, other in zip(scored.top, entry["top_logprobs"], strict=True):
                other["id"] = token
        return list(entries)

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        index = delta.index
        self._tokens[index] += delta.tokens
        self._texts[index] += delta.text
        self._finish[index] = delta.finish_reason
        found: dict[str, Any] = {
            "index": index,
            "content": delta.text,
            "tokens": delta.tokens,
            "stop": False,
            "id_slot": index,
            "tokens_predicted": len(self._tokens[index]),
            "tokens_evaluated": len(self._reply.generation.ask.prompts[index]),
        }
        if delta.logprobs:
            found["completion_probabilities"] = self._scored(delta.logprobs)
        return [found]

    def end(self) -> Sequence[dict[str, Any]]:
        return [self._chosen(self._last(i, "", [])) for i in range(len(self._tokens))]

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return frame(payload, padded=padded)


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    async def answer(
        body: LlamaBody, prompts: list[list[int]], http: HttpRequest, *, is_list: bool = False
    ) -> Response:
        request = Request(prompt=[*prompts], **body.common(service.served))
        return await answering.answer(
            request, http, lambda reply: LlamaWriter(body, reply, is_list=is_list), body.ignored
        )

    async def tokens_of(prompt: str | list[str | int]) -> list[int]:
        tokens: list[int] = []
        for i, part in enumerate([prompt] if isinstance(prompt, str) else prompt):
            if isinstance(part, str):
                tokens += await encode(service.served, part, "prompt", special=i == 0)
            else:
                tokens.append(part)
        return tokens

    @routes.post("/completion", response_model=None)
    @routes.post("/completions", response_model=None, include_in_schema=False)
    async def completion(body: LlamaCompletionBody, http: HttpRequest) -> Response:
        prompts = [await tokens_of(prompt) for prompt in body.prompts]
        return await answer(body, prompts, http, is_list=body.is_list)

    @routes.post("/infill", response_model=None)
    async def fill(body: LlamaInfillBody, http: HttpRequest) -> Response:
        served = service.served
        prompt = await infill(served, body.input_prefix, body.input_suffix, "input_prefix")
        prompt += await encode(served, body.prompt, "prompt", special=False)
        return await answer(body, [prompt], http)

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
                "model_path": str(served.tokenizer.folder),
                "build_info": f"outrider {__version__}",
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
