"""`outrider serve`: an OpenAI-compatible server over one batching engine."""

from __future__ import annotations

import os
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from outrider.cli import flags
from outrider.errors import ConfigError, UnknownName

EXAMPLE = "Example: outrider serve --port 8000 --num-draft-tokens auto"
KEY_VARIABLE = "OUTRIDER_API_KEY"
BACKENDS = ("auto", "native", "torch", "transformers", "vllm")

NETWORK = "Network"
LIMITS = "Limits"
PRIVACY = "Privacy"
VLLM = "With --backend vllm"
VLLM_ONLY = {
    "pipeline_parallel_size",
    "data_parallel_size",
    "executor",
    "draft_table",
    "restarts",
    "vllm_args",
}

Host = Annotated[str, flags.option(NETWORK, "Address to listen on.", "--host", metavar="ADDRESS")]
Port = Annotated[int, flags.option(NETWORK, "Port to listen on.", "--port", metavar="PORT")]
KeyFile = Annotated[
    Path | None,
    flags.option(
        NETWORK,
        f"API keys, one per line; {KEY_VARIABLE} holds a single one.",
        "--api-key-file",
        metavar="FILE",
    ),
]
ModelName = Annotated[
    str | None,
    flags.option(
        NETWORK,
        "What clients call the model.",
        "--served-model-name",
        metavar="NAME",
        show_default="the folder's name",
    ),
]
ChatTemplate = Annotated[
    Path | None,
    flags.option(
        NETWORK,
        "A jinja chat template.",
        "--chat-template",
        metavar="FILE",
        show_default="the model's own",
    ),
]
NumDraftTokens = Annotated[
    str,
    flags.option(
        flags.SPECULATION,
        "Tokens drafted per step; 0 is plain decoding, auto what pays.",
        "--num-draft-tokens",
        "-k",
        metavar="K|auto",
    ),
]
Proposers = Annotated[
    str,
    flags.option(
        flags.SPECULATION,
        "Proposers that requests may name besides the default one.",
        "--proposers",
        metavar="NAMES",
    ),
]
MaxSequences = Annotated[
    int, flags.option(LIMITS, "Sequences decoded at once.", "--max-num-seqs", metavar="N")
]
MaxQueue = Annotated[
    int,
    flags.option(LIMITS, "Sequences that may wait; more get a 503.", "--max-queue", metavar="N"),
]
QueueTimeout = Annotated[
    float, flags.option(LIMITS, "Longest wait in the queue.", "--queue-timeout", metavar="S")
]
Buckets = Annotated[
    str | None,
    flags.option(
        flags.MACHINE,
        "Steps that a GPU prepares at the start; the doctor says which.",
        "--buckets",
        metavar="NxK,...",
        show_default="all sizes, up to 8 drafts",
    ),
]
KvTokens = Annotated[
    int | None,
    flags.option(
        LIMITS,
        "Capacity of the KV cache.",
        "--kv-tokens",
        metavar="N",
        show_default="2 GiB's worth",
    ),
]
PrefixCaching = Annotated[
    bool,
    flags.option(
        LIMITS,
        "Reuse the K/V of shared prefixes, per API key.",
        "--prefix-caching/--no-prefix-caching",
    ),
]
DrainTimeout = Annotated[
    float,
    flags.option(
        LIMITS, "On SIGTERM, wait so long for running requests.", "--drain-timeout", metavar="S"
    ),
]
StallTimeout = Annotated[
    float,
    flags.option(LIMITS, "A step that takes longer fails /health.", "--stall-timeout", metavar="S"),
]
Pad = Annotated[
    bool | None,
    flags.option(
        PRIVACY,
        "Frame sizes in buckets: hide how many tokens a step confirmed.",
        "--pad/--no-pad",
        show_default="on unless only this machine can connect",
    ),
]
Paced = Annotated[
    float | None,
    flags.option(
        PRIVACY,
        "Stream at a constant rate, in tokens per second.",
        "--paced",
        metavar="RATE",
        show_default="off",
    ),
]
Backend = Annotated[
    str,
    flags.option(
        flags.MACHINE,
        "auto, native, torch, transformers or vllm.",
        "--backend",
        metavar="NAME",
    ),
]
PipelineParallel = Annotated[
    int,
    flags.option(
        VLLM, "Devices that share the layers.", "--pipeline-parallel-size", "--pp", metavar="N"
    ),
]
DataParallel = Annotated[
    int, flags.option(VLLM, "Copies of the model.", "--data-parallel-size", "--dp", metavar="N")
]
Executor = Annotated[
    str | None,
    flags.option(
        VLLM,
        "mp, ray, uni or external_launcher.",
        "--distributed-executor-backend",
        metavar="NAME",
        show_default="vLLM's choice",
    ),
]
DraftTable = Annotated[
    str | None,
    flags.option(
        VLLM,
        "Drafted tokens by batch size, like 1-4:5,5-16:2,17-:0, or a JSON file.",
        "--draft-table",
        metavar="TABLE",
        show_default="the same for all",
    ),
]
Restarts = Annotated[
    int, flags.option(VLLM, "Start vLLM again so often if it dies.", "--restarts", metavar="N")
]
VllmArgs = Annotated[
    list[str] | None,
    flags.option(
        VLLM, "A further argument of vllm serve; may be repeated.", "--vllm-arg", metavar="ARG"
    ),
]
LogFormat = Annotated[
    str, flags.option(flags.OUTPUT, "text or json.", "--log-format", metavar="NAME")
]
LogLevel = Annotated[
    str,
    flags.option(flags.OUTPUT, "debug, info, warning or error.", "--log-level", metavar="NAME"),
]


