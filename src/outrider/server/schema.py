"""The bodies of requests: OpenAI's fields, vLLM's further sampling options, and `speculation`.

The fields of sampling and speculation are those of `outrider.config`. Types are strict: a bool is
no number, NaN is no temperature, and an unknown field is an error, because an option that is
silently ignored is worse than one that is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    field_validator,
    model_validator,
)

from outrider.config import INT32, MAX_LOGPROBS, SamplingParams, Speculation
from outrider.options import http_fields
from outrider.server.config import (
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_PROMPTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
)

# A length, even one no body can reach, makes pydantic look inside: no half surrogate passes.
Text = Annotated[str, Field(max_length=1 << 26)]
Name = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
Count = Annotated[int, Field(ge=0, le=INT32)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
TokenIds = Annotated[list[TokenId], Field(max_length=64)]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None  # None: the server's own setting


if TYPE_CHECKING:

    class SpeculationFields(Body):
        def __getattr__(self, name: str) -> Any: ...

    class SamplingFields(Body):
        def __getattr__(self, name: str) -> Any: ...

else:
    SpeculationFields = create_model(
        "SpeculationFields",
        __base__=Body,
        **http_fields(Speculation, {"proposer": Name, "verifier": Name}),
    )
    SamplingFields = create_model(
        "SamplingFields",
        __base__=Body,
        model=(Name | None, None),
        **http_fields(
            SamplingParams, {"logit_bias": LogitBias, "stop": Stops, "stop_ids": TokenIds}
        ),
    )


class SpeculationBody(SpeculationFields):
    """How to speculate for this request. Absent fields keep the server's setting."""

    off: bool = False
    metrics: Literal["summary", "detailed"] | None = None  # figures of this request in the reply


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


class GenerationBody(SamplingFields):
    """The fields of both generating routes."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Name | None = None
    # For the client's own records; it changes no token.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

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


class CompletionBody(GenerationBody):
    prompt: Annotated[
        Text | list[TokenId] | list[Text] | list[list[TokenId]],
        Field(description="a text, token ids, or a list of either"),
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _few(cls, prompt: object) -> object:
        if isinstance(prompt, list):
            if not prompt:
                raise ValueError("give at least one prompt")
            if not isinstance(prompt[0], int) and len(prompt) > MAX_PROMPTS:
                raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(prompt)}")
        return prompt

    @model_validator(mode="after")
    def _best(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of must equal n")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise ValueError("max_tokens of 0 goes with echo: true, and without stream")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Text
    text: Text | None = None


class Message(BaseModel):
    """A chat message of text. Other fields must be null, which SDKs send back from replies."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Name | None = None

    @model_validator(mode="after")
    def _text_only(self) -> Message:
        for part in self.content if isinstance(self.content, list) else ():
            if part.type != "text" or part.text is None:
                raise ValueError("only text parts are supported")
        for field, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise ValueError(f"{field[:64]!r} is not supported in a message")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
        return self.content or ""


class Prediction(Body):
    type: Literal["content"]
    content: Text | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content)


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prediction: Prediction | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # Accepted only with values that request nothing: there is only text, and no tools.
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _chat(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if self.add_generation_prompt and self.continue_final_message:
            raise ValueError("continue_final_message goes with add_generation_prompt: false")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise ValueError("max_tokens and max_completion_tokens differ")
        if 0 in limits:
            raise ValueError("max_completion_tokens must be at least 1")
        return self


class TokenizeBody(Body):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
