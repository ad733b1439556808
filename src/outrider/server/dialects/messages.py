"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from outrider.engine.engine import Result
from outrider.server.answering import Answering
from outrider.server.asking import check_model, encode, prompt_text
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.grammars import Wanted
from outrider.server.limits import MAX_MESSAGES, MAX_TOOLS
from outrider.server.reading.source import Part
from outrider.server.reply import Reply
from outrider.server.request import Choice, Conversation, Request, Tool
from outrider.server.schema import (
    INT64,
    Count,
    Name,
    SpeculationBody,
    Stops,
    Text,
    TolerantBody,
    dumped,
)
from outrider.server.stream import SSE, event_frame

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Lenient(BaseModel):
    """Clients mark blocks for caches and citations; such keys change no token."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Block(Lenient):
    type: Text
    text: Text | None = None
    # tool_use
    id: Name = ""
    name: Name = ""
    input: dict[str, Any] | None = None
    # tool_result
    tool_use_id: Name = ""
    content: Text | list[Block] | None = None
    is_error: bool | None = None
    # thinking
    thinking: Text | None = None


class MessageBody(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    @model_validator(mode="after")
    def _known(self) -> MessageBody:
        known = KNOWN[self.role]
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in known:
                raise ValueError(f"a block of type {block.type[:64]!r} is not supported here")
            inner = block.content if isinstance(block.content, list) else ()
            for part in inner:
                if part.type != "text":
                    raise ValueError("only text is supported in a tool_result")
        return self


KNOWN = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}


class ToolBody(Lenient):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
    description: Text | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Lenient):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "max"] | None = None


class CountBody(TolerantBody):
    """What count_tokens and messages have in common."""

    model: Name | None = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | list[Block] | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CountBody:
        for block in self.system if isinstance(self.system, list) else ():
            if block.type != "text":
                raise ValueError("system has text blocks only")
        self.choice()
        return self

    def choice(self) -> Choice:
        wish = self.tool_choice
        if wish is None or wish.type in ("auto", "none"):
            return Choice("none" if wish is not None and wish.type == "none" else "auto")
        names = {tool.name for tool in self.tools or ()}
        if not names or (wish.type == "tool" and wish.name not in names):
            raise ValueError("tool_choice names no tool")
        return Choice("required", wish.name if wish.type == "tool" else None)

    def conversation(self) -> Conversation:
        messages = [found for message in self.messages for found in _messages(message)]
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system})
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        wish = self.tool_choice
        begun = self.messages[-1].role == "assistant"  # the reply goes on from there
        return Conversation(
            messages=messages,
            tools=tuple(
                Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.input_schema,
                    strict=bool(tool.strict),
                )
                for tool in self.tools or ()
            ),
            choice=self.choice(),
            parallel=wish is None or not wish.disable_parallel_tool_use,
            variables=variables,
            add_generation_prompt=not begun,
            continue_final_message=begun,
        )


class MessagesBody(CountBody):
    max_tokens: Annotated[Count, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    # Not Anthropic's.
    seed: Annotated[int, Field(ge=0, le=INT64)] | None = None
    speculation: SpeculationBody | None = None

    def request(self) -> Request:
        names = ("temperature", "top_p", "top_k", "seed")
        sampling = {name: getattr(self, name) for name in names}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        if stops := self.stop_sequences:
            sampling["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
        form = self.output_format or (self.output_config and self.output_config.format)
        return Request(
            prompt=self.conversation(),
            model=self.model,
            sampling=sampling,
            max_tokens=self.max_tokens,
            wanted=Wanted("json", dumped(form.schema_)) if form else None,
            speculation=None if self.speculation is None else self.speculation.wish(),
            stream=bool(self.stream),
        )


def _text(content: str | list[Block] | None) -> str:
    if isinstance(content, list):
        return "\n".join(block.text or "" for block in content if block.type == "text")
    return content or ""


def _messages(message: MessageBody) -> list[dict[str, Any]]:
    """The messages for the chat template: tool results become messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        found: dict[str, Any] = {"role": "assistant", "content": _text(message.content)}
        calls = [block for block in message.content if block.type == "tool_use"]
        if calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dumped(call.input or {})},
                }
                for call in calls
            ]
        if thoughts := [block.thinking for block in message.content if block.thinking]:
            found["reasoning_content"] = "\n".join(thoughts)
        return [found]
    several: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if block.type == "tool_result"
    ]
    if text := _text(message.content):
        several.append({"role": message.role, "content": text})
    return several or [{"role": message.role, "content": ""}]


