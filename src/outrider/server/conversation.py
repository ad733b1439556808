"""Turns a conversation into the text of a prompt, in the model's chat template.

Templates differ in what they read. Those that know no tools get the tools, calls and results as
text, in Hermes' form. Some take the arguments of earlier calls as text, most as an object.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from outrider.errors import RequestError
from outrider.model.chat_template import ChatTemplate
from outrider.server.reading.formats import ToolForm
from outrider.server.request import Conversation, Tool

# What a request may not set: the server computes it, or the sandbox provides it.
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "raise_exception",
        "strftime_now",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    }
)
_EXPLAINED = """\
You may call functions. The functions are:
<tools>
{tools}
</tools>
To call a function, write a JSON object with its name and arguments inside these tags:
<tool_call>
{{"name": "<function>", "arguments": {{...}}}}
</tool_call>"""


def render(template: ChatTemplate, conversation: Conversation, form: ToolForm) -> str:
    """The prompt. Raises RequestError if the template refuses the conversation."""
    tools = conversation.tools if conversation.choice.kind != "none" else ()
    messages = [_plain(message, template, form) for message in conversation.messages]
    variables = _variables(template, conversation)
    if takes_tools(template):
        declared = [tool.declared() for tool in tools] or None
        variables |= {"tools": declared}
        if "xml_tools" in template.variables:
            variables |= {"xml_tools": [] if declared is None else declared}
    else:
        messages = _as_text(messages, tools)
    options: dict[str, Any] = {
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        "variables": variables,
    }
    if not any("tool_calls" in message for message in messages):
        return template.render(messages, **options)
    try:
        return template.render([_parsed(message) for message in messages], **options)
    except RequestError as refusal:
        try:
            return template.render(messages, **options)
        except RequestError:
            raise refusal from None


def takes_tools(template: ChatTemplate) -> bool:
    return bool({"tools", "xml_tools"} & template.variables)


def _variables(template: ChatTemplate, conversation: Conversation) -> dict[str, Any]:
    given = conversation.variables
    if wrong := sorted(RESERVED & given.keys()):
        raise RequestError(f"chat_template_kwargs cannot set {wrong[0]!r}", "chat_template_kwargs")
    thinking = given.get("enable_thinking")
    if thinking is not None and "thinking" in template.variables:
        return {"thinking": thinking, **given}
    return dict(given)


def _plain(message: Mapping[str, Any], template: ChatTemplate, form: ToolForm) -> dict[str, Any]:
    """The message in the words of this template."""
    found = dict(message)
    if found["role"] == "developer" and "developer" not in template.source:
        found["role"] = "system"
    if "reasoning_content" in found and ".thinking" in template.source:
        found["thinking"] = found["reasoning_content"]
    if form.id_length:
        if "tool_call_id" in found:
            found["tool_call_id"] = _fitting(found["tool_call_id"], form.id_length)
        if "tool_calls" in found:
            calls = found["tool_calls"]
            found["tool_calls"] = [c | {"id": _fitting(c["id"], form.id_length)} for c in calls]
    return found


def _fitting(id: str, length: int) -> str:
    """An id of that length; the same for the same id."""
    if len(id) == length and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "replace")).hexdigest()[:length]


def _parsed(message: dict[str, Any]) -> dict[str, Any]:
    """With the arguments of calls as objects."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append(call | {"function": function | {"arguments": _object(function["arguments"])}})
    return message | {"tool_calls": calls}


def _object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


def _as_text(messages: list[dict[str, Any]], tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Tools, calls and results as text, for templates without them."""
    found = []
    for message in messages:
        if calls := message.get("tool_calls"):
            written = [
                "<tool_call>\n"
                + json.dumps(
                    {
                        "name": call["function"]["name"],
                        "arguments": _object(call["function"]["arguments"]),
                    },
                    ensure_ascii=False,
                )
                + "\n</tool_call>"
                for call in calls
            ]
            text = "\n".join(filter(None, [message["content"], *written]))
            message = {"role": message["role"], "content": text}
        elif message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
        found.append(message)
    if tools:
        lines = "\n".join(json.dumps(tool.declared(), ensure_ascii=False) for tool in tools)
        text = _EXPLAINED.format(tools=lines)
        if found and found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{found[0]['content']}\n\n{text}"}
        else:
            found.insert(0, {"role": "system", "content": text})
    return found
