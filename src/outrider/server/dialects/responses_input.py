"""OpenAI's /v1/responses: the body and what it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from outrider.config import MAX_LOGPROBS
from outrider.server.chat_schema import TEXT_PARTS
from outrider.server.config import MAX_MESSAGES, MAX_TOOLS
from outrider.server.grammars import Wanted
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
    name: Name


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


class ResponsesBody(SamplingFields):
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    speculation: SpeculationBody | None = None  # not OpenAI's
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
        return self

    def choice(self) -> Choice:
        wish, names = self.tool_choice, {tool.name for tool in self.tools or ()}
        if isinstance(wish, NamedTool):
            if wish.name not in names:
                raise ValueError(f"tool_choice names no tool: {wish.name!r}")
            return Choice("required", wish.name)
        if wish == "required" and not names:
            raise ValueError("tool_choice 'required' goes with tools")
        return Choice(wish or "auto")

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat templates read it."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[dict[str, Any]] = []
        thought = ""
        for item in self.input:
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

    def request(self, past: list[dict[str, Any]]) -> Request:
        messages = [*past, *self.messages()]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        variables: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            effort = self.reasoning.effort
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        form = None if self.text is None else self.text.format
        wanted = None
        if form is not None and form.type != "text":
            wanted = Wanted("json", dumped(form.schema_ or {}))
        given = sampling(self)
        if self.top_logprobs is not None or self._wants_logprobs():
            given["logprobs"] = self.top_logprobs or 0
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


def _parts(content: str | list[ContentPart] | None) -> list[ContentPart]:
    return content if isinstance(content, list) else []
