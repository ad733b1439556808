"""Turns chat messages into a prompt, with the model's own template.

A template is a program from a model folder, so it runs in jinja2's immutable sandbox, with limits
on its steps, its output and the sizes that it computes; a request cannot provide a template.
Messages are data for the template: braces in them have no meaning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError, RequestError
from outrider.model.tokenizer import Tokenizer

MAX_STEPS = 200_000  # lines of the compiled template
MAX_OUTPUT_CHARS = 4 << 20
MAX_REPEAT = 10_000  # of `text * n`, and the largest exponent

# A base model has no roles: it continues the text of the messages.
PLAIN = "{{ messages | map(attribute='content') | join('\n\n') }}"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, without arithmetic that turns a few characters into gigabytes."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" and not (numbers and abs(right) <= 64 and abs(left) <= 1 << 64):
            raise SecurityError("a power this large is not allowed in a chat template")
        if operator == "*" and not numbers:
            times = right if isinstance(right, int) else left
            if not isinstance(times, int) or times > MAX_REPEAT:
                raise SecurityError("a repetition this long is not allowed in a chat template")
        if operator == "%" and not numbers:
            raise SecurityError("formatting with % is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        of_text = isinstance(getattr(obj, "__self__", None), str)
        if of_text and any(isinstance(value, int) and value > MAX_REPEAT for value in args):
            raise SecurityError("padding this wide is not allowed in a chat template")
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("str.format is not allowed in a chat template")
        return None


class ChatTemplate:
    """Renders messages. Raises RequestError if the template refuses them or runs too long."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError if `source` is no template."""
        sandbox = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        sandbox.filters["tojson"] = _to_json
        for name in ("center", "format"):
            del sandbox.filters[name]  # filters that do the same
        sandbox.globals["raise_exception"] = _refuse
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = sandbox.from_string(source)
            self.variables = meta.find_undeclared_variables(sandbox.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = {},
    ) -> str:
        """The prompt; with `continue_final_message` it ends with the last message's text.

        `variables` are further ones of the template, such as `tools`.
        """
        values = {
            "tools": None,
            "documents": None,
            **variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
        }
        try:
            text = self._bounded(values)
        except (RequestError, MemoryError):
            raise
        except Exception as error:  # templates raise anything for messages that they refuse
            raise RequestError(
                f"the chat template refuses these messages: {type(error).__name__}", "messages"
            ) from error
        if continue_final_message:
            last = str(messages[-1]["content"]).strip()
            at = text.rfind(last)
            if at < 0:
                raise RequestError("the chat template changes the last message", "messages")
            text = text[: at + len(last)]
        return text

    def _bounded(self, values: dict[str, Any]) -> str:
        """Renders step by step, and stops a template that runs too long."""
        num_steps = 0

        def count(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal num_steps
            if frame.f_code.co_filename != "<template>":
                return None
            num_steps += 1
            if num_steps > MAX_STEPS:
                raise RequestError("the chat template takes too long", "messages")
            return count

        pieces: list[str] = []
        num_chars = 0
        before = sys.gettrace()
        sys.settrace(count)
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_OUTPUT_CHARS:
                    raise RequestError("the chat template writes too much", "messages")
        finally:
            sys.settrace(before)
        return "".join(pieces)


def load_template(tokenizer: Tokenizer, source: str | None) -> tuple[ChatTemplate, bool]:
    """The chat template, and whether it is the given or the model's own one."""
    found = source if source is not None else _own_template(tokenizer)
    special = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = tokenizer.config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        special[name] = token if isinstance(token, str) else ""
    return ChatTemplate(PLAIN if found is None else found, special), found is not None


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The ids of a chat that asks for the next answer, through the model's own template."""
    template, _ = load_template(tokenizer, None)
    return tokenizer.encode(template.render(messages), special=False)


def _own_template(tokenizer: Tokenizer) -> str | None:
    path = tokenizer.folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    allowed = {"separators", "sort_keys", "ensure_ascii"}
    given = {name: option for name, option in options.items() if name in allowed}
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent} | given)


def _refuse(message: str) -> None:
    raise RequestError(f"the chat template says: {message}", "messages")
