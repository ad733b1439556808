"""Reasoning, text and calls out of the texts that models write, however these are cut."""

from __future__ import annotations

import json
import random

import pytest

from outrider.errors import UnknownName
from outrider.server.reading import Manner, Reader, read_whole
from outrider.server.reading.formats import (
    REASONING_FORMS,
    TOOL_FORMS,
    reasoning_form,
    tool_form,
)
from outrider.server.reading.source import Part

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    },
    "g": {},
}
Calls = list[tuple[str, object]]
ONE: Calls = [("f", {"a": "b"})]
TWO: Calls = [*ONE, ("g", {})]

# form, what the model wrote, text, calls
WRITTEN: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "n": [1,{"z":2}]}}\n</tool_call>\n'
        '<tool_call>{"name":"g","arguments":{}}</tool_call>',
        "",
        [("f", {"a": 'x}"', "n": [1, {"z": 2}]}), ("g", {})],
    ),
    (
        "hermes",
        '<tool_call>[{"arguments": {"a": "b"}, "name":"f"},{"name":"g"}]</tool_call>',
        "",
        TWO,
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>',
        "",
        ONE,
    ),
    ("hermes", "a <tool_call>nothing</tool_call> b\n", "a <tool_call>nothing</tool_call> b\n", []),
    ("hermes", "no more than <tool", "no more than <tool", []),
    ("hermes", "  text \n\n", "  text \n\n", []),
    (
        "hermes",
        'First. \n<tool_call>{"name": "f", "arguments": {"a": "b"}}',
        "First.",
        ONE,
    ),
    (
        "qwen3-coder",
        'Sure.\n<tool_call>\n<function=f>\n<parameter=a>\nline 1\n"2"\n</parameter>\n'
        "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
        "Sure.",
        [("f", {"a": 'line 1\n"2"', "n": 5})],
    ),
    ("qwen3-coder", "<function=g>\n</function>", "", [("g", {})]),
    (
        "glm",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>g</tool_call>",
        "",
        [("f", {"a": "x y", "n": 3}), ("g", {})],
    ),
    (
        "llama-json",
        '{"name": "f", "parameters": {"a": "b"}}; {"name": "g", "parameters": {}}',
        "",
        TWO,
    ),
    ("llama-json", '<|python_tag|>{"name": "f", "parameters": {"a": "b"}}', "", ONE),
    ("llama-json", '{"name": "Oslo", "size": 3}', '{"name": "Oslo", "size": 3}', []),
    ("llama-json", '{"x": 1} and more', '{"x": 1} and more', []),
    (
        "pythonic",
        '[f(a="x, (y)", n=3), g()]',
        "",
        [("f", {"a": "x, (y)", "n": 3}), ("g", {})],
    ),
    (
        "pythonic",
        "[f(a=true, n=[1, {'z': None}])]",
        "",
        [("f", {"a": True, "n": [1, {"z": None}]})],
    ),
    ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    ("pythonic", "[f(a=__import__('os'))]", "[f(a=__import__('os'))]", []),
    ("lfm2", "<|tool_call_start|>[f(a='b')]<|tool_call_end|>Well.", "Well.", ONE),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b"}}, {"name": "g", "arguments": {}}]',
        "",
        TWO,
    ),
    ("mistral-args", '[TOOL_CALLS]f{"a": "b"}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}', "", TWO),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "b"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        TWO,
    ),
    (
        "deepseek-v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "b"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "",
        ONE,
    ),
    ("phi", '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]<|/tool_call|>', "", ONE),
    ("phi", 'functools[{"name": "f", "arguments": {"a": "b"}}]', "", ONE),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": "b"}}]', "", ONE),
]


def joined(parts: list[Part]) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    for part in parts:
        same = found and found[-1][0] == part.kind != "call"
        text = found.pop()[1] + part.text if same else part.text
        found.append((part.kind, text, part.index))
    return found


def read_in_pieces(manner: Manner, text: str, seed: int) -> list[tuple[str, str, int]]:
    chance = random.Random(seed)
    reader, parts, at = Reader(manner), list[Part](), 0
    while at < len(text):
        end = at + (1 if seed == 0 else chance.randint(1, 9))
        parts += reader.feed(text[at:end])
        at = end
    return joined(parts + reader.end())


