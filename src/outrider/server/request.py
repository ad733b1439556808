"""The one request: what every dialect asks for, in the server's own words.

A dialect turns its JSON into a `Request`. `asking` turns a request into tokens, parameters and a
grammar for the engine. So no dialect knows another, and the engine knows none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from outrider.server.grammars import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call; `strict`: calls must satisfy the schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False

    def declared(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function | {"parameters": parameters}}


class Choice(NamedTuple):
    """Whether the model may, must not or must call a tool, and which one."""

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None  # with "required": this one


AUTO = Choice()


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Messages for the chat template.

    A message has `role` and `content` (text), and where they apply `name`, `tool_calls` (with
    `id` and `function`: `name` and `arguments` as JSON text), `tool_call_id`, `reasoning_content`.
    """

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: Choice = AUTO
    parallel: bool = True  # more than one call in a reply
    variables: dict[str, Any] = field(default_factory=dict)  # further ones of the template
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class Wish(NamedTuple):
    """How to speculate. None keeps the server's setting."""

    proposer: str | None = None
    num_draft_tokens: int | Literal["auto"] | None = None
    verifier: str | None = None
    off: bool = False


@dataclass(slots=True, kw_only=True)
class Request:
    """`params.n` choices for each prompt. `sampling` has fields of `SamplingParams` by name; those
    that are left out have the server's defaults."""

    prompt: Conversation | list[str | list[int]]
    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # None: the rest of the context
    allowed_ids: list[int] | None = None  # no other tokens; None: all
    wanted: Wanted | None = None  # the form of the output
    speculation: Wish | None = None
    metrics: Literal["summary", "detailed"] | None = None  # figures of this request in the reply
    prediction: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    obfuscated: bool | None = None  # padded frames; None: the server's setting
