"""What scripts and clients rely on: options of commands, keys of `--json`, HTTP bodies, metrics.

A change may add to them, but take nothing away. Prose is not recorded: help texts and error
messages may be improved at any time, and docs/reference/cli.md shows each change of a help text.
Of measured values only the type is recorded.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import typer

import outrider
from outrider.cli.app import app
from outrider.testing import write_tiny_llama

# --- the command line -----------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command's options and arguments, with names, defaults and whether each is a flag."""
    root = typer.main.get_command(app)
    normalize = root.context_settings["token_normalize_func"]
    others = ("num_draft_tokens", "num-speculative-tokens", "speculative_model", "max-new-tokens")
    found: dict[str, Any] = {"other names": {name: normalize(name) for name in (*others, "temp")}}

    def visit(path: str, command: Any) -> None:
        found[path] = {_called(parameter): _declared(parameter) for parameter in command.params}
        for name, child in sorted(getattr(command, "commands", {}).items()):
            visit(f"{path} {name}", child)

    visit("outrider", root)
    return found


def _called(parameter: Any) -> str:
    """As users write it: an option's first name, an argument's placeholder."""
    argument = parameter.param_type_name == "argument"
    return str(parameter.metavar or parameter.name if argument else parameter.opts[0])


def _declared(parameter: Any) -> dict[str, Any]:
    names = [*parameter.opts, *parameter.secondary_opts]
    found = {
        "names": [] if parameter.param_type_name == "argument" else names,
        "value": parameter.metavar,
        "flag": getattr(parameter, "is_flag", False),
        "default": parameter.default if _is_plain(parameter.default) else str(parameter.default),
        "required": parameter.required,
        "repeated": getattr(parameter, "multiple", False) or parameter.nargs != 1,
        "variable": parameter.envvar,
    }
    return {key: value for key, value in found.items() if value not in ([], None, False)}


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float, list))


def write_pair(folder: Path) -> list[str]:
    """The arguments that name a tiny target and its draft model."""
    target, draft = (
        write_tiny_llama(
            folder / name, vocab_size=320, num_tokens=300, num_layers=layers, max_positions=384
        )
        for name, layers in (("target", 2), ("draft", 1))
    )
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return [str(target), "--draft-model", str(draft)]


TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def outputs(folder: Path, pair: list[str], url: str) -> dict[str, Any]:
    """The shape of what every command with `--json` prints."""
    text, prompts = folder / "text.txt", folder / "prompts.txt"
    text.write_text("".join(f"def f{i % 7}(x):\n    return x + {i % 5}\n" for i in range(300)))
    prompts.write_text("the quick brown fox\njumps over the lazy dog\n")
    bench = ["-w", str(prompts), "-n", "2", "-m", "8"]
    training = ["--steps", "2", "--length", "16", "--batch", "2", "--target", pair[0]]
    calls = {
        "generate": [*pair, "-p", "hi", "-m", "12", "-k", "3", "--logprobs", "2", "--n", "2"],
        "demo": [*pair, "-p", "hello", "-m", "8", "-k", "3"],
        "theory": ["-k", "3", "-c", "0.1"],
        "theory --claims": [],
        "plan": ["--rate", "1", "--price", "2", "--output-tokens", "8"],
        "bench decode": [*pair, *bench, "-k", "2", "-r", "1"],
        "bench sweep": [*pair, *bench, "--axis", "k", "-k", "1,2", "-r", "1"],
        "bench serve": [url, *bench, "--clients", "2"],
        "prove --inject replace-from-p": [*pair, "--max-tokens", "8"],
        "prove --endpoint": [url, "--baseline", url, "--max-tokens", "8"],
        "doctor": [*pair, "--prompts", str(prompts), "--check"],
        "export vllm": ["bundled:eagle3", str(folder / "eagle3")],
    }
    for kind in ("draft", "medusa", "eagle3", "dflash"):
        calls[f"train {kind}"] = [str(text), *training, "--out", str(folder / kind)]
    return {name: shape(printed(*name.split(), *more)) for name, more in calls.items()}


