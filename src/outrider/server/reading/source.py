"""Text that arrives in pieces, for readers that are written as if it were all there.

A reader is a generator over a `Source`. It yields where it needs more text, and appends what it has
recognised to `source.parts`. So a format is read by plain sequential code, and what is recognised
does not depend on how the text was cut into pieces, except for where parts are cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

Reading = Generator[None, None, None]  # of a whole text
Kind = Literal["text", "reasoning", "call", "arguments"]

_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\{}\[\]]+')
_STRING = re.compile(r'[^"\\]+')


@dataclass(slots=True)
class Part:
    """A piece of a reply. Of a call there is first its name, then its arguments in pieces."""

    kind: Kind
    text: str  # of kind "call": the name
    index: int = 0  # of the call


class Unreadable(Exception):
    """The text is not in the format."""


class Source:
    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.num_calls = 0
        self._text = ""
        self._at = 0
        self._ended = False
        self._taped = -1  # where a recording began
        self._space = ""  # white space after text: it belongs to the text if text follows

    # --- for the owner -----------------------------------------------------------------------

    def add(self, text: str) -> None:
        start = self._at if self._taped < 0 else self._taped
        if start:
            self._text = self._text[start:]
            self._at -= start
            self._taped = min(self._taped, 0)
        self._text += text

    def end(self) -> None:
        self._ended = True

    # --- what a reader recognises ------------------------------------------------------------

    def say(self, kind: Kind, text: str) -> None:
        if self.parts and self.parts[-1].kind == kind:
            self.parts[-1].text += text
        elif text:
            self.parts.append(Part(kind, text))

    def write(self, kind: Kind, text: str) -> None:
        """Text or reasoning; white space at its end is held until more follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self.say(kind, kept)

    def release(self, kind: Kind) -> None:
        """Writes held white space, unless it stands after a call: the text has ended."""
        self.say(kind, "" if self.num_calls else self._space)
        self._space = ""

    def drop_space(self) -> None:
        self._space = ""

    def call(self, name: str) -> None:
        self.drop_space()
        self.parts.append(Part("call", name, self.num_calls))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        """More of the arguments of the last call."""
        index = self.num_calls - 1
        if self.parts and self.parts[-1].kind == "arguments":
            self.parts[-1].text += text
        elif text:
            self.parts.append(Part("arguments", text, index))

    # --- moving on ---------------------------------------------------------------------------

    def tape(self) -> None:
        """From here on, text can be taken back."""
        self._taped = self._at

    def taped(self) -> str:
        """The text since `tape`, which ends the recording."""
        found = self._text[self._taped : self._at]
        self._taped = -1
        return found

    def back(self, text: str) -> None:
        """Takes back the text that was read last."""
        self._at -= len(text)

    def peek(self) -> Generator[None, None, str]:
        """The next character; "" at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Generator[None, None, str]:
        """The next character that is no white space; "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or char not in _SPACE:
                return char
            self._at += 1

    def next(self) -> Generator[None, None, str]:
        char = yield from self.peek()
        self._at += 1 if char else 0
        return char

    def expect(self, text: str) -> Reading:
        for char in text:
            if (yield from self.next()) != char:
                raise Unreadable

    def starts(self, *texts: str) -> Generator[None, None, str | None]:
        """Which of the texts comes next, or None; it is consumed."""
        while True:
            rest = self._text[self._at :]
            for text in texts:
                if rest.startswith(text):
                    self._at += len(text)
                    return text
            if self._ended or not any(text.startswith(rest) for text in texts):
                return None
            yield

    def until(
        self, marks: Sequence[str], take: Callable[[str], object] | None = None
    ) -> Generator[None, None, str | None]:
        """Gives all text before the first mark to `take`, piece by piece, and consumes the mark.

        Returns the mark; None where the text ends without one.
        """
        while True:
            rest = self._text[self._at :]
            hits = [(at, -len(mark), mark) for mark in marks if (at := rest.find(mark)) >= 0]
            if hits:
                at, _, mark = min(hits)
                self._at += at + len(mark)
                if take is not None:
                    take(rest[:at])
                return mark
            safe = len(rest) if self._ended else _open(rest, marks)
            self._at += safe
            if take is not None and safe:
                take(rest[:safe])
            if self._ended:
                return None
            yield

    def word(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str | None]]:
        """The text before the first mark, and the mark."""
        pieces: list[str] = []
        mark = yield from self.until(marks, pieces.append)
        return "".join(pieces), mark

    # --- JSON --------------------------------------------------------------------------------

    def json_text(self, take: Callable[[str], object]) -> Generator[None, None, bool]:
        """Gives the text of one JSON value to `take`, piece by piece; False if it breaks off."""
        first = yield from self.skip_space()
        if first == '"':
            return (yield from self._json_string(take))
        if first and first in "{[":
            return (yield from self._json_nested(take))
        while True:  # a number, true, false, null
            char = yield from self.peek()
            if not char or char in _SPACE or char in ",}]":
                return bool(char)
            take(char)
            self._at += 1

    def _json_string(self, take: Callable[[str], object]) -> Generator[None, None, bool]:
        take('"')
        self._at += 1
        while True:
            char = yield from self.peek()
            if not char:
                return False
            found = _STRING.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                take(found.group())
            elif char == "\\":
                self._at += 1
                after = yield from self.next()
                take(char + after)
            else:
                self._at += 1
                take('"')
                return True

    def _json_nested(self, take: Callable[[str], object]) -> Generator[None, None, bool]:
        depth = 0
        while True:
            char = yield from self.peek()
            if not char:
                return False
            if char == '"':
                if not (yield from self._json_string(take)):
                    return False
                continue
            found = _PLAIN.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                take(found.group())
                continue
            depth += (char in "{[") - (char in "}]")
            self._at += 1
            take(char)
            if not depth:
                return True

    def json_value(self) -> Generator[None, None, object]:
        """One JSON value; Unreadable if it is none."""
        pieces: list[str] = []
        yield from self.json_text(pieces.append)
        try:
            return json.loads("".join(pieces))
        except ValueError:
            raise Unreadable from None


def _open(text: str, marks: Sequence[str]) -> int:
    """Where the longest end of the text begins that may still become a mark."""
    longest = max(map(len, marks), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return start
    return len(text)
