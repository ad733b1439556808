"""OpenAI's /v1/responses: the body and what it asks for."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from outrider.config import MAX_LOGPROBS
from outrider.server.chat_schema import TEXT_PARTS, NamedFunction
from outrider.server.grammars import Wanted
from outrider.server.limits import MAX_MESSAGES, MAX_TOOLS
from outrider.server.request import Choice, Conversation, Request, Tool
from outrider.server.schema import (
    Body,
    Count,
    Name,
    SamplingFields,
    SpeculationBody,
    Text,
    dumped,
    sampling,
)


class Lenient(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class ContentPart(Lenient):
    type: Text = "input_text"
    text: Text | None = None
    refusal: Text | None = None


class Item(Lenient):
    """An item of the input: a message, a call, the result of a call, reasoning."""

    type: Text = "message"
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    content: Text | list[ContentPart] | None = None
    call_id: Name = ""
    name: Name = ""
    arguments: Text = ""
    output: Text | list[ContentPart] = ""
    summary: list[ContentPart] | None = None

    @model_validator(mode="after")
    def _known(self) -> Item:
        if self.type == "message" and self.role is None:
            raise ValueError("a message has a role")
        if self.type not in ("message", "function_call", "function_call_output", "reasoning"):
            raise ValueError(f"items of type {self.type[:64]!r} are not supported")
        if self.type != "reasoning":
            for content in (self.content, self.output):
                _text(content)
        return self


def _text(content: str | list[ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for part in content:
        if part.type not in (*TEXT_PARTS, "refusal"):
            raise ValueError(f"only text parts are supported, not {part.type[:64]!r}")
    return "".join(part.text or part.refusal or "" for part in content)


class ToolBody(Lenient):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Lenient):
    type: Literal["function"]
    name: Name = ""
    function: NamedFunction | None = None  # the form of chat completions

    @property
    def called(self) -> str:
        return self.name if self.function is None else self.function.name


class AllowedTools(Lenient):
    """The model may call these tools only."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class Format(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    name: Name = "schema"
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)
    strict: bool | None = None
    description: Text | None = None


class TextBody(Lenient):
    format: Format | None = None


class Reasoning(Lenient):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None


class ConversationId(Lenient):
    id: Name


class ResponsesBody(SamplingFields):
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationId | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    speculation: SpeculationBody | None = None  # not OpenAI's
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    cache_salt: Name | None = None

    @field_validator("n")
    @classmethod
    def _one(cls, n: int | None) -> int | None:
        if n not in (None, 1):
            raise ValueError("a response is one: leave out n")
        return n

    @model_validator(mode="after")
    def _consistent(self) -> ResponsesBody:
        self.choice()
        if self.background and self.store is False:
            raise ValueError("background can only be used when `store` is true")
        if self.background and self.stream:
            raise ValueError("background goes without stream: ask for the response by its id")
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("give previous_response_id or conversation, not both")
        return self

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given

    def choice(self) -> Choice:
        wish, names = self.tool_choice, {tool.name for tool in self.tools or ()}
        if isinstance(wish, NamedTool | AllowedTools):
            wanted = [wish] if isinstance(wish, NamedTool) else wish.tools
            for tool in wanted:
                if tool.called not in names:
                    raise ValueError(f"tool_choice names no tool: {tool.called!r}")
            if isinstance(wish, AllowedTools):
                return Choice(wish.mode)
            return Choice("required", wish.called)
        if wish == "required" and not names:
            raise ValueError("tool_choice 'required' goes with tools")
        return Choice(wish or "auto")

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, str):
            return [Item(role="user", content=self.input)]
        return self.input

    def request(self, past: list[dict[str, Any]]) -> Request:
        messages = [*past, *messages_of(self.items)]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        variables: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            effort = self.reasoning.effort
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        variables |= self.chat_template_kwargs or {}
        form = None if self.text is None else self.text.format
        wanted = None
        if form is not None and form.type != "text":
            wanted = Wanted("json", dumped(form.schema_ or {}))
        given = sampling(self)
        if self.top_logprobs is not None or self._wants_logprobs():
            given["logprobs"] = self.top_logprobs or 0
        wish = self.tool_choice
        allowed = [t.called for t in wish.tools] if isinstance(wish, AllowedTools) else None
        talk = Conversation(
            messages=messages,
            tools=tuple(
                Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters or {},
                    strict=bool(tool.strict),
                )
                for tool in self.tools or ()
                if allowed is None or tool.name in allowed
            ),
            choice=self.choice(),
            parallel=self.parallel_tool_calls is not False,
            variables=variables,
        )
        options = self.stream_options
        return Request(
            prompt=talk,
            model=self.model,
            sampling=given,
            max_tokens=self.max_output_tokens,
            wanted=wanted,
            speculation=None if self.speculation is None else self.speculation.wish(),
            cache_salt=self.cache_salt,
            stream=bool(self.stream),
            obfuscated=None if options is None else options.include_obfuscation,
        )

    def _wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def messages_of(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items as chat templates read them."""
    found: list[dict[str, Any]] = []
    thought = ""
    for item in items:
        if item.type == "reasoning":
            parts = [*(item.summary or ()), *_parts(item.content)]
            thought += "".join(part.text or "" for part in parts)
        elif item.type == "function_call":
            call = {"name": item.name, "arguments": item.arguments}
            last = found[-1] if found else {}
            if last.get("role") != "assistant":
                last = {"role": "assistant", "content": ""}
                found.append(last)
            calls = last.setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": call})
            if thought:
                last["reasoning_content"], thought = thought, ""
        elif item.type == "function_call_output":
            result = {"tool_call_id": item.call_id, "content": _text(item.output)}
            found.append({"role": "tool", **result})
        else:
            found.append({"role": item.role, "content": _text(item.content)})
            if thought and item.role == "assistant":
                found[-1]["reasoning_content"], thought = thought, ""
    return found


def stored_item(item: Item) -> dict[str, Any]:
    """An item of the input as lists show it: with an id, and its text in parts."""
    found = item.model_dump(exclude_unset=True) | {"type": item.type}
    found["id"] = f"{item.type[:3]}_{secrets.token_hex(12)}"
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        if not isinstance(item.content, list):
            found["content"] = [{"type": kind, "text": item.content or ""}]
        found["status"] = "completed"
    return found


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return content if isinstance(content, list) else []
