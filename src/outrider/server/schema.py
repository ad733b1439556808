"""The parts of bodies that several dialects share: sampling, structure, `speculation`, messages.

The fields of sampling and speculation are those of `outrider.config`. Types are strict: a bool is
no number, NaN is no temperature. An unknown field is an error, because an option that is silently
ignored is worse than one that is refused. Fields that change no token are accepted by name.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    create_model,
    field_validator,
    model_validator,
)

from outrider.config import INT32 as INT32
from outrider.config import INT64 as INT64
from outrider.config import SamplingParams, Speculation
from outrider.errors import RequestError
from outrider.options import http_fields, http_given
from outrider.server.config import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOOLS,
)
from outrider.server.grammars import Wanted
from outrider.server.request import Choice, Conversation, Tool, Wish

# A length, even one no body can reach, makes pydantic look inside: no half surrogate passes.
Text = Annotated[str, Field(max_length=1 << 26)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Count = Annotated[int, Field(ge=0, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]


def _stops(given: str | list[str]) -> str | list[str]:
    texts = [given] if isinstance(given, str) else given
    if len(texts) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(texts)}")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
    return given


Stops = Annotated[Text | list[Text], AfterValidator(_stops)]
TokenIds = Annotated[list[TokenId], Field(max_length=64)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
]


# Fields for records, caches and schedulers of clients and other servers. They change no token.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_prompt",
        "keep_alive",
        "verbosity",
        "id",
        "request_id",
        "rid",
        "id_slot",
        "slot_id",
        "priority",
        "cache_control",
        "betas",
        "stream_reasoning",
        "spaces_between_special_tokens",
    }
)


def dumped(value: Any) -> str:
    """JSON text; RequestError for what is nested too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise RequestError("a JSON value is nested too deeply") from None


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TolerantBody(Body):
    """A whole body: null means left out, and harmless fields are noted and left out."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _tolerant(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        given = {key: value for key, value in data.items() if value is not None}
        harmless = [key for key in given if key in HARMLESS and key not in cls.model_fields]
        body = handler({key: value for key, value in given.items() if key not in harmless})
        body._ignored = harmless
        return body

    @property
    def ignored(self) -> list[str]:
        """The harmless fields that the body had."""
        return self._ignored


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # None: the server's own setting


if TYPE_CHECKING:

    class SpeculationFields(Body):
        def __getattr__(self, name: str) -> Any: ...

    class SamplingFields(TolerantBody):
        def __getattr__(self, name: str) -> Any: ...

else:
    SpeculationFields = create_model(
        "SpeculationFields",
        __base__=Body,
        **http_fields(Speculation, {"proposer": Name, "verifier": Name}),
    )
    SamplingFields = create_model(
        "SamplingFields",
        __base__=TolerantBody,
        model=(Name | None, None),
        **http_fields(
            SamplingParams, {"logit_bias": LogitBias, "stop": Stops, "stop_ids": TokenIds}
        ),
    )


class SpeculationBody(SpeculationFields):
    """How to speculate for this request. Absent fields keep the server's setting."""

    off: bool = False
    metrics: Literal["summary", "detailed"] | None = None  # figures of this request in the reply

    def wish(self) -> Wish:
        return Wish(self.proposer, self.num_draft_tokens, self.verifier, self.off)


class JsonSchema(Body):
    name: Name = "schema"
    description: Text | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with type 'json_schema'")
        return self

    def wanted(self) -> Wanted | None:
        if self.type == "text":
            return None
        return Wanted("json", dumped(self.json_schema.schema_ if self.json_schema else {}))


class StructuredOutputs(Body):
    """vLLM's names: exactly one of them."""

    json_: dict[str, Any] | Text | None = Field(alias="json", default=None)
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in given) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar, json_object")
        return self

    def wanted(self) -> Wanted:
        if self.json_ is not None:
            text = self.json_ if isinstance(self.json_, str) else dumped(self.json_)
            return Wanted("json", text)
        if self.regex is not None:
            return Wanted("regex", self.regex)
        if self.choice is not None:
            return Wanted("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return Wanted("lark", self.grammar)
        return Wanted("json", "{}")


class GenerationBody(SamplingFields):
    """The fields of OpenAI's generating routes."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Name | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        for key in bias or ():
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise ValueError("keys must be token ids")
        return bias

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("give response_format or structured_outputs, not both")
        return self

    def common(self) -> dict[str, Any]:
        """The fields of a `Request` that do not depend on the route."""
        wish, options = self.speculation, self.stream_options
        return {
            "model": self.model,
            "sampling": sampling(self),
            "wanted": self._wanted(),
            "speculation": None if wish is None else wish.wish(),
            "metrics": None if wish is None else wish.metrics,
            "cache_salt": self.cache_salt,
            "stream": bool(self.stream),
            "obfuscated": None if options is None else options.include_obfuscation,
        }

    def _wanted(self) -> Wanted | None:
        """The grammar of the output, if the request has one."""
        if self.response_format is not None:
            return self.response_format.wanted()
        return None if self.structured_outputs is None else self.structured_outputs.wanted()


def sampling(body: object) -> dict[str, Any]:
    """The sampling parameters that a body gives, as `SamplingParams` has them."""
    given = http_given(SamplingParams, body)
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)  # -1, too, means all
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "stop_ids" in given:
        given["stop_ids"] = tuple(given["stop_ids"])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): x for token, x in given["logit_bias"].items()}
    return given


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


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]


class ConversationFields(TolerantBody):
    """What a conversation consists of, in OpenAI's chat format."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _turns(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message goes with add_generation_prompt: false")
        self.choice()
        return self

    def choice(self) -> Choice:
        wish = self.tool_choice
        names = {tool.function.name for tool in self.tools or ()}
        if isinstance(wish, NamedTool):
            if wish.function.name not in names:
                raise ValueError(f"tool_choice names no tool: {wish.function.name!r}")
            return Choice("required", wish.function.name)
        if wish == "required" and not names:
            raise ValueError("tool_choice 'required' goes with tools")
        return Choice(wish or "auto")

    def conversation(self) -> Conversation:
        effort, thinking = self.reasoning_effort, self.enable_thinking
        variables = dict(self.chat_template_kwargs or {})
        if effort is not None:
            variables.setdefault("reasoning_effort", effort)
            thinking = effort != "none" if thinking is None else thinking
        if thinking is not None:
            variables.setdefault("enable_thinking", thinking)
        return Conversation(
            messages=[message.plain() for message in self.messages],
            tools=tuple(tool.function.tool() for tool in self.tools or ()),
            choice=self.choice(),
            parallel=self.parallel_tool_calls is not False,
            variables=variables,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
