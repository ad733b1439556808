"""The one request: what every dialect asks for, in the server's own words.

A dialect turns its JSON into a `Request`. `asking` turns a request into tokens, parameters and a
grammar for the engine. So no dialect knows another, and the engine knows none.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    split_reasoning: bool = True  # False: the reply holds it as text


class Wish(NamedTuple):
    """How to speculate. None keeps the server's setting."""

    proposer: str | None = None
    num_draft_tokens: int | Literal["auto"] | None = None
    verifier: str | None = None
    off: bool = False


class Truncation(NamedTuple):
    """Of a longer prompt, only `limit` tokens are read; -1: as many as leave room for one more."""

    limit: int
    keeps_end: bool = True


@dataclass(slots=True, kw_only=True)
class Request:
    """`params.n` choices for each prompt or conversation; conversations share all but messages.

    `sampling` has fields of `SamplingParams` by name; those that are left out have the server's
    defaults.
    """

    prompt: Conversation | Sequence[Conversation] | Sequence[str | list[int]]
    model: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None  # None: the rest of the context
    allowed_ids: list[int] | None = None  # no other tokens; None: all
    wanted: Wanted | None = None  # the form of the output
    truncation: Truncation | None = None
    speculation: Wish | None = None
    metrics: Literal["summary", "detailed"] | None = None  # figures of this request in the reply
    prediction: str | None = None
    cache_salt: str | None = None
    stream: bool = False
    obfuscated: bool | None = None  # padded frames; None: the server's setting
