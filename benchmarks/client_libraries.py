"""Runs client libraries, as they are, against a server: does each thing that they do work?

    python benchmarks/client_libraries.py --url http://127.0.0.1:8000 --out result.md

One row for each library and thing: "works", "not installed", or the error. Install the libraries
into an environment of their own and start `outrider serve` with a model that follows instructions.
The model may answer nonsense, the protocol may not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}
ASK: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
Check = Callable[[str, str], object]
CHECKS: list[tuple[str, str, Check]] = []  # package, what, how


def check(package: str, what: str) -> Callable[[Check], Check]:
    def keep(function: Check) -> Check:
        CHECKS.append((package, what, function))
        return function

    return keep


def library(name: str) -> Any:
    """A module that need not be installed."""
    return importlib.import_module(name)


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@check("openai", "chat")
def openai_chat(url: str, model: str) -> object:
    reply = _openai(url).chat.completions.create(model=model, messages=ASK, max_tokens=16)
    return reply.choices[0].message.content


@check("openai", "chat, streamed")
def openai_stream(url: str, model: str) -> object:
    options = {"include_usage": True}
    more: Any = {"model": model, "messages": ASK, "max_tokens": 16, "stream_options": options}
    chunks = list(_openai(url).chat.completions.create(stream=True, **more))
    assert chunks[-1].usage.completion_tokens > 0
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])


@check("openai", "tools, streamed")
def openai_tools(url: str, model: str) -> object:
    with _openai(url).chat.completions.stream(
        model=model,
        messages=ASK,
        tools=[{"type": "function", "function": FUNCTION | {"strict": True}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    return call.function.parsed_arguments or call.function.arguments


def _person() -> Any:
    import pydantic

    class Person(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid")
        name: str
        age: int = pydantic.Field(ge=0, le=150)

    return Person


@check("openai", "chat, parsed")
def openai_parse(url: str, model: str) -> object:
    messages: Any = [{"role": "user", "content": "Eve is 30 years old."}]
    reply = _openai(url).chat.completions.parse(
        model=model, messages=messages, response_format=_person(), max_tokens=60, temperature=0
    )
    assert reply.choices[0].message.parsed.name
    return reply


@check("openai", "responses")
def openai_responses(url: str, model: str) -> object:
    client = _openai(url)
    one = client.responses.create(model=model, input="My name is Eve.", max_output_tokens=16)
    return client.responses.create(
        model=model, input="Who am I?", previous_response_id=one.id, max_output_tokens=16
    ).output_text


@check("openai", "responses, streamed, with a tool")
def openai_responses_stream(url: str, model: str) -> object:
    tool = {"type": "function", "strict": True, **FUNCTION}
    more: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with _openai(url).responses.stream(
        model=model, input=ASK, max_output_tokens=100, **more
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output[0].name == "get_weather"
    return kinds


@check("openai", "responses, parsed")
def openai_responses_parse(url: str, model: str) -> object:
    reply = _openai(url).responses.parse(
        model=model, input="Eve is 30.", text_format=_person(), max_output_tokens=60, temperature=0
    )
    assert reply.output_parsed.name
    return reply


@check("openai", "embeddings")
def openai_embeddings(url: str, model: str) -> object:
    reply = _openai(url).embeddings.create(model=model, input=["one", "two"])
    assert len(reply.data) == 2
    return len(reply.data[0].embedding)


def _anthropic(url: str) -> Any:
    return library("anthropic").Anthropic(base_url=url, api_key="none", max_retries=0)


TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}


@check("anthropic", "messages")
def anthropic_messages(url: str, model: str) -> object:
    reply = _anthropic(url).messages.create(model=model, messages=ASK, max_tokens=16, system="Hi.")
    return reply.content[0].text


@check("anthropic", "tools, streamed, and their result")
def anthropic_tools(url: str, model: str) -> object:
    client = _anthropic(url)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    more: Any = {"model": model, "max_tokens": 100, "tools": [TOOL]}
    with client.messages.stream(messages=ASK, tool_choice=choice, **more) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    used = next(block for block in final.content if block.type == "tool_use")
    assert final.stop_reason == "tool_use"
    assert set(used.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "It rains."}
    turns = [*ASK, {"role": "assistant", "content": final.content}]
    return client.messages.create(messages=[*turns, {"role": "user", "content": [result]}], **more)


@check("anthropic", "count_tokens")
def anthropic_count(url: str, model: str) -> object:
    return _anthropic(url).messages.count_tokens(model=model, messages=ASK, tools=[TOOL])


@check("ollama", "chat, streamed")
def ollama_chat(url: str, model: str) -> object:
    client = library("ollama").Client(host=url)
    options = {"num_predict": 16}
    parts = list(client.chat(model=model, messages=ASK, options=options, stream=True))
    assert parts[-1].done
    return client.chat(model=model, messages=ASK, options=options).message.content


@check("ollama", "tools, format, generate")
def ollama_tools(url: str, model: str) -> object:
    client, options = library("ollama").Client(host=url), {"num_predict": 60, "temperature": 0}
    tools = [{"type": "function", "function": FUNCTION}]
    client.chat(model=model, messages=ASK, tools=tools, options=options)
    reply = client.chat(
        model=model, messages=ASK, format=_person().model_json_schema(), options=options
    )
    assert _person().model_validate_json(reply.message.content)
    return client.generate(model=model, prompt="Hello", options=options).response


@check("ollama", "list, show, ps, embed")
def ollama_facts(url: str, model: str) -> object:
    client = library("ollama").Client(host=url)
    assert client.list().models[0].model == model
    assert "tools" in (client.show(model).capabilities or [])
    assert client.ps().models
    return len(client.embed(model=model, input="hello").embeddings[0])


@check("openai-agents", "an agent with two tools")
def agents(url: str, model: str) -> object:
    import openai

    kit = library("agents")

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    kit.set_default_openai_client(client, use_for_tracing=False)
    kit.set_tracing_disabled(True)

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"It rains in {city}."

    def get_time() -> str:
        """The time."""
        return "noon"

    settings = kit.ModelSettings(tool_choice="required", max_tokens=100)
    agent = kit.Agent(
        name="a",
        model=model,
        tools=[kit.function_tool(get_weather), kit.function_tool(get_time)],
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    return kit.Runner.run_sync(agent, "What is the weather in Oslo?").final_output


@check("langchain-openai", "tools bound")
def langchain_openai(url: str, model: str) -> object:
    chat = library("langchain_openai").ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, max_tokens=100
    )
    bound = chat.bind_tools([{"type": "function", "function": FUNCTION}], tool_choice="any")
    found = bound.invoke("What is the weather in Oslo?")
    assert found.tool_calls[0]["name"] == "get_weather"
    return list(bound.stream("What is the weather in Oslo?"))


@check("langchain-anthropic", "tools bound")
def langchain_anthropic(url: str, model: str) -> object:
    chat = library("langchain_anthropic").ChatAnthropic(
        base_url=url, api_key="none", model=model, max_tokens=100
    )
    found = chat.bind_tools([TOOL], tool_choice="any").invoke("What is the weather in Oslo?")
    assert found.tool_calls[0]["name"] == "get_weather"
    return found


@check("litellm", "chat and messages")
def litellm(url: str, model: str) -> object:
    kit = library("litellm")
    more: Any = {"messages": ASK, "api_key": "none", "max_tokens": 16}
    kit.completion(model=f"openai/{model}", api_base=f"{url}/v1", **more)
    return kit.completion(model=f"anthropic/{model}", api_base=url, **more)


@check("instructor", "tools and json modes")
def instructor(url: str, model: str) -> object:
    kit = library("instructor")
    found = []
    for mode in (kit.Mode.TOOLS, kit.Mode.JSON_SCHEMA, kit.Mode.TOOLS_STRICT):
        client = kit.from_openai(_openai(url), mode=mode)
        messages: Any = [{"role": "user", "content": "Eve is 30 years old."}]
        found.append(
            client.chat.completions.create(
                model=model, messages=messages, response_model=_person(), max_tokens=100
            )
        )
    return found


@check("pydantic-ai-slim", "structured output")
def pydantic_ai(url: str, model: str) -> object:
    Agent = library("pydantic_ai").Agent
    OpenAIChatModel = library("pydantic_ai.models.openai").OpenAIChatModel
    OpenAIProvider = library("pydantic_ai.providers.openai").OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent: Any = Agent(OpenAIChatModel(model, provider=provider), output_type=_person())
    return agent.run_sync("Eve is 30 years old.", model_settings={"max_tokens": 100}).output


@check("llama-index-llms-openai-like", "chat")
def llama_index(url: str, model: str) -> object:
    ChatMessage = library("llama_index.core.llms").ChatMessage
    OpenAILike = library("llama_index.llms.openai_like").OpenAILike

    chat = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=16
    )
    return chat.chat([ChatMessage(role="user", content="Hello")])


@check("llm", "tools, free to call")
def llm(url: str, model: str) -> object:
    Chat = library("llm.default_plugins.openai_models").Chat

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    chat = Chat(model_id="local", model_name=model, api_base=f"{url}/v1", supports_tools=True)
    chain = chat.chain(
        "What is the weather in Oslo?", tools=[get_weather], key="none", options={"max_tokens": 60}
    )
    return chain.text()


def with_npm(folder: Path, url: str, model: str) -> list[str]:
    """Rows of npm's libraries, which are in FOLDER/node_modules."""
    script = Path(__file__).with_suffix(".mjs")
    command = ["node", str(script), url, model, str(folder.resolve())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr.strip())
    return done.stdout.splitlines()


