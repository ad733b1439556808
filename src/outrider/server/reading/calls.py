"""Readers of the forms in which models write tool calls.

Each reader gets the text after the mark that begins a call, and reads as many calls as follow
there. It raises `Unreadable` if the text is something else: if no call was recognised by then, the
text counts as text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from outrider.server.reading.source import Reading, Source, Unreadable

ARGUMENTS = ("arguments", "parameters", "args", "input")
_NAME = re.compile(r"[\w.:/-]{1,256}")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the name of the tool


def named(name: str) -> str:
    """The name of a tool as the model wrote it; Unreadable if it cannot be one."""
    name = name.strip().removeprefix("functions.")
    if not _NAME.fullmatch(name):
        raise Unreadable
    return name


# --- JSON with the name inside ------------------------------------------------------------------


def json_calls(source: Source, known: Schemas | None = None) -> Reading:
    """`{"name": ..., "arguments": ...}`, or a list of these; `known`: only these names."""
    if (yield from source.skip_space()) != "[":
        yield from json_call(source, known)
        return
    yield from source.next()
    while True:
        char = yield from source.skip_space()
        if char == "{":
            yield from json_call(source, known)
        elif char == ",":
            yield from source.next()
        elif char == "]":
            yield from source.next()
            return
        else:
            raise Unreadable


def json_call(source: Source, known: Schemas | None = None) -> Reading:
    yield from source.expect("{")
    name, held, done = "", "", False
    while True:
        char = yield from source.skip_space()
        if char in ("", "}"):
            break
        if char == ",":
            yield from source.next()
            continue
        key = yield from source.json_value()
        yield from source.skip_space()
        yield from source.expect(":")
        if key in ("name", "function", "function_name") and not name:
            name = named(str((yield from source.json_value())))
            if known is not None and name not in known:
                raise Unreadable
        elif key in ARGUMENTS and not done:
            if name:
                source.call(name)
                yield from _arguments(source, source.argue)
                done = True
            else:
                pieces: list[str] = []
                yield from _arguments(source, pieces.append)
                held = "".join(pieces)
        else:
            yield from source.json_text(lambda _: None)
    yield from source.next()
    if not name:
        raise Unreadable
    if not done:
        source.call(name)
        source.argue(held or "{}")


def _arguments(source: Source, take: Callable[[str], object]) -> Reading:
    """Streams the arguments as they stand; some models write them as JSON inside a string."""
    if (yield from source.skip_space()) == '"':
        inner = yield from source.json_value()
        take(str(inner))
    else:
        yield from source.json_text(take)


# --- a name, then JSON --------------------------------------------------------------------------


def mistral_calls(source: Source, schemas: Schemas) -> Reading:
    """A list as above, or `NAME[ARGS]{...}`."""
    first = yield from source.skip_space()
    if first == "[" and (yield from source.starts("[ARGS]")) is None:
        yield from json_calls(source)
        return
    while True:
        pieces: list[str] = []
        while True:
            char = yield from source.peek()
            if char in ("", "{", "["):
                break
            pieces.append((yield from source.next()))
        name = named("".join(pieces))
        while (yield from source.peek()) == "[":  # [ARGS], [CALL_ID]...
            mark, _ = yield from source.word(("]",))
            if mark == "[CALL_ID":
                while (yield from source.peek()) not in ("", "[", "{"):
                    yield from source.next()
        source.call(name)
        yield from source.json_text(source.argue)
        if (yield from source.starts(",")) is None:
            return


def deepseek_calls(source: Source, schemas: Schemas) -> Reading:
    """`NAME<sep>{...}<end>`, or `function<sep>NAME` and JSON in a fence."""
    sep, end = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    while True:
        yield from source.skip_space()
        if (yield from source.starts("<｜tool▁call▁begin｜>")) is None:
            yield from source.skip_space()
            yield from source.starts("<｜tool▁calls▁end｜>")
            return
        name, mark = yield from source.word((sep, end))
        if mark != sep:
            raise Unreadable
        if name.strip() == "function":
            name, _ = yield from source.word(("\n",))
            if (yield from source.skip_space()) == "`":
                yield from source.until(("json",))
        source.call(named(name))
        yield from source.json_text(source.argue)
        yield from source.until((end,))


def bare_json_calls(source: Source, schemas: Schemas) -> Reading:
    """Objects one after the other, with `;` between them, of known names only."""
    while True:
        yield from json_calls(source, schemas)
        if (yield from source.skip_space()) in (";", ","):
            yield from source.next()
        if (yield from source.skip_space()) != "{":
            return


# --- arguments one by one -----------------------------------------------------------------------


class Arguments:
    """Writes a JSON object of arguments, one by one as they arrive."""

    def __init__(self, source: Source, schema: Mapping[str, Any]) -> None:
        self._source = source
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._any = False
        source.argue("{")

    def value(self, key: str, end: str, trim: str = "") -> Reading:
        """Reads a value up to the mark `end`; `trim` is no part of it at either side."""
        source = self._source
        source.argue((", " if self._any else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._any = True
        if trim:
            yield from source.starts(trim)
        if self._is_text(key):
            source.argue('"')
            held = ""

            def take(text: str) -> None:
                nonlocal held
                text = held + text
                kept = text.removesuffix(trim) if trim else text
                held = text[len(kept) :]
                source.argue(json.dumps(kept, ensure_ascii=False)[1:-1])

            yield from source.until((end,), take)
            source.argue('"')
        else:
            text, _ = yield from source.word((end,))
            source.argue(json.dumps(_guessed(text), ensure_ascii=False))

    def close(self) -> None:
        self._source.argue("}")

    def _is_text(self, key: str) -> bool:
        schema = self._properties.get(key)
        return isinstance(schema, Mapping) and schema.get("type") == "string"


def _guessed(text: str) -> Any:
    """The value that a text means where the schema does not say that it is text."""
    bare = text.strip()
    try:
        return json.loads(bare)
    except (ValueError, RecursionError):
        pass
    return {"True": True, "False": False, "None": None}.get(bare, text.strip("\n"))


def glm_calls(source: Source, schemas: Schemas) -> Reading:
    """`NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`."""
    end = "</tool_call>"
    name, mark = yield from source.word(("<arg_key>", "\n", end))
    name = named(name)
    source.call(name)
    arguments = Arguments(source, schemas.get(name, {}))
    while mark is not None and mark != end:
        if mark == "\n":
            mark = yield from source.until(("<arg_key>", end))
            continue
        key, _ = yield from source.word(("</arg_key>",))
        mark = yield from source.until(("<arg_value>", end))
        if mark == "<arg_value>":
            yield from arguments.value(key.strip(), "</arg_value>")
            mark = yield from source.until(("<arg_key>", end))
    arguments.close()


def qwen_xml_calls(source: Source, schemas: Schemas) -> Reading:
    """`<function=NAME><parameter=K>V</parameter>...</function>`."""
    yield from source.skip_space()
    yield from source.expect("<function=")
    name, _ = yield from source.word((">",))
    name = named(name)
    source.call(name)
    arguments = Arguments(source, schemas.get(name, {}))
    while (yield from source.until(("<parameter=", "</function>"))) == "<parameter=":
        key, _ = yield from source.word((">",))
        yield from arguments.value(key.strip(), "</parameter>", "\n")
    arguments.close()


# --- Python -------------------------------------------------------------------------------------


def python_calls(source: Source, schemas: Schemas) -> Reading:
    """`[f(a=1), g(b="x")]`; the arguments of a call arrive in one piece."""
    yield from source.skip_space()
    yield from source.expect("[")
    while True:
        char = yield from source.skip_space()
        if char == "]":
            yield from source.next()
            return
        if char == ",":
            yield from source.next()
            continue
        name, mark = yield from source.word(("(",))
        if mark is None or not _IDENTIFIER.fullmatch(name.strip()):
            raise Unreadable
        arguments = _python_arguments((yield from _parenthesis(source)))
        source.call(name.strip())
        source.argue(json.dumps(arguments, ensure_ascii=False))


def _parenthesis(source: Source) -> Generator[None, None, str]:
    """The text up to the parenthesis that closes an open one."""
    found: list[str] = []
    depth, quote = 1, ""
    while True:
        char = yield from source.next()
        if not char or len(found) > 1 << 20:
            raise Unreadable
        if quote:
            if char == "\\":
                found.append(char)
                char = yield from source.next()
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
            if not depth:
                return "".join(found)
        found.append(char)


def _python_arguments(text: str) -> dict[str, Any]:
    try:
        node = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(node, ast.Call)
        if node.args:
            raise Unreadable
        return {str(word.arg): _literal(word.value) for word in node.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable from None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(inner) for inner in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_literal(k)): _literal(v) for k, v in pairs if k is not None}
    value = ast.literal_eval(node)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
