"""Ollama's API: chat, generate, tags, show, version, ps. Streams are lines of JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from outrider import __version__
from outrider.engine.engine import Result
from outrider.server.answering import Answering
from outrider.server.asking import check_model
from outrider.server.chat_schema import Tools
from outrider.server.embedding import embed
from outrider.server.errors import ApiError
from outrider.server.generation import Delta
from outrider.server.grammars import Wanted
from outrider.server.limits import MAX_MESSAGES
from outrider.server.reply import Reply
from outrider.server.request import Conversation, Request
from outrider.server.schema import (
    INT32,
    INT64,
    Body,
    Name,
    SpeculationBody,
    Stops,
    Text,
    TolerantBody,
    dumped,
)
from outrider.server.service import Service
from outrider.server.stream import NDJSON, line_frame

# Options about memory and threads of Ollama's own runner. They change no token.
_MEMORY = {"f16_kv", "low_vram", "num_ctx", "num_keep", "use_mlock", "use_mmap", "vocab_only"}
_MACHINE = {"main_gpu", "num_batch", "num_gpu", "num_thread", "numa"}
RUNNER = frozenset(_MEMORY | _MACHINE | {"logits_all", "penalize_newline"})


class Options(Body):
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, le=INT64)] | None = None
    num_predict: Annotated[int, Field(ge=-2, le=INT32)] | None = None
    stop: Stops | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    repeat_last_n: Literal[-1] | None = None  # our penalty sees the whole text
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    mirostat: Literal[0] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _runner(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unused = set(RUNNER)
        if data.get("repeat_penalty", 1) == 1:
            unused.add("repeat_last_n")
        if not data.get("mirostat"):
            unused |= {"mirostat_eta", "mirostat_tau"}
        return {key: v for key, v in data.items() if key not in unused and v is not None}

    def sampling(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        found = {name: getattr(self, name) for name in names}
        found["repetition_penalty"] = self.repeat_penalty
        found["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        found["seed"] = None if self.seed == -1 else self.seed
        if self.stop:
            found["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def limit(self) -> int | None:
        wanted = self.num_predict
        return None if wanted is None or wanted < 0 else max(wanted, 1)


class CommonBody(TolerantBody):
    model: Name
    stream: bool = True
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    speculation: SpeculationBody | None = None  # not Ollama's

    def common(self) -> dict[str, Any]:
        options = self.options or Options()
        wanted = None
        if self.format:
            schema = self.format if isinstance(self.format, dict) else {}
            wanted = Wanted("json", dumped(schema))
        return {
            "model": self.model.removesuffix(":latest"),
            "sampling": options.sampling(),
            "max_tokens": options.limit,
            "wanted": wanted,
            "speculation": None if self.speculation is None else self.speculation.wish(),
            "stream": self.stream,
        }

    def variables(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        if isinstance(self.think, str):
            return {"enable_thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think}


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: Name = ""
    function: CalledFunction


class MessageBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text = ""
    thinking: Text | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None

    def plain(self, last_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id or f"call_{i}",
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": dumped(call.function.arguments),
                    },
                }
                for i, call in enumerate(self.tool_calls)
            ]
        if self.role == "tool":
            found["tool_call_id"] = self.tool_call_id or last_id
            if self.tool_name:
                found["name"] = self.tool_name
        return found


class OllamaChatBody(CommonBody):
    messages: Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Tools | None = None

    def request(self) -> Request:
        messages: list[dict[str, Any]] = []
        ids: list[str] = []  # of calls without a result
        for message in self.messages:
            if message.role == "tool":
                messages.append(message.plain(ids.pop(0) if ids else "call_0"))
            else:
                messages.append(message.plain(""))
                ids = [call["id"] for call in messages[-1].get("tool_calls", [])]
        talk = Conversation(
            messages=messages,
            tools=tuple(tool.function.tool() for tool in self.tools or ()),
            variables=self.variables(),
        )
        return Request(prompt=talk, **self.common())


class OllamaGenerateBody(CommonBody):
    prompt: Text = ""
    system: Text | None = None
    suffix: Literal[""] | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    raw: bool = False
    context: Annotated[list[Any], Field(max_length=0)] | None = None

    def request(self) -> Request:
        if self.raw:
            return Request(prompt=[self.prompt], **self.common())
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        talk = Conversation(messages=messages, variables=self.variables())
        return Request(prompt=talk, **self.common())


class OllamaEmbedBody(TolerantBody):
    model: Name
    input: Text | Annotated[list[Text], Field(min_length=1)]
    truncate: Literal[False] | None = None
    options: Options | None = None


class NamedBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    model: Name | None = None
    name: Name | None = None  # the older field

    @property
    def wanted(self) -> str | None:
        name = self.model or self.name
        return None if name is None else name.removesuffix(":latest")


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaWriter:
    media_type = NDJSON
    done = b""

    def __init__(self, reply: Reply, *, chat: bool) -> None:
        self.id = f"ollama-{secrets.token_hex(12)}"
        self._reply = reply
        self._chat = chat
        self._call: dict[str, Any] | None = None  # whose arguments still arrive
        self._finish: str | None = None

    def whole(self, results: list[Result]) -> dict[str, Any]:
        completion = results[0].completions[0]
        found = self._reply.message(completion)
        calls = [_call(call.name, call.arguments) for call in found.calls]
        gained = self._gained(found.text, found.reasoning, calls)
        return gained | self._ended(completion.finish_reason)

    def _gained(
        self, text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        head = {"model": self._reply.model, "created_at": now()}
        more: dict[str, Any] = {"thinking": reasoning} if reasoning else {}
        if not self._chat:
            return {**head, "response": text, **more, "done": False}
        if calls:
            more["tool_calls"] = list(calls)
        return {**head, "message": {"role": "assistant", "content": text, **more}, "done": False}

    def _ended(self, reason: str | None) -> dict[str, Any]:
        usage, generation = self._reply.usage(), self._reply.generation
        found: dict[str, Any] = {"done": True, "done_reason": reason or "stop"}
        total_s = monotonic() - generation.started_s
        prompt_s, decode_s = self._reply.seconds()
        return found | {
            "total_duration": _ns(total_s),
            "load_duration": 0,
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": _ns(prompt_s),
            "eval_count": usage.num_completion_tokens,
            "eval_duration": _ns(decode_s),
        }

    def delta(self, delta: Delta) -> Sequence[dict[str, Any]]:
        found = []
        for part in self._reply.parts(delta):
            if part.kind == "arguments":
                assert self._call is not None
                self._call["arguments"] += part.text
                continue
            found += self._called()
            if part.kind == "call":
                self._call = {"name": part.text, "arguments": ""}
            elif part.kind == "reasoning":
                found.append(self._gained("", part.text))
            elif part.text:
                found.append(self._gained(part.text))
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
        if not found and self._reply.paced:
            found.append(self._gained(""))
        return found

    def _called(self) -> list[dict[str, Any]]:
        """A call is sent when it is complete."""
        if self._call is None:
            return []
        call, self._call = self._call, None
        return [self._gained("", calls=[_call(call["name"], call["arguments"])])]

    def end(self) -> Sequence[dict[str, Any]]:
        return [*self._called(), self._gained("") | self._ended(self._finish)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        return error_body(error)

    def frame(self, payload: dict[str, Any], *, padded: bool) -> bytes:
        return line_frame(payload, padded=padded)


def _ns(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)


def _call(name: str, arguments: str) -> dict[str, Any]:
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    value = found if isinstance(found, dict) else {"raw_arguments": arguments}
    return {"function": {"name": name, "arguments": value}}


def _details(service: Service) -> dict[str, Any]:
    spec = service.served.core.target.spec
    return {
        "parent_model": "",
        "format": "outrider",
        "family": "",
        "families": [],
        "parameter_size": f"{spec.num_parameters / 1e6:.0f}M",
        "quantization_level": "",
    }


def _entry(service: Service) -> dict[str, Any]:
    name = service.config.model_name
    found = {"name": name, "model": name, "size": 0, "digest": ""}
    return {**found, "modified_at": now(), "details": _details(service)}


def router(answering: Answering) -> APIRouter:
    routes, service = APIRouter(), answering.service

    @routes.post("/api/chat", response_model=None)
    async def chat(body: OllamaChatBody, http: HttpRequest) -> Response:
        if not body.messages:
            return loaded(body.model, {"message": {"role": "assistant", "content": ""}})
        return await answering.answer(
            body.request(), http, lambda reply: OllamaWriter(reply, chat=True), body.ignored
        )

    @routes.post("/api/generate", response_model=None)
    async def generate(body: OllamaGenerateBody, http: HttpRequest) -> Response:
        if not body.prompt:
            return loaded(body.model, {"response": ""})
        return await answering.answer(
            body.request(), http, lambda reply: OllamaWriter(reply, chat=False), body.ignored
        )

    def loaded(model: str, empty: dict[str, Any]) -> Response:
        """A request without text only loads the model."""
        check_model(model.removesuffix(":latest"), service.config)
        head = {"model": service.config.model_name, "created_at": now()}
        return JSONResponse({**head, **empty, "done": True, "done_reason": "load"})

    _add_facts(routes, service)
    return routes


def _add_facts(routes: APIRouter, service: Service) -> None:
    """What there is, without generating anything."""

    @routes.get("/api/tags", response_model=None)
    async def tags() -> Response:
        return JSONResponse({"models": [_entry(service)]})

    @routes.post("/api/embed", response_model=None)
    async def embeddings(body: OllamaEmbedBody) -> Response:
        check_model(body.model.removesuffix(":latest"), service.config)
        started = monotonic()
        given = [body.input] if isinstance(body.input, str) else body.input
        found = await embed(service, given)
        return JSONResponse(
            {
                "model": service.config.model_name,
                "embeddings": found.vectors,
                "total_duration": _ns(monotonic() - started),
                "load_duration": 0,
                "prompt_eval_count": found.num_tokens,
            }
        )

    @routes.get("/api/ps", response_model=None)
    async def ps() -> Response:
        more = {"expires_at": "9999-12-31T00:00:00Z", "size_vram": 0}
        context = {"context_length": service.served.max_model_len}
        return JSONResponse({"models": [_entry(service) | more | context]})

    @routes.get("/api/version", response_model=None)
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @routes.post("/api/show", response_model=None)
    async def show(body: NamedBody) -> Response:
        check_model(body.wanted, service.config)
        served = service.served
        spec = served.core.target.spec
        capabilities = ["completion", "tools"]
        if served.forms.reasoning is not None:
            capabilities.append("thinking")
        info = {
            "general.architecture": "outrider",
            "general.parameter_count": spec.num_parameters,
            "outrider.context_length": served.max_model_len,
            "outrider.embedding_length": spec.hidden_size,
            "outrider.block_count": spec.num_layers,
        }
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": served.template.source,
                "details": _details(service),
                "model_info": info,
                "capabilities": capabilities,
                "modified_at": now(),
            }
        )
