"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from outrider.config import MAX_LOGPROBS
from outrider.engine.engine import Completion, Result
from outrider.events import TokenLogprob
from outrider.server.answering import Answering, until_disconnect
from outrider.server.asking import count_tokens
from outrider.server.chat_schema import Content, ConversationFields, Messages, text_of
from outrider.server.generation import Delta
from outrider.server.limits import MAX_PROMPTS
from outrider.server.openai_format import OpenAIWriter
from outrider.server.reading.source import Part
from outrider.server.reply import Reply
from outrider.server.request import Request
from outrider.server.schema import Body, Count, GenerationBody


class Prediction(Body):
    type: Literal["content"]
    content: Content

    @model_validator(mode="after")
    def _text_only(self) -> Prediction:
        text_of(self.content)
        return self


class ChatBody(ConversationFields, GenerationBody):
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    modalities: list[Literal["text"]] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True  # SGLang's name; false: the text holds it
    echo: bool = False  # the reply begins with the text that it continues

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        limits = (self.limit, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if 0 in limits:
            raise ValueError("max_completion_tokens must be at least 1")
        return self

    def request(self) -> Request:
        common = self.common()
        common["sampling"]["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        talk = self.conversation()
        talk.split_reasoning = self.separate_reasoning
        return Request(
            prompt=talk,
            **common,
            max_tokens=self.max_completion_tokens or self.limit,
            prediction=None if self.prediction is None else text_of(self.prediction.content),
        )


class BatchBody(ChatBody):
    """Several conversations with the same parameters (vLLM's route)."""

    messages: Annotated[list[Messages], Field(min_length=1, max_length=MAX_PROMPTS)]  # type: ignore[assignment]

    def each(self) -> list[ChatBody]:
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


class Instance(ChatBody):
    form: Literal["chatCompletions"] = Field(alias="@requestFormat")


class PredictBody(Body):
    """Requests in the envelope of Google's Vertex AI, which calls no other route."""

    instances: Annotated[list[Instance], Field(min_length=1, max_length=MAX_PROMPTS)]
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> PredictBody:
        if self.parameters:
            raise ValueError("parameters: they stand in each instance")
        if any(one.stream for one in self.instances):
            raise ValueError("stream goes without instances")
        return self


class ChatWriter(OpenAIWriter):
    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, reply: Reply) -> None:
        super().__init__(body, reply)
        self._logprobs = bool(body.logprobs)
        self._reasoning = body.include_reasoning
        self._begun: set[int] = set()
        last = body.messages[-1]
        echoes = body.echo and body.continue_final_message
        self._echo = text_of(last.content) if echoes else ""

    def whole(self, results: list[Result]) -> dict[str, Any]:
        return _lifted(super().whole(results))

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        return [_lifted(chunk) for chunk in super().delta(delta)]

    def choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        found = self._reply.message(completion)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self._echo + found.text,
            "refusal": None,
        }
        reasoning = found.reasoning if self._reasoning else ""
        message |= dict.fromkeys(("reasoning_content", "reasoning"), reasoning or None)
        if found.calls:
            message["content"] = found.text or None
            message["tool_calls"] = [
                {
                    "id": self._reply.call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in found.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._scored(completion.logprobs or []),
            "finish_reason": self._reply.finish_reason(completion.finish_reason, len(found.calls)),
        }

    def choices(self, delta: Delta) -> list[dict[str, Any]]:
        deltas = [self._gained(part) for part in self._reply.parts(delta)]
        gained = [found for found in deltas if found is not None]
        needed = delta.finish_reason is not None or self._reply.paced or bool(delta.logprobs)
        if not gained and needed:
            gained.append({} if delta.finish_reason is not None else {"content": ""})
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            gained.insert(0, {"role": "assistant", "content": self._echo})
        found: list[dict[str, Any]] = [
            {"index": delta.index, "delta": one, "logprobs": None, "finish_reason": None}
            for one in gained
        ]
        if found:
            found[-1]["logprobs"] = self._scored(delta.logprobs)
            found[-1]["finish_reason"] = self._reply.streamed_finish(delta)
        return found

    def _gained(self, part: Part) -> dict[str, Any] | None:
        if part.kind == "text":
            return {"content": part.text}
        if part.kind == "reasoning":
            if not self._reasoning:
                return None
            return {"reasoning_content": part.text, "reasoning": part.text}
        call: dict[str, Any] = {"index": part.index}
        if part.kind == "call":
            call |= {"id": self._reply.call_id(), "type": "function"}
            call["function"] = {"name": part.text, "arguments": ""}
        else:
            call["function"] = {"arguments": part.text}
        return {"tool_calls": [call]}

    def _scored(self, logprobs: list[TokenLogprob]) -> dict[str, Any] | None:
        return self._texts.chat(logprobs) if self._logprobs else None


def _lifted(reply: dict[str, Any]) -> dict[str, Any]:
    """What concerns the prompt also where vLLM has it: all choices have the same one."""
    first = reply["choices"][0]
    names = ("prompt_token_ids", "prompt_logprobs")
    return reply | {name: first[name] for name in names if name in first}


def router(answering: Answering) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody, http: HttpRequest) -> Response:
        return await answering.answer(
            body.request(), http, lambda reply: ChatWriter(body, reply), body.ignored
        )

    @routes.post("/v1/chat/completions/batch", response_model=None)
    async def batch(body: BatchBody, http: HttpRequest) -> Response:
        bodies = body.each()
        request = bodies[0].request()
        request.prompt = [one.conversation() for one in bodies]
        return await answering.answer(
            request, http, lambda reply: ChatWriter(bodies[0], reply), body.ignored
        )

    @routes.post("/predict", response_model=None)
    async def predict(body: PredictBody, http: HttpRequest) -> Response:
        begun = [
            await answering.begin(one.request(), http, partial(ChatWriter, one), one.ignored)
            for one in body.instances
        ]

        async def each() -> list[dict[str, Any]]:
            with ExitStack() as entered:
                for generation, _ in begun:
                    entered.enter_context(generation)
                return [writer.whole(await generation.all()) for generation, writer in begun]

        return JSONResponse({"predictions": await until_disconnect(http, each())})

    @routes.post("/v1/chat/completions/input_tokens", response_model=None)
    async def input_tokens(body: ChatBody) -> Response:
        answering.check_ignored(body.ignored)
        found = await count_tokens(body.request(), answering.service.served)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": found})

    return routes
