"""SGLang's own routes: /generate, and the facts that its clients ask for first."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Self

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, field_validator, model_validator
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.config import MAX_LOGPROBS
from outrider.engine.engine import Result
from outrider.events import TokenLogprob
from outrider.server.answering import Answering
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.grammars import Wanted
from outrider.server.limits import MAX_PROMPTS
from outrider.server.reply import Reply
from outrider.server.request import Request
from outrider.server.schema import (
    INT32,
    INT64,
    Count,
    LogitBias,
    Name,
    SpeculationBody,
    Stops,
    Text,
    TokenId,
    TokenIds,
    TolerantBody,
    dumped,
)
from outrider.server.service import Service
from outrider.server.stream import DONE, SSE, frame
from outrider.server.texts import TokenTexts, finite

DEFAULT_TOKENS = 128  # SGLang's


class SamplingBody(TolerantBody):
    """Sampling as SGLang names it."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    logit_bias: LogitBias | None = None
    sampling_seed: Annotated[int, Field(ge=0, le=INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    json_schema: Text | dict[str, Any] | None = None
    regex: Text | None = None
    ebnf: Text | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(wish is not None for wish in (self.json_schema, self.regex, self.ebnf)) > 1:
            raise ValueError("give one of json_schema, regex and ebnf")
        wrong = [key for key in self.logit_bias or () if not key.isdigit() or len(key) > 10]
        if wrong:
            raise ValueError(f"keys of logit_bias must be token ids, not {wrong[0][:32]!r}")
        return self

    def wanted(self) -> Wanted | None:
        """The form of the output."""
        if self.json_schema is not None:
            given = self.json_schema
            return Wanted("json", given if isinstance(given, str) else dumped(given))
        if self.regex is not None:
            return Wanted("regex", self.regex)
        return None if self.ebnf is None else Wanted("gbnf", self.ebnf)

    def params(self) -> dict[str, Any]:
        """As `SamplingParams` has them."""
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        more = ("repetition_penalty", "n", "ignore_eos", "skip_special_tokens")
        found = {name: getattr(self, name) for name in (*names, *more)}
        found["seed"] = self.sampling_seed
        found["min_tokens"] = self.min_new_tokens
        found["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        found["stop_ids"] = None if self.stop_token_ids is None else tuple(self.stop_token_ids)
        if self.stop:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias:
            found["logit_bias"] = {int(token): x for token, x in self.logit_bias.items()}
        return {name: value for name, value in found.items() if value is not None}


class GenerateBody(TolerantBody):
    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: (
        list[TokenId]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=MAX_PROMPTS)]
        | None
    ) = None
    model: Name | None = None
    sampling_params: SamplingBody = Field(default_factory=SamplingBody)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, le=INT32)] = -1
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    token_ids_logprob: TokenIds | None = None
    return_text_in_logprobs: bool = False
    speculation: SpeculationBody | None = None  # not SGLang's

    @field_validator("input_ids", mode="before")
    @classmethod
    def _some(cls, given: object) -> object:
        if given == []:
            raise ValueError("give at least one token")
        return given

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids")
        if self.token_ids_logprob and self.top_logprobs_num:
            raise ValueError("give top_logprobs_num or token_ids_logprob")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.text is not None else self.input_ids
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    @property
    def is_list(self) -> bool:
        """Whether the reply is a list."""
        given: Any = self.text if self.text is not None else self.input_ids
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return not is_one or (self.sampling_params.n or 1) > 1

    def request(self) -> Request:
        params = self.sampling_params.params()
        if self.return_logprob:
            params["logprobs"] = self.top_logprobs_num
            if self.token_ids_logprob:
                params["logprob_ids"] = tuple(self.token_ids_logprob)
            if self.logprob_start_len >= 0:
                params["prompt_logprobs"] = self.top_logprobs_num
        limit = self.sampling_params.max_new_tokens
        return Request(
            prompt=self.prompts,
            model=self.model,
            sampling=params,
            max_tokens=DEFAULT_TOKENS if limit is None else max(limit, 1),
            wanted=self.sampling_params.wanted(),
            speculation=None if self.speculation is None else self.speculation.wish(),
            stream=self.stream,
        )


