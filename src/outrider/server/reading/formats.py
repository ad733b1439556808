"""The forms in which models write reasoning and tool calls, and how to know a model's form.

A form is known by what the chat template contains. `--tool-call-parser` and `--reasoning-parser`
name another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import UnknownName
from outrider.server.reading import calls
from outrider.server.reading.source import Reading, Source

ReadCalls = Callable[[Source, calls.Schemas], Reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How calls are written."""

    name: str
    signs: tuple[str, ...]  # a chat template with one of these is of this form
    marks: tuple[str, ...]  # begin a call; text before them is text
    inner: tuple[str, ...] = ()  # those marks that `read` reads itself
    ends: tuple[str, ...] = ()  # may follow a call
    at_start: str = ""  # without a mark, a text that begins with this may be a call
    read: ReadCalls
    # For the grammar of forced calls: around all calls, around each, and between two of them.
    around: tuple[str, str] = ("", "")
    # Before the name, between name and arguments, after the arguments.
    call: tuple[str, str, str] = ('{"name": "', '", "arguments": ', "}")
    between: str = ""
    arguments: str = "json"  # or "xml", "glm", "python"
    id_length: int = 0  # of the ids of calls; 0: any


def _json(source: Source, schemas: calls.Schemas) -> Reading:
    return calls.json_calls(source)


_BEGIN = "<｜tool▁calls▁begin｜>"

# The first form whose sign is in the template is taken, so special signs come first.
FORMS = (
    ToolForm(
        name="harmony",
        signs=("<|channel|>",),
        marks=(),
        read=_json,  # not used: see `harmony`
        call=(
            "<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
            "<|call|>",
        ),
    ),
    ToolForm(
        name="qwen3-coder",
        signs=("<function=",),
        marks=("<tool_call>", "<function="),
        inner=("<function=",),
        ends=("</tool_call>",),
        read=calls.qwen_xml_calls,
        call=("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        between="\n",
        arguments="xml",
    ),
    ToolForm(
        name="glm",
        signs=("<arg_key>",),
        marks=("<tool_call>",),
        read=calls.glm_calls,
        call=("<tool_call>", "\n", "</tool_call>"),
        between="\n",
        arguments="glm",
    ),
    ToolForm(
        name="deepseek-v3.1",
        signs=("'<｜tool▁call▁begin｜>' + tool['function']['name']",),
        marks=(_BEGIN,),
        read=calls.deepseek_calls,
        around=(_BEGIN, "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    ToolForm(
        name="deepseek",
        signs=(_BEGIN,),
        marks=(_BEGIN,),
        read=calls.deepseek_calls,
        around=(_BEGIN, "<｜tool▁calls▁end｜>"),
        call=(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        between="\n",
    ),
    ToolForm(
        name="mistral-args",
        signs=("[ARGS]",),
        marks=("[TOOL_CALLS]",),
        read=calls.mistral_calls,
        call=("[TOOL_CALLS]", "[ARGS]", ""),
        id_length=9,
    ),
    ToolForm(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        read=calls.mistral_calls,
        around=("[TOOL_CALLS][", "]"),
        between=", ",
        id_length=9,
    ),
    ToolForm(
        name="phi",
        signs=("<|tool|>", "<|/tool_call|>"),
        marks=("<|tool_call|>", "functools"),
        ends=("<|/tool_call|>",),
        read=_json,
        around=("<|tool_call|>[", "]<|/tool_call|>"),
        between=", ",
    ),
    ToolForm(
        name="granite",
        signs=("<|tool_call|>",),
        marks=("<|tool_call|>", "<tool_call>"),
        ends=("</tool_call>",),
        read=_json,
        around=("<|tool_call|>[", "]"),
        between=", ",
    ),
    ToolForm(
        name="lfm2",
        signs=("<|tool_call_start|>", "<|tool_list_start|>"),
        marks=("<|tool_call_start|>",),
        ends=("<|tool_call_end|>",),
        read=calls.python_calls,
        around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        call=("", "(", ")"),
        between=", ",
        arguments="python",
    ),
    ToolForm(
        name="hermes",
        signs=("<tool_call>", "xml_tools"),
        marks=("<tool_call>",),
        ends=("</tool_call>",),
        read=_json,
        call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        between="\n",
    ),
    ToolForm(
        name="pythonic",
        signs=("<|python_start|>", "[func_name1(params_name1="),
        marks=("<|python_start|>",),
        ends=("<|python_end|>",),
        at_start="[",
        read=calls.python_calls,
        around=("[", "]"),
        call=("", "(", ")"),
        between=", ",
        arguments="python",
    ),
    ToolForm(
        name="llama-json",
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
        marks=("<|python_tag|>",),
        at_start="{",
        read=calls.bare_json_calls,
        call=('{"name": "', '", "parameters": ', "}"),
        between="; ",
    ),
)
TOOL_FORMS = {form.name: form for form in FORMS}
OTHER_NAMES = {
    **{"qwen3_coder": "qwen3-coder", "qwen3_xml": "qwen3-coder", "openai": "harmony"},
    **{"glm45": "glm", "glm47": "glm", "deepseek_v3": "deepseek", "deepseek_r1": "deepseek"},
    **{"deepseek_v31": "deepseek-v3.1", "llama3_json": "llama-json", "llama4_json": "llama-json"},
    **{"llama4_pythonic": "pythonic", "phi4_mini_json": "phi", "smollm3": "hermes"},
    **{"qwen": "hermes", "qwen25": "hermes", "qwen3": "hermes", "granite4": "hermes"},
}


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    name: str
    opening: str
    closing: str


REASONING_FORMS = {
    form.name: form
    for form in (
        ReasoningForm("think", "<think>", "</think>"),
        ReasoningForm("mistral", "[THINK]", "[/THINK]"),
        ReasoningForm("seed", "<seed:think>", "</seed:think>"),
        ReasoningForm("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningForm("granite", "Here is my thought process:", "Here is my response:"),
    )
}
REASONING_NAMES = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "glm45", "smollm3", "deepseek_v3"), "think"),
    **{"seed_oss": "seed", "cohere2": "cohere"},
}
NONE = "none"


def tool_form(template: str, wanted: str | None) -> ToolForm:
    """The form named by the user, else that of the chat template, else hermes."""
    if wanted is not None:
        name = OTHER_NAMES.get(wanted, wanted)
        if name not in TOOL_FORMS:
            raise UnknownName("tool call parser", wanted, TOOL_FORMS)
        return TOOL_FORMS[name]
    found = (form for form in FORMS if any(sign in template for sign in form.signs))
    return next(found, TOOL_FORMS["hermes"])


def reasoning_form(template: str, wanted: str | None) -> ReasoningForm | None:
    """The form named by the user, else that of the chat template; None: there is none."""
    if wanted == NONE:
        return None
    if wanted is not None:
        name = REASONING_NAMES.get(wanted, wanted)
        if name not in REASONING_FORMS:
            raise UnknownName("reasoning parser", wanted, (*REASONING_FORMS, NONE))
        return REASONING_FORMS[name]
    forms = REASONING_FORMS.values()
    return next((f for f in forms if f.closing in template or f.opening in template), None)
