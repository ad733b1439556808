"""`outrider serve`: an OpenAI-compatible server over one batching engine."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.config import BACKENDS, EngineConfig
from outrider.errors import ConfigError, UnknownName
from outrider.options import Options, expanded, given_names, of
from outrider.parameters import params
from outrider.server_config import ServerConfig, VllmConfig

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.server.service import Service

EXAMPLE = "Example: outrider serve --port 8000 --num-draft-tokens auto"
SERVED_BACKENDS = (*BACKENDS, "vllm")
EngineOptions = Annotated[
    Options,
    of(
        EngineConfig,
        draft_model={
            "kind": list[str] | None,
            "help": "Drafter: a folder, a hub name or bundled:NAME; may be repeated.",
        },
        backend={
            "help": "auto, native, torch, transformers or vllm.",
            "choices": SERVED_BACKENDS,
        },
    ),
]
ServerOptions = Annotated[Options, of(ServerConfig, model_name={"default": None})]


@expanded
def serve(
    *,
    context: typer.Context,
    engine: EngineOptions,
    server: ServerOptions,
    vllm: Annotated[Options, of(VllmConfig)],
) -> None:
    """Serve a model over HTTP, OpenAI-compatible, with speculation chosen per request."""
    if not all(map(find_spec, ("fastapi", "uvicorn", "httptools", "prometheus_client"))):
        raise ConfigError("the server's parts are not installed: pip install 'outrider[server]'")
    if engine["backend"] not in SERVED_BACKENDS:
        raise UnknownName("backend", engine["backend"], SERVED_BACKENDS)
    drafters = engine.pop("draft_model", ())
    if drafters:
        engine |= {"draft_model": drafters[0], "other_drafters": drafters[1:]}
    server.setdefault("model_name", model_name(engine["model"]))
    config = ServerConfig(**server)
    given = given_names(context)
    if engine["backend"] == "vllm":
        if engine.pop("other_drafters", ()):
            raise ConfigError("vLLM has one drafter: give --draft-model once")
        from outrider.integrations.vllm.command import serve_vllm

        template = context.params["chat_template"]
        raise typer.Exit(serve_vllm(config, engine | vllm, given, template))
    if vllm_only := given & set(params(VllmConfig)):
        raise ConfigError(f"{params(VllmConfig)[min(vllm_only)].flag} needs --backend vllm")
    if config.models_dir is not None:
        leave(serve_models(config, engine))
    leave(serve_native(config, EngineConfig(**engine)))


def serve_models(config: ServerConfig, engine: Options) -> int:
    """Serves all models of a folder until a signal to stop and returns the exit code."""
    from outrider.server.models import Models, find_models, make_models_app
    from outrider.server.run import run

    models = find_models(Path(str(config.models_dir)))
    with listening(config, ", ".join(models)) as (listener, _):
        from outrider.engine.build import build

        def load(path: Path) -> Engine:
            return build(EngineConfig(**engine | {"model": str(path)}))

        service = Models(config, models, load)
        return run(service, make_models_app(service), listener)


def serve_native(config: ServerConfig, engine_config: EngineConfig) -> int:
    """Serves until a signal to stop and returns the exit code."""
    from outrider.server.run import serve as run

    with listening(config, config.model_name) as (listener, at):
        from outrider.engine.build import build
        from outrider.server.service import Service

        def load() -> Engine:
            return build(engine_config)

        service = Service(config, load)
        return run(service, listener, lambda: announce(service, at, engine_config.dtype))


@contextmanager
def listening(config: ServerConfig, names: str) -> Iterator[tuple[socket.socket, str]]:
    """A socket and its address, before anything is loaded."""
    from outrider.server.logs import set_up
    from outrider.server.run import PortTaken, bind

    try:
        listener = bind(config)
    except PortTaken as error:
        print("outrider:", error, file=sys.stderr)
        raise typer.Exit(1) from None
    with listener:
        set_up(config.log_format, config.log_level)
        host = f"[{config.host}]" if ":" in config.host else config.host
        at = f"http://{host}:{listener.getsockname()[1]}"
        print(f"outrider: loading {names} on {at}", file=sys.stderr)
        yield listener, at


def announce(service: Service, at: str, dtype: str) -> None:
    """Prints what runs where, once it does."""
    served, config = service.served, service.config
    core, default = served.core, served.core.default
    spec = core.target.spec
    num_kv = core.kv.num_blocks * core.kv.block_size
    kv_bytes = num_kv * spec.kv_bytes_per_token
    drafts = "none" if default.proposer is None else default.proposer
    others = f"; requests may name {', '.join(core.drafters)}" if core.drafters else ""
    given = {name: value for name, value in served.defaults.items() if value != 1.0}
    names = ", ".join((config.model_name, *config.model_aliases))
    key = " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    rows = {
        "API": f"{at}/v1 (OpenAI), {at} (Anthropic, Ollama, llama-server)",
        "pages": f"{at}/live, {at}/docs",
        "model": f"{names}: {spec.num_parameters / 1e6:.0f}M parameters, dtype {dtype}, "
        f"{served.max_model_len} tokens of context",
        "drafts": f"{drafts}, K {default.num_draft_tokens}{others}",
        "sampling": ", ".join(f"{name} {value}" for name, value in given.items()) or "plain",
        "KV cache": f"{num_kv} tokens, {kv_bytes / (1 << 30):.2f} GiB",
        "key": "needed" if config.api_keys else "none: only this machine can connect",
        "try": f"curl {at}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'",
    }
    for name, text in rows.items():
        print(f"outrider: {name:9} {text}", file=sys.stderr)


def leave(code: int) -> None:
    """Exits, without waiting for a thread that is loading or hangs in a step."""
    busy = [t for t in threading.enumerate() if t.name in ("outrider-load", "outrider-engine")]
    if busy:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def model_name(model: str) -> str:
    """What clients call a model: a hub name as it is, a folder or file by its last part."""
    from outrider.model.gguf.files import model_name as name_of

    return name_of(Path(model).resolve()) if Path(model).exists() else model
