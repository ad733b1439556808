"""Messages and tools in OpenAI's chat format, which several dialects take."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from outrider.server.limits import MAX_MESSAGES, MAX_TOOLS
from outrider.server.request import Choice, Conversation, Tool
from outrider.server.schema import Name, Text, TolerantBody, dumped


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Text
    text: Text | None = None


Content = Text | list[Text | Part]
TEXT_PARTS = ("text", "input_text", "output_text")


def text_of(content: Content | None) -> str:
    """The text; ValueError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, str) and (part.type not in TEXT_PARTS or part.text is None):
            raise ValueError(f"only text parts are supported, not {part.type[:64]!r}")
        texts.append(part if isinstance(part, str) else part.text or "")
    return "".join(texts)


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name
    arguments: Text | dict[str, Any] | None = None

    @property
    def json_text(self) -> str:
        given = self.arguments
        return given if isinstance(given, str) else dumped(given or {})


class ToolCall(BaseModel):
    """A call of an earlier reply."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Name = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.json_text}
        return {"id": self.id, "type": "function", "function": function}


class Message(BaseModel):
    """A chat message of text. Keys that are not known here are ids and marks of clients."""

    model_config = ConfigDict(strict=True, extra="ignore")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @field_validator("content")
    @classmethod
    def _text_only(cls, content: Content | None) -> Content | None:
        text_of(content)
        return content

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        found: dict[str, Any] = {"role": self.role, "content": text_of(self.content)}
        if self.name is not None:
            found["name"] = self.name
        if self.tool_calls:
            found["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        if thought := self.reasoning_content or self.reasoning:
            found["reasoning_content"] = thought
        return found


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


class FunctionBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.parameters or {},
            strict=bool(self.strict),
        )


class ToolBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Name


class NamedTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedSet(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(BaseModel):
    """The model may call these tools only."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]


class ConversationFields(TolerantBody):
    """What a conversation consists of, in OpenAI's chat format."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message goes without add_generation_prompt")
        self.choice()
        return self

    def choice(self) -> Choice:
        wish = self.tool_choice
        names = {tool.function.name for tool in self.tools or ()}
        wanted = [wish] if isinstance(wish, NamedTool) else self._allowed or []
        for tool in wanted:
            if tool.function.name not in names:
                raise ValueError(f"Tool {tool.function.name!r} not found in tools list")
        if isinstance(wish, NamedTool):
            return Choice("required", wish.function.name)
        if isinstance(wish, AllowedTools):
            return Choice(wish.allowed_tools.mode)
        if wish == "required" and not names:
            raise ValueError("tool_choice 'required' goes with tools")
        return Choice(wish or "auto")

    @property
    def _allowed(self) -> list[NamedTool] | None:
        wish = self.tool_choice
        return wish.allowed_tools.tools if isinstance(wish, AllowedTools) else None

    def conversation(self) -> Conversation:
        allowed = None
        if self._allowed is not None:
            allowed = {tool.function.name for tool in self._allowed}
        effort, thinking = self.reasoning_effort, self.enable_thinking
        variables = dict(self.chat_template_kwargs or {})
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
            thinking = effort != "none" if thinking is None else thinking
        if thinking is not None:
            variables.setdefault("enable_thinking", thinking)
        return Conversation(
            messages=[message.plain() for message in self.messages],
            tools=tuple(
                tool.function.tool()
                for tool in self.tools or ()
                if allowed is None or tool.function.name in allowed
            ),
            choice=self.choice(),
            parallel=self.parallel_tool_calls is not False,
            variables=variables,
            add_generation_prompt=(
                not self.continue_final_message
                if self.add_generation_prompt is None
                else self.add_generation_prompt
            ),
            continue_final_message=self.continue_final_message,
        )