def printed(*args: str) -> Any:
    """The JSON object that a command prints last."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        command = typer.main.get_command(app)
        code = command.main(args=[*args, "--json"], standalone_mode=False)
    assert code in (0, None, 1), err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])


def shape(value: Any) -> Any:
    """Keys and types. The rows of a list are merged; keys that are numbers count as one."""
    if isinstance(value, dict):
        numbered = bool(value) and all(re.fullmatch(r"[\d.]+", str(key)) for key in value)
        if numbered:
            return {"N": merged([shape(inner) for inner in value.values()])}
        return {k: "..." if k == "provenance" else shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [merged([shape(inner) for inner in value])] if value else []
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    return "number" if isinstance(value, (int, float)) else "text"


def merged(shapes: list[Any]) -> Any:
    """One shape that all have; a key that some lack ends with "?"."""
    known = [found for found in shapes if found != "null"]
    if not known:
        return "null"
    if all(isinstance(found, dict) for found in known):
        keys = dict.fromkeys(key for found in known for key in found)
        return {
            key + ("" if all(key in found for found in known) else "?"): merged(
                [found[key] for found in known if key in found]
            )
            for key in keys
        }
    if all(isinstance(found, list) for found in known):
        inner = [found[0] for found in known if found]
        return [merged(inner)] if inner else []
    return " or ".join(sorted({json.dumps(f) if not isinstance(f, str) else f for f in known}))


def difference(golden: Any, found: Any, path: str = "", *, exact: bool = False) -> str | None:
    """What a change took away or altered; what it adds is fine.

    Shapes know nothing of "null" and empty lists, so these fit all. `exact`: values, not shapes.
    """
    if not exact and ("null" in (golden, found) or [] in (golden, found)):
        return None
    if isinstance(golden, dict) and isinstance(found, dict):
        golden, found = ({k.rstrip("?"): v for k, v in d.items()} for d in (golden, found))
        pairs = [(f"{path}.{key}", golden[key], found.get(key, "nothing")) for key in golden]
    elif isinstance(golden, list) and isinstance(found, list) and len(golden) == len(found):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(golden, found, strict=True))]
    else:
        return None if golden == found else f"{path}: {golden!r}, now {found!r}"
    texts = (difference(old, new, inner, exact=exact) for inner, old, new in pairs)
    return next((text for text in texts if text), None)


# --- HTTP -----------------------------------------------------------------------------------------


@contextmanager
def server(pair: list[str]) -> Iterator[str]:
    """The address of `outrider serve` in a process of its own."""
    command = [sys.executable, "-m", "outrider", "serve", *pair, "--port", "0", "-k", "3"]
    command += ["--threads", "1", "--dtype", "float32", "--served-model-name", "tiny"]
    command += ["--proposer-option", "draft-model.dtype=float32"]
    source = str(Path(outrider.__file__).parents[1])
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source}
    )
    lines: list[str] = []
    is_up = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                is_up.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert is_up.wait(60), "".join(lines)
        found = re.search(r"http://[\d.:]+", "".join(lines))
        assert found is not None, lines
        for _ in range(600):
            if httpx.get(f"{found.group()}/health").status_code == 200:
                break
            is_up.wait(0.1)
        yield found.group()
    finally:
        process.terminate()
        process.wait(30)
        reader.join(5)
        assert process.stderr is not None
        process.stderr.close()


MESSAGES = [{"role": "user", "content": "tell me a story"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
COMMON: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7, "seed": 5}
METRICS = {"metrics": "detailed"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (TEXT, {"prompt": "once upon", **COMMON}),
    "completions": (TEXT, {"prompt": ["a", "b"], "n": 2, **COMMON}),
    "completion with logprobs": (TEXT, {"prompt": "once", "echo": True, "logprobs": 2, **COMMON}),
    "completion of token ids": (TEXT, {"prompt": [5, 6, 7], "ignore_eos": True, **COMMON}),
    "completion with a stop": (TEXT, {"prompt": "once upon", "stop": ["e"], **COMMON}),
    "completion, plain": (TEXT, {"prompt": "once upon", "speculation": {"off": True}, **COMMON}),
    "completion, its own drafts": (
        TEXT,
        {
            "prompt": "once upon",
            "speculation": {"proposer": "draft-model", "num_draft_tokens": 2, "verifier": "block"},
            **COMMON,
        },
    ),
    "chat": (CHAT, {"messages": MESSAGES, **COMMON}),
    "chat with logprobs": (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2, **COMMON},
    ),
    "chat with metrics": (CHAT, {"messages": MESSAGES, "speculation": METRICS, **COMMON}),
    "tokenize": ("/tokenize", {"prompt": "hello", "return_token_strs": True}),
    "tokenize messages": ("/tokenize", {"messages": MESSAGES}),
    "detokenize": ("/detokenize", {"tokens": [5, 6, 7]}),
}
USAGE = {"include_usage": True}
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (TEXT, {"prompt": "once upon", **COMMON}),
    "completions": (TEXT, {"prompt": ["a", "b"], "stream_options": USAGE, **COMMON}),
    "chat": (CHAT, {"messages": MESSAGES, "stream_options": USAGE, **COMMON}),
    "chat with metrics": (CHAT, {"messages": MESSAGES, "speculation": METRICS, **COMMON}),
    "chat with logprobs": (
        CHAT,
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, **COMMON},
    ),
}
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no prompt": (TEXT, {}),
    "temperature too high": (TEXT, {"prompt": "x", "temperature": 1000}),
    "wrong type": (CHAT, {"messages": "hello"}),
    "unknown model": (TEXT, {"prompt": "x", "model": "gpt"}),
    "prompt too long": (TEXT, {"prompt": "x" * 500}),
    "unknown field": (TEXT, {"prompt": "x", "tempreature": 1}),
    "unknown proposer": (TEXT, {"prompt": "x", "speculation": {"proposer": "medusas"}}),
    "lossy pair": (
        TEXT,
        {"prompt": "x", "speculation": {"proposer": "draft-tree", "verifier": "token"}},
    ),
    "unknown path": ("/v1/nothing", {}),
}
PAGES = ("/health", "/version", "/v1/models", "/v1/models/tiny", "/v1/models/other")


def http(url: str) -> dict[str, Any]:
    """Replies with what varies taken out; `/metrics` by name, type and labels."""
    with httpx.Client(base_url=url, timeout=60) as client:
        found: dict[str, Any] = {}
        for name, (path, body) in BODIES.items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            found[name] = steady(reply.json())
        for name, (path, body) in STREAMS.items():
            found[f"{name}, streamed"] = streamed(client.post(path, json=body | {"stream": True}))
        for name, (path, body) in FAULTS.items():
            reply = client.post(path, json=body)
            found[name] = {"status": reply.status_code, "body": wordless(reply.json())}
        for path in PAGES:
            reply = client.get(path)
            found[path] = {"status": reply.status_code, "body": wordless(steady(reply.json()))}
        found["/metrics"] = metrics(client.get("/metrics").text)
        return found


VARYING = ("id", "created", "system_fingerprint", "version")


def steady(value: Any) -> Any:
    """The reply without ids, times and exact floats."""
    if isinstance(value, dict):
        return {
            key: shape(inner) if key in VARYING else steady(inner) for key, inner in value.items()
        }
    if isinstance(value, list):
        return [steady(inner) for inner in value]
    return "number" if isinstance(value, float) else value


def wordless(value: Any) -> Any:
    """An error without its sentence."""
    if isinstance(value, dict):
        return {key: "..." if key == "message" else wordless(v) for key, v in value.items()}
    return value


def streamed(reply: httpx.Response) -> dict[str, Any]:
    """The frames' shape, each choice's text, usage and the end: frames come as fast as they can."""
    assert reply.status_code == 200, reply.text
    events = reply.text.split("\n\n")
    chunks = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    texts: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            index = str(choice["index"])
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + (piece or "")
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    first, last = chunks[0]["choices"][0], chunks[-1]
    return {
        "type": reply.headers["content-type"],
        "frame": merged([shape(chunk) for chunk in chunks]),
        "first role": first.get("delta", {}).get("role"),
        "texts": dict(sorted(texts.items())),
        "reasons": dict(sorted(reasons.items())),
        "last frame's usage": last.get("usage"),
        "end": events[-2:],
    }


def metrics(page: str) -> dict[str, Any]:
    """Name -> type and labels of each family."""
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    labels: dict[str, set[str]] = {name: set() for name in kinds}
    for name, inside in re.findall(r"^([\w:]+)\{([^}]*)\} ", page, re.MULTILINE):
        family = next((f for f in kinds if name == f or name.startswith(f"{f}_")), name)
        labels.setdefault(family, set()).update(re.findall(r"(\w+)=", inside))
    return {name: {"type": kinds[name], "labels": sorted(labels[name])} for name in sorted(kinds)}