def error_body(error: ApiError) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.status, "api_error")
    message = error.message if error.param is None else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesWriter:
    media_type = SSE
    done = b""

    def __init__(self, reply: Reply) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._reply = reply
        self._begun = False
        self._block = -1
        self._kind = ""  # of the open block
        self._tokens: list[int] = []
        self._finish: str | None = None

    def whole(self, results: list[Result]) -> dict[str, Any]:
        completion = results[0].completions[0]
        found = self._reply.message(completion)
        content: list[dict[str, Any]] = []
        if found.reasoning:
            content.append({"type": "thinking", "thinking": found.reasoning, "signature": ""})
        if found.text or not found.calls:
            content.append({"type": "text", "text": found.text})
        content += [
            {
                "type": "tool_use",
                "id": self._reply.call_id("toolu_"),
                "name": call.name,
                "input": _object(call.arguments),
            }
            for call in found.calls
        ]
        reason = self._reply.finish_reason(completion.finish_reason, len(found.calls))
        return {**self._head(), "content": content, **self._stopped(reason, completion.tokens)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._reply.model,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._reply.usage()
        cached = usage.num_cached_tokens or 0
        return {
            "input_tokens": usage.num_prompt_tokens - cached,
            "output_tokens": usage.num_completion_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    def _stopped(self, reason: str | None, tokens: Sequence[int]) -> dict[str, Any]:
        stop = self._reply.stop_text(tokens) if reason == "stop" else None
        named = "stop_sequence" if stop is not None else STOP_REASONS.get(reason or "", reason)
        return {"stop_reason": named, "stop_sequence": stop}

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            empty["usage"] = self._usage() | {"output_tokens": 0}
            found.append({"type": "message_start", "message": self._head() | empty})
            found.append({"type": "ping"})
        self._tokens += delta.tokens
        for part in self._reply.parts(delta):
            found += self._part(part)
        if delta.finish_reason is not None:
            self._finish = self._reply.streamed_finish(delta)
        if not found and self._reply.paced:
            found.append({"type": "ping"})
        return found

    def _part(self, part: Part) -> list[dict[str, Any]]:
        if part.kind == "text":
            block: dict[str, Any] = {"type": "text", "text": ""}
            gained = {"type": "text_delta", "text": part.text}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            gained = {"type": "thinking_delta", "thinking": part.text}
        elif part.kind == "call":
            id = self._reply.call_id("toolu_")
            return self._open({"type": "tool_use", "id": id, "name": part.text, "input": {}})
        else:
            return [self._gained({"type": "input_json_delta", "partial_json": part.text})]
        if not part.text:
            return []
        begun = [] if self._kind == block["type"] else self._open(block)
        return [*begun, self._gained(gained)]

    def _open(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self._close()
        self._block += 1
        self._kind = block["type"]
        start = {"type": "content_block_start", "index": self._block, "content_block": block}
        return [*closed, start]

    def _close(self) -> list[dict[str, Any]]:
        if not self._kind:
            return []
        found = [{"type": "content_block_stop", "index": self._block}]
        if self._kind == "thinking":
            found.insert(0, self._gained({"type": "signature_delta", "signature": ""}))
        self._kind = ""
        return found

    def _gained(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def end(self) -> Sequence[dict[str, Any]]:
        found = self._close()
        if self._block < 0:
            found = [*self._open({"type": "text", "text": ""}), *self._close()]
        stopped = self._stopped(self._finish, self._tokens)
        found.append({"type": "message_delta", "delta": stopped, "usage": self._usage()})
        return [*found, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return event_frame(payload, padded=padded)


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; what is no JSON object stays visible."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"raw_arguments": text}


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/v1/messages", response_model=None)
    async def messages(body: MessagesBody, http: HttpRequest) -> Response:
        return await answering.answer(body.request(), http, MessagesWriter, body.ignored)

    @routes.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(body: CountBody) -> Response:
        check_model(body.model, service.config)
        answering.check_ignored(body.ignored)
        served = service.served
        text = await prompt_text(body.conversation(), served)
        tokens = await encode(served, text, "messages", special=False)
        return JSONResponse({"input_tokens": len(tokens)})

    return routes
