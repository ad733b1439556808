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
from outrider.server.grammars import Wanted
from outrider.server.limits import (
    MAX_LOGIT_BIAS,
    MAX_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
)
from outrider.server.request import Truncation, Wish

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
            SamplingParams,
            {
                "logit_bias": LogitBias,
                "stop": Stops,
                "stop_ids": TokenIds,
                "logprob_ids": TokenIds,
            },
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
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)  # llama-server's place

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        is_schema = self.type == "json_schema"
        if self.type == "text" and self.schema_ is not None:
            raise ValueError("schema goes with type 'json_object' or 'json_schema'")
        if is_schema != (self.json_schema is not None) and not (is_schema and self.schema_):
            raise ValueError("json_schema goes with type 'json_schema'")
        return self

    def wanted(self) -> Wanted | None:
        if self.type == "text":
            return None
        schema = self.json_schema.schema_ if self.json_schema else self.schema_
        return Wanted("json", dumped(schema or {}))


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
    timings_per_token: bool | None = None
    verbose: bool | None = None  # llama-server's: adds the prompt and the settings as `__verbose`
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=1 << 16)] | None = (
        None
    )
    n_predict: Annotated[int, Field(ge=-1, le=INT32)] | None = None  # llama-server's max_tokens
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut off
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Other servers' names for `structured_outputs`.
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1, max_length=256)] | None = None
    guided_grammar: Text | None = None
    json_schema: dict[str, Any] | Text | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    grammar: Text | None = None

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        wrong = [
            key for key in bias or () if not (key.isascii() and key.isdigit() and len(key) <= 10)
        ]
        if wrong:
            shown = ", ".join(repr(key[:32]) for key in wrong[:8])
            raise ValueError(f"keys must be token ids, not {shown}")
        return bias

    @model_validator(mode="after")
    def _consistent(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must not be 0")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs goes without stream")
        if sum(wish is not None for wish in (self.response_format, *self._wishes())) > 1:
            raise ValueError("give response_format or one form of structured_outputs, not both")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of the output, by either name."""
        given = self.max_tokens if self.max_tokens is not None else self.n_predict
        return None if given == -1 else given

    def common(self) -> dict[str, Any]:
        """The fields of a `Request` that do not depend on the route."""
        wish, options = self.speculation, self.stream_options
        return {
            "model": self.model,
            "sampling": sampling(self),
            "allowed_ids": self.allowed_token_ids,
            "wanted": self._wanted(),
            "truncation": self._truncation(),
            "speculation": None if wish is None else wish.wish(),
            "metrics": None if wish is None else wish.metrics,
            "cache_salt": self.cache_salt,
            "stream": bool(self.stream),
            "obfuscated": None if options is None else options.include_obfuscation,
        }

    def _truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side != "right")

    def _wanted(self) -> Wanted | None:
        """The grammar of the output, if the request has one."""
        if self.response_format is not None:
            return self.response_format.wanted()
        return next((wish for wish in self._wishes() if wish is not None), None)

    def _wishes(self) -> list[Wanted | None]:
        """The forms of the output by all names but `response_format`."""
        shared = self.structured_outputs
        found = [None if shared is None else shared.wanted()]
        for schema in (self.guided_json, self.json_schema):
            text = schema if isinstance(schema, str | None) else dumped(schema)
            found.append(None if text is None else Wanted("json", text))
        for pattern in (self.guided_regex, self.regex):
            found.append(None if pattern is None else Wanted("regex", pattern))
        if self.guided_choice is not None:
            found.append(Wanted("choice", dumped(self.guided_choice)))
        for grammar in (self.guided_grammar, self.ebnf, self.grammar):
            kind: Literal["lark", "gbnf"] = "gbnf" if "::=" in (grammar or "") else "lark"
            found.append(None if grammar is None else Wanted(kind, grammar))
        return found


def sampling(body: object) -> dict[str, Any]:
    """The sampling parameters that a body gives, as `SamplingParams` has them."""
    given = http_given(SamplingParams, body)
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)  # -1, too, means all
    if "stop" in given:
        stop = given["stop"]
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    for name in ("stop_ids", "logprob_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): x for token, x in given["logit_bias"].items()}
    return given