class GenerateWriter:
    """Chunks of a stream hold the whole text so far, as SGLang's do."""

    media_type = SSE
    done = DONE

    def __init__(self, body: GenerateBody, reply: Reply) -> None:
        self.id = secrets.token_hex(16)
        self._body, self._reply = body, reply
        self._num = reply.generation.ask.params.n
        total = reply.generation.ask.num_choices
        self._texts = [""] * total
        self._tokens: list[list[int]] = [[] for _ in range(total)]
        self._scores: list[list[TokenLogprob]] = [[] for _ in range(total)]

    def whole(self, results: list[Result]) -> Any:
        found = []
        for prompt_index, result in enumerate(results):
            for i, completion in enumerate(result.completions):
                index = prompt_index * self._num + i
                self._add(index, completion.text, completion.tokens, completion.logprobs or ())
                found.append(self._state(index, completion.finish_reason, result))
        return found if self._body.is_list else found[0]

    def _add(
        self, index: int, text: str, tokens: Sequence[int], scores: Sequence[TokenLogprob]
    ) -> None:
        if self._body.sampling_params.max_new_tokens == 0:
            return  # only the prompt's scores are wanted; one token is the least that is drawn
        self._texts[index] += text
        self._tokens[index] += tokens
        self._scores[index] += scores

    def _state(self, index: int, reason: str | None, result: Result | None) -> dict[str, Any]:
        ask, tokens = self._reply.generation.ask, self._tokens[index]
        prompt = ask.prompts[index // self._num]
        meta: dict[str, Any] = {
            "id": f"{self.id}-{index}" if len(self._texts) > 1 else self.id,
            "finish_reason": self._finish(reason, tokens),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0 if result is None else result.num_cached_tokens,
            "weight_version": "default",
        }
        if result is not None and result.times.last_token_s is not None:
            meta["e2e_latency"] = result.times.last_token_s - result.times.arrived_s
        if self._body.return_logprob:
            meta |= self._scored("output", self._scores[index])
            if result is not None and result.prompt_logprobs is not None:
                meta |= self._scored_prompt(prompt, result.prompt_logprobs)
        return {"text": self._texts[index], "output_ids": tokens, "meta_info": meta}

    def _finish(self, reason: str | None, tokens: list[int]) -> dict[str, Any] | None:
        if reason is None:
            return None
        if reason == "length":
            return {"type": "length", "length": len(tokens)}
        matched = self._reply.stopped_by(reason, tokens)
        return {"type": reason} | ({} if matched is None else {"matched": matched})

    def _scored_prompt(self, prompt: list[int], scores: list[TokenLogprob]) -> dict[str, Any]:
        """From `logprob_start_len` on. The first token of a prompt has no score."""
        start = self._body.logprob_start_len
        found = self._scored("input", scores[max(start - 1, 0) :])
        if start == 0:
            for name, first in (
                ("input_token_logprobs", self._entry(prompt[0], None)),
                ("input_top_logprobs", None),
            ):
                if name in found:
                    found[name].insert(0, first)
        return found

    def _scored(self, kind: str, scores: Sequence[TokenLogprob]) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"{kind}_token_logprobs": [self._entry(s.token, s.logprob) for s in scores]
        }
        best = [
            [self._entry(token, s.top[token]) for token in sorted(s.top, key=lambda t: -s.top[t])]
            for s in scores
        ]
        if self._body.top_logprobs_num:
            found[f"{kind}_top_logprobs"] = best
        elif self._body.token_ids_logprob and kind == "output":
            found[f"{kind}_token_ids_logprobs"] = best
        return found

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        texts: TokenTexts = self._reply.texts
        text = texts.text(token) if self._body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        index = delta.index
        self._add(index, delta.text, delta.tokens, delta.logprobs)
        result = self._reply.generation.results[index // self._num]
        return [{"index": index} | self._state(index, delta.finish_reason, result)]

    def end(self) -> Sequence[dict[str, Any]]:
        return []

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error.body()

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return frame(payload, padded=padded)


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/generate", response_model=None)
    async def generate(body: GenerateBody, http: HttpRequest) -> Response:
        ignored = [*body.ignored, *body.sampling_params.ignored]
        return await answering.answer(
            body.request(), http, lambda reply: GenerateWriter(body, reply), ignored
        )

    @routes.get("/model_info", response_model=None)
    @routes.get("/get_model_info", response_model=None, include_in_schema=False)
    async def model_info() -> Response:
        return JSONResponse(_model(service))

    @routes.get("/server_info", response_model=None)
    @routes.get("/get_server_info", response_model=None, include_in_schema=False)
    async def server_info() -> Response:
        config = service.served.core.scheduler.config
        return JSONResponse(
            _model(service)
            | {
                "served_model_name": service.config.model_name,
                "context_length": service.served.max_model_len,
                "max_running_requests": config.max_sequences,
                "max_queued_requests": service.config.max_queue,
                "version": f"outrider {__version__}",
            }
        )

    return routes


def _model(service: Service) -> dict[str, Any]:
    folder = str(service.served.tokenizer.folder)
    return {
        "model_path": folder,
        "tokenizer_path": folder,
        "is_generation": True,
        "weight_version": "default",
        "preferred_sampling_params": dict(service.served.defaults) or None,
    }