LogPrompts = Annotated[
    bool,
    flags.option(flags.OUTPUT, "Also log the text of every prompt.", "--log-prompts"),
]
OtlpEndpoint = Annotated[
    str | None,
    flags.option(
        flags.OUTPUT,
        "Send OpenTelemetry traces there, e.g. http://localhost:4318/v1/traces.",
        "--otlp-endpoint",
        metavar="URL",
        show_default="off",
    ),
]


def serve(
    context: typer.Context,
    model: flags.Model = "bundled",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: KeyFile = None,
    served_model_name: ModelName = None,
    chat_template: ChatTemplate = None,
    draft_model: flags.DraftModel = None,
    proposer: flags.Proposer = None,
    proposers: Proposers = "ngram,suffix,prediction",
    proposer_option: flags.ProposerOptions = None,
    num_draft_tokens: NumDraftTokens = "auto",
    verifier: flags.Verifier = "coupled",
    max_sequences: MaxSequences = 64,
    max_queue: MaxQueue = 256,
    queue_timeout: QueueTimeout = 60.0,
    kv_tokens: KvTokens = None,
    prefix_caching: PrefixCaching = True,
    drain_timeout: DrainTimeout = 30.0,
    stall_timeout: StallTimeout = 120.0,
    pad: Pad = None,
    paced: Paced = None,
    device: flags.Device = "cpu",
    buckets: Buckets = None,
    dtype: flags.Dtype = "auto",
    backend: Backend = "auto",
    threads: flags.Threads = None,
    tensor_parallel_size: flags.TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    data_parallel_size: DataParallel = 1,
    executor: Executor = None,
    draft_table: DraftTable = None,
    restarts: Restarts = 0,
    vllm_args: VllmArgs = None,
    log_format: LogFormat = "text",
    log_level: LogLevel = "info",
    log_prompts: LogPrompts = False,
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible, with speculation chosen per request."""
    if not all(map(find_spec, ("fastapi", "uvicorn", "httptools", "prometheus_client"))):
        raise ConfigError("the server's parts are not installed: pip install 'outrider[server]'")
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format is text or json, not {log_format!r}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"--log-level is debug, info, warning or error, not {log_level!r}")
    if backend not in BACKENDS:
        raise UnknownName("backend", backend, BACKENDS)
    if backend == "vllm":
        from outrider.integrations.vllm.command import serve_vllm

        options = {**context.params, "num_draft_tokens": read_draft_tokens(num_draft_tokens)}
        name = served_model_name or model_name(model)
        raise typer.Exit(serve_vllm(options, given(context), read_keys(api_key_file), name))
    if vllm_only := given(context) & VLLM_ONLY:
        raise ConfigError(f"--{min(vllm_only).replace('_', '-')} needs --backend vllm")

    from outrider.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        api_keys=read_keys(api_key_file),
        model_name=served_model_name or model_name(model),
        chat_template=None if chat_template is None else read_template(chat_template),
        proposers=tuple(name.strip() for name in proposers.split(",") if name.strip()),
        max_queue=max_queue,
        queue_timeout_s=queue_timeout,
        drain_timeout_s=drain_timeout,
        stall_timeout_s=stall_timeout,
        pad=pad,
        paced=paced,
        log_prompts=log_prompts,
        otlp_endpoint=otlp_endpoint,
    )

    from outrider.server.logs import set_up
    from outrider.server.run import PortTaken, bind
    from outrider.server.run import serve as run

    wanted = read_draft_tokens(num_draft_tokens)
    to_prepare = flags.read_buckets(buckets)
    try:
        listener = bind(config)
    except PortTaken as error:
        print("outrider:", error, file=sys.stderr)
        raise typer.Exit(1) from None
    with listener:
        set_up(log_format, log_level)
        shown, at = (f"[{host}]" if ":" in host else host), listener.getsockname()[1]
        print(f"outrider: loading {config.model_name} on http://{shown}:{at}", file=sys.stderr)

        from outrider.engine.build import EngineConfig, build
        from outrider.engine.engine import Engine
        from outrider.server.service import Service

        engine_config = EngineConfig(
            model=model,
            draft_model=draft_model,
            proposer=proposer,
            proposer_options=flags.read_proposer_options(proposer_option),
            num_draft_tokens=wanted,
            verifier=verifier,
            device=device,
            dtype=dtype,
            backend=backend,  # type: ignore[arg-type]
            threads=threads,
            tensor_parallel_size=tensor_parallel_size,
            kv_tokens=kv_tokens,
            prefix_caching=prefix_caching,
            max_sequences=max_sequences,
            buckets=to_prepare,
        )

        def load() -> Engine:
            return build(engine_config)

        code = run(Service(config, load), listener)
    leave(code)


def given(context: typer.Context) -> set[str]:
    """The options that the user wrote."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name != "DEFAULT"}


def leave(code: int) -> None:
    """Exits. A thread that is still loading or hangs in a step cannot be asked to end."""
    busy = [t for t in threading.enumerate() if t.name in ("outrider-load", "outrider-engine")]
    if busy:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise typer.Exit(code)


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys of a file, or the one of the environment; never an argument others could list."""
    if file is None:
        key = os.environ.get(KEY_VARIABLE, "")
        return (key,) if key else ()
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise ConfigError(f"cannot read keys from {file}: {reason}") from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise ConfigError(f"{file} holds no key")
    return keys


def read_draft_tokens(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--num-draft-tokens is a number or auto, not {text!r}") from None


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the chat template from {file}: {reason}") from None


def model_name(model: str) -> str:
    """What clients call a model: a hub name as it is, a folder by its last part."""
    return Path(model).resolve().name if Path(model).exists() else model
