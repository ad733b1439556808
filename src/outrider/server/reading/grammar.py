"""Grammars of tool calls: what a model must write so that its form's reader finds a correct call.

Written in llguidance's Lark. Marks that are single tokens of the vocabulary are named by id,
because text never matches them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.server.reading import HARMONY
from outrider.server.reading.formats import ReasoningForm, ToolForm
from outrider.server.request import Tool

_ANY = "/(?s:.*)/"
MAX_CALLS = 16  # in one reply
# As models write JSON. A schema's own settings would make two grammars of one schema.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """Collects the rules of one grammar."""

    def __init__(self, added: Mapping[str, int]) -> None:
        """`added`: the vocabulary's added tokens, by text."""
        self._added = added
        texts = sorted(map(re.escape, added), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(texts)})") if texts else None
        self._rules: list[str] = []
        self._terminals: list[str] = []

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, *self._terminals])

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        parts = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self._added[part]}]>" if part in self._added else json.dumps(part)
            for part in parts
            if part
        )

    def json(self, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": _SPACING})

    def text(self, without: Sequence[str] = ()) -> str:
        """Any text without these marks."""
        barred = [f"~/(?s:.*){_escaped(m)}(?s:.*)/" for m in without if m not in self._added]
        return self.terminal(" & ".join([_ANY, *barred]))

    def until(self, mark: str) -> str:
        """Any text up to the mark, and the mark."""
        if mark in self._added:
            return f"{self.text()} {self.literal(mark)}"
        return self.rule(_ANY, f"[suffix={json.dumps(mark)}]")

    def terminal(self, body: str) -> str:
        name = f"T{len(self._terminals)}"
        self._terminals.append(f"{name}: {body}")
        return name


def _escaped(text: str) -> str:
    return re.sub(r"[][\\.+*?()|{}^$/]", lambda found: "\\" + found.group(), text)


def grammar_of_calls(
    form: ToolForm,
    tools: Sequence[Tool],
    *,
    must: bool,
    several: bool,
    loose: bool,
    reasoning: ReasoningForm | None,
    opened: bool,
    otherwise: Mapping[str, Any] | None,
    added: Mapping[str, int],
) -> str:
    """One call, or `several`; `must`: and nothing else. `loose`: arguments are any object.

    `otherwise` is the JSON schema of a reply without calls.
    """
    lark = Lark(added)
    calls = _calls(lark, form, tools, several, loose)
    if form.name == HARMONY:
        thought = lark.literal("<|channel|>analysis<|message|>")
        after = lark.literal("<|start|>assistant")
        start = f"({thought} {lark.until('<|end|>')} {after})? "
        if not must:
            answer = lark.literal("<|channel|>final<|message|>")
            body = lark.text() if otherwise is None else lark.json(otherwise)
            calls = f"({calls} | {answer} {body})"
        return lark.source(start + calls)
    start = "" if reasoning is None else _thought(lark, reasoning, opened)
    if must:
        return lark.source(start + calls)
    if otherwise is not None:
        return lark.source(f"{start}({calls} | {lark.json(otherwise)})")
    if form.at_start:
        text = lark.terminal(rf"/(?s:[^{_escaped(form.at_start)}\s].*)?/")
        return lark.source(f"{start}({calls} | {text})")
    opening = form.around[0] + form.call[0]
    mark = next(mark for mark in form.marks if opening.startswith(mark))
    others = [other for other in form.marks if other != mark and other not in opening]
    rest = _calls(lark, form, tools, several, loose, skip=mark)
    return lark.source(f"{start}({lark.text(others)} | {lark.until(mark)} {rest})")


def grammar_after_reasoning(
    schema: Mapping[str, Any], reasoning: ReasoningForm, opened: bool, added: Mapping[str, int]
) -> str:
    """JSON of a schema after the reasoning."""
    lark = Lark(added)
    return lark.source(_thought(lark, reasoning, opened) + lark.json(schema))


def _thought(lark: Lark, form: ReasoningForm, opened: bool) -> str:
    close = f"{lark.until(form.closing)} /\\n{{0,2}}/"
    return f"{close} " if opened else f"({lark.literal(form.opening)} {close})? "


def _calls(
    lark: Lark, form: ToolForm, tools: Sequence[Tool], several: bool, loose: bool, skip: str = ""
) -> str:
    """All calls; `skip` is a mark at their beginning that stands already."""
    one = lark.rule(" | ".join(_call(lark, form, tool, loose) for tool in tools))
    first = one
    if skip and not form.around[0]:
        first = lark.rule(" | ".join(_call(lark, form, tool, loose, skip) for tool in tools))
    before, after = form.around
    between = lark.literal(form.between)
    more = f"({between} {one}){{0,{MAX_CALLS - 1}}}" if several and form.name != HARMONY else ""
    return f"{lark.literal(before.removeprefix(skip))} {first} {more} {lark.literal(after)}"


def _call(lark: Lark, form: ToolForm, tool: Tool, loose: bool, skip: str = "") -> str:
    begin, middle, end = form.call
    schema = tool.parameters if not loose and tool.parameters else {"type": "object"}
    if form.arguments == "json":
        arguments = lark.json(schema)
    else:
        arguments = _one_by_one(lark, form.arguments, schema)
    # JSON inside a text must be escaped, and so must the name.
    name = json.dumps(tool.name)[1:-1]
    before = lark.literal(begin.removeprefix(skip) + name + middle)
    return f"{before} {arguments} {lark.literal(end)}"


def _one_by_one(lark: Lark, kind: str, schema: Mapping[str, Any]) -> str:
    """Arguments in the order of the schema; those that are not required may be left out."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return ""
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    items = [
        (
            _item(lark, kind, key, value if isinstance(value, Mapping) else {}, shared),
            key in required,
        )
        for key, value in properties.items()
    ]
    if kind != "python":
        return " ".join(item if needed else f"({item})?" for item, needed in items)
    first = after = ""  # what may stand from here on, without and with an argument before
    for item, needed in reversed(items):
        begun = lark.rule(f"{item} {after}")
        rest = lark.rule(f'", " {begun}' + ("" if needed else f" | {after or _nothing()}"))
        first = begun if needed else lark.rule(f"{begun} | {first or _nothing()}")
        after = rest
    return first


def _nothing() -> str:
    return '""'


def _item(
    lark: Lark, kind: str, key: str, schema: Mapping[str, Any], shared: Mapping[str, Any]
) -> str:
    begin, end = {
        "xml": (f"<parameter={key}>\n", "\n</parameter>\n"),
        "glm": (f"<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
        "python": (f"{key}=", ""),
    }[kind]
    if kind != "python" and schema.get("type") == "string":
        allowed = schema.get("enum")
        if isinstance(allowed, list) and all(isinstance(v, str) and v for v in allowed):
            value = "(" + " | ".join(map(json.dumps, allowed)) + ")"
        else:
            closing = end.rstrip()
            after = lark.literal(end.removeprefix(closing))
            return f"{lark.literal(begin)} {lark.until(closing)} {after}".strip()
    else:
        value = lark.json({**shared, **schema})
    return f"{lark.literal(begin)} {value} {lark.literal(end)}".strip()