def provenance() -> list[str]:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return ["", f"- date: {now}", f"- commit: {commit}", f"- machine: {machine}"]


def outcome(package: str, function: Check, url: str, model: str) -> tuple[str, str]:
    """The version, and "works" or why not."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "", "not installed"
    try:
        function(url, model)
    except Exception as error:  # a client may raise anything
        text = " ".join(str(error).split())[:160]
        return version, f"{type(error).__name__}: {text}"
    return version, "works"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="model")
    parser.add_argument("--node", type=Path, help="a folder with node_modules")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows, failures = [], 0
    for package, what, function in CHECKS:
        version, found = outcome(package, function, given.url, given.model)
        failures += found not in ("works", "not installed")
        rows.append(f"| {package} | {version} | {what} | {found.replace('|', '/')} |")
        print(rows[-1], flush=True)
    if given.node is not None:
        npm = with_npm(given.node, given.url, given.model)
        print("\n".join(npm))
        failures += sum(not row.endswith("| works |") for row in npm)
        rows += npm
    if given.out is not None:
        head = ["# Client libraries, unmodified", ""]
        head += [f"`make client-libraries`, with the model {given.model}. Each row is one thing"]
        head += ["that a library did against `outrider serve`.", ""]
        table = ["| library | version | what | result |", "|---|---|---|---|", *rows]
        given.out.write_text("\n".join([*head, *table, *provenance()]) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
