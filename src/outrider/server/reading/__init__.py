"""Turns the text of a model into reasoning, text and tool calls, while it arrives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.server.reading.formats import ReasoningForm, ToolForm
from outrider.server.reading.source import Part, Reading, Source, Unreadable

HARMONY = "harmony"
_HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


@dataclass(frozen=True, slots=True)
class Manner:
    """How to read the choices of one request."""

    reasoning: ReasoningForm | None = None
    opened: bool = False  # the prompt ends inside the reasoning
    tools: ToolForm | None = None  # None: calls are not looked for
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by tool
    parallel: bool = True  # False: only the first call counts


class Reader:
    """Reads one choice. The parts, joined by kind and call, are a function of the whole text."""

    def __init__(self, manner: Manner) -> None:
        self._manner = manner
        self._source = Source()
        self._reading = _read(self._source, manner)
        self._next()

    @property
    def num_calls(self) -> int:
        return self._source.num_calls

    def feed(self, text: str) -> list[Part]:
        self._source.add(text)
        return self._next()

    def end(self) -> list[Part]:
        self._source.end()
        return self._next()

    def _next(self) -> list[Part]:
        next(self._reading, None)
        found, self._source.parts = self._source.parts, []
        if not self._manner.parallel:
            found = [part for part in found if not part.index]
        return found


@dataclass(slots=True)
class Call:
    name: str
    arguments: str = ""  # JSON text, as the model wrote it


@dataclass(slots=True)
class Message:
    """A whole choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def read_whole(manner: Manner | None, text: str) -> Message:
    if manner is None:
        return Message(text)
    reader = Reader(manner)
    message = Message()
    for part in [*reader.feed(text), *reader.end()]:
        if part.kind == "text":
            message.text += part.text
        elif part.kind == "reasoning":
            message.reasoning += part.text
        elif part.kind == "call":
            message.calls.append(Call(part.text))
        else:
            message.calls[-1].arguments += part.text
    return message


def _read(source: Source, manner: Manner) -> Reading:
    if manner.tools is not None and manner.tools.name == HARMONY:
        yield from _harmony(source)
        return
    if manner.reasoning is not None:
        yield from _reasoning(source, manner.reasoning, manner.opened)
    if manner.tools is None:
        yield from source.until((), lambda text: source.write("text", text))
        source.release("text")
    else:
        yield from _text_and_calls(source, manner.tools, manner.schemas)


def _reasoning(source: Source, form: ReasoningForm, opened: bool) -> Reading:
    source.tape()
    yield from source.skip_space()
    found = yield from source.starts(form.opening)
    before = source.taped()
    if not found and not opened:
        source.write("text", before)
        return
    yield from source.skip_space()
    closed = yield from source.until((form.closing,), lambda t: source.write("reasoning", t))
    if closed is None:
        source.release("reasoning")
    source.drop_space()
    yield from source.skip_space()


def _text_and_calls(
    source: Source, form: ToolForm, schemas: Mapping[str, Mapping[str, Any]]
) -> Reading:
    if form.at_start:
        source.tape()
        first = yield from source.skip_space()
        before = source.taped()
        if first == form.at_start:
            yield from _calls(source, form, schemas, before)
        else:
            source.write("text", before)
    while True:
        mark = yield from source.until(form.marks, lambda text: source.write("text", text))
        if mark is None:
            source.release("text")
            return
        if mark in form.inner:
            source.back(mark)
            mark = ""
        yield from _calls(source, form, schemas, mark)


def _calls(
    source: Source, form: ToolForm, schemas: Mapping[str, Mapping[str, Any]], before: str
) -> Reading:
    """The calls at this place; if there are none, it is text that starts with `before`."""
    num_calls = source.num_calls
    source.tape()
    try:
        yield from form.read(source, schemas)
    except Unreadable:
        text = source.taped()
        if source.num_calls == num_calls:
            source.write("text", before + text)
            return
    else:
        source.taped()
    source.tape()
    yield from source.skip_space()
    space = source.taped()
    if not (form.ends and (yield from source.starts(*form.ends))):
        source.write("text", space)


def _harmony(source: Source) -> Reading:
    """Messages with a header each, which says to which channel or function they go."""
    mark: str | None = ""
    if (yield from source.peek()) not in ("<", " ", ""):
        mark = "<|message|>"  # without a header
    while True:
        header = ""
        if mark != "<|message|>":
            begun = mark or ""
            header, mark = yield from source.word(("<|message|>",))
            header = begun + header
            if mark is None:
                return
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"to=([\w.:/-]+)", header)
        if recipient is not None:
            source.call(recipient.group(1).removeprefix("functions."))
            mark = yield from source.until(_HARMONY_ENDS, source.argue)
        elif channel is not None and channel.group(1) == "analysis":
            mark = yield from source.until(_HARMONY_ENDS, lambda t: source.write("reasoning", t))
            source.drop_space()
        else:
            mark = yield from source.until(_HARMONY_ENDS, lambda t: source.write("text", t))
            if mark is None:
                source.release("text")
        if mark is None:
            return