@pytest.mark.parametrize("thought", [False, True])
@pytest.mark.parametrize(("form", "written", "text", "calls"), WRITTEN)
def test_each_form_is_read(form: str, written: str, text: str, calls: Calls, thought: bool) -> None:
    reasoning = REASONING_FORMS["think"] if thought else None
    manner = Manner(reasoning=reasoning, tools=TOOL_FORMS[form], schemas=SCHEMAS)
    whole = f"<think>\nlet me\nsee\n</think>\n\n{written}" if thought else written
    found = read_whole(manner, whole)
    assert found.text == (text.lstrip() if thought else text)
    assert found.reasoning == ("let me\nsee" if thought else "")
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    reader = Reader(manner)
    at_once = joined([*reader.feed(whole), *reader.end()])
    for seed in range(20):
        assert read_in_pieces(manner, whole, seed) == at_once


def test_harmony_has_channels() -> None:
    manner = Manner(tools=TOOL_FORMS["harmony"])
    found = read_whole(
        manner,
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.f <|constrain|>json<|message|>{"a": "b"}',
    )
    assert (found.reasoning, found.text) == ("hm", "")
    assert [(call.name, call.arguments) for call in found.calls] == [("f", '{"a": "b"}')]
    answered = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi!"
    )
    found = read_whole(manner, answered)
    assert (found.reasoning, found.text, found.calls) == ("hm", "Hi!", [])
    for seed in range(20):
        assert read_in_pieces(manner, answered, seed) == [
            ("reasoning", "hm", 0),
            ("text", "Hi!", 0),
        ]
    assert read_whole(manner, "just text").text == "just text"


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    manner = Manner(reasoning=REASONING_FORMS["think"], opened=True)
    assert read_whole(manner, "so\n</think>\n\nYes.").reasoning == "so"
    assert read_whole(manner, "so\n</think>\n\nYes.").text == "Yes."
    cut = read_whole(manner, "so and so")  # by max_tokens
    assert (cut.reasoning, cut.text) == ("so and so", "")
    assert (
        read_whole(Manner(reasoning=REASONING_FORMS["think"]), " No thought.").text
        == " No thought."
    )


def test_only_the_first_call_counts_without_parallel_ones() -> None:
    manner = Manner(tools=TOOL_FORMS["hermes"], parallel=False)
    found = read_whole(manner, WRITTEN[0][1])
    assert [call.name for call in found.calls] == ["f"]


def test_text_arguments_arrive_while_they_are_written() -> None:
    """Editors show long arguments, such as the text of a file, as they come."""
    reader = Reader(Manner(tools=TOOL_FORMS["qwen3-coder"], schemas=SCHEMAS))
    reader.feed("<tool_call>\n<function=f>\n<parameter=a>\n")
    assert joined(reader.feed("some words"))[-1] == ("arguments", "some words", 0)
    reader = Reader(Manner(tools=TOOL_FORMS["hermes"], schemas=SCHEMAS))
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    assert joined(reader.feed("some words"))[-1] == ("arguments", "some words", 0)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3-coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("<|python_tag|>", "llama-json"),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral-args"),
        ("<|start|>assistant<|channel|>", "harmony"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_call|>", "granite"),
        ("<|tool|>", "phi"),
        ("a template without tools", "hermes"),
    ],
)
def test_the_template_tells_the_form(template: str, form: str) -> None:
    assert tool_form(template, None).name == form
    assert tool_form(template, "pythonic").name == "pythonic"


def test_wrong_names_list_the_right_ones() -> None:
    assert tool_form("", "qwen3_coder").name == "qwen3-coder"  # vLLM's name
    with pytest.raises(UnknownName, match="hermes"):
        tool_form("", "hermez")
    with pytest.raises(UnknownName, match="think"):
        reasoning_form("", "thinking")
    assert reasoning_form("<think>", "none") is None
    assert reasoning_form("nothing of the kind", None) is None
