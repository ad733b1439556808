"""Every parameter of servers, declared once, like those of engines in `outrider.config`."""

# fmt: off
from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.config import SamplingParams
from outrider.errors import ConfigError, RequestError
from outrider.parameters import (
    LIMITS,
    NETWORK,
    OUTPUT,
    PRIVACY,
    SPECULATION,
    VLLM,
    check,
    config_error,
    ours,
    param,
    passed,
    refused,
)
from outrider.registry import served_names


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Parameters of a server. Durations are seconds. Refuses a server open to other machines
    without an API key."""

    host: str = param(
        "127.0.0.1", "Address to listen on.", "--host ADDRESS", NETWORK,
        vllm=ours("the front listens there; vLLM on a free local port"))
    port: int = param(
        8000, "Port to listen on.", "--port PORT", NETWORK, low=0, high=(1 << 16) - 1,
        vllm=ours("the front listens there"))
    api_keys: tuple[str, ...] = param(
        (), "API keys, one per line; OUTRIDER_API_KEY holds a single one.", "--api-key-file FILE",
        NETWORK, vllm=ours("the front checks keys; vLLM is not reachable from outside"))
    model_name: str = param(
        "model", "What clients call the model.", "--served-model-name NAME", NETWORK,
        none="the folder's name", vllm=passed("--served-model-name"))
    proposers: tuple[str, ...] = param(
        served_names,
        "Proposers that requests may name besides the default one.", "--proposers NAMES",
        SPECULATION, vllm=refused("vLLM has one drafter for all requests"))
    learn: bool = param(
        False, "Fine-tune the drafting head on the traffic, while the server is idle.", "--learn",
        SPECULATION, vllm=refused("vLLM's drafter does not change"))
    learn_per_key: bool = param(
        False, "With --learn: each API key has a head of its own, from its own traffic.",
        "--learn-per-key", SPECULATION, vllm=refused("vLLM's drafter does not change"))
    learn_every: int = param(
        4096, "With --learn: tokens of new answers from one training to the next.",
        "--learn-every N", SPECULATION, low=256, vllm=refused("vLLM's drafter does not change"))
    learn_cpu: float = param(
        0.5, "With --learn: most of one core's time that it takes.", "--learn-cpu SHARE",
        SPECULATION, above=0, high=1, vllm=refused("vLLM's drafter does not change"))
    learn_folder: str | None = param(
        None, "With --learn: keep learnt heads there, and begin with the last one.",
        "--learn-folder DIR", SPECULATION, none="in memory only",
        vllm=refused("vLLM's drafter does not change"))
    chat_template: str | None = param(
        None, "A jinja chat template.", "--chat-template FILE", NETWORK, none="the model's own",
        vllm=passed("--chat-template"))
    tool_call_parser: str | None = param(
        None, "How the model writes tool calls; a wrong name lists the valid ones.",
        "--tool-call-parser NAME", NETWORK, none="by the chat template",
        vllm=refused("vLLM has parsers of its own: --vllm-arg=--tool-call-parser=NAME"))
    reasoning_parser: str | None = param(
        None, "How the model marks its reasoning, or none.", "--reasoning-parser NAME", NETWORK,
        none="by the chat template",
        vllm=refused("vLLM has parsers of its own: --vllm-arg=--reasoning-parser=NAME"))
    models_dir: str | None = param(
        None, "Serve every model of this folder: each is loaded when a request names it.",
        "--models-dir DIR", NETWORK, none="one model", vllm=refused("vLLM serves one model"))
    model_idle_s: float = param(
        600.0, "With --models-dir: a model without requests for this time is unloaded.",
        "--model-idle S", LIMITS, above=0, vllm=refused("vLLM serves one model"))
    models_memory: int | None = param(
        None, "With --models-dir: most bytes of weights in memory, such as 8GiB.",
        "--models-memory SIZE", LIMITS, none="no limit", low=1,
        vllm=refused("vLLM serves one model"))
    model_aliases: tuple[str, ...] = param(
        (), "A further name of the model for clients; may be repeated.", "--model-alias NAME",
        NETWORK, vllm=refused("vLLM takes several names: --vllm-arg=--served-model-name=..."))
    any_model_name: bool = param(
        False, "Serve the model whatever name a client asks for.", "--any-model-name", NETWORK,
        vllm=refused("vLLM checks the names itself"))
    allow_hosts: tuple[str, ...] = param(
        (), "A Host header that is answered without a key; may be repeated.", "--allow-host NAME",
        NETWORK, vllm=ours("the front checks hosts"))
    cors_origins: tuple[str, ...] = param(
        (), "Let web pages of this origin call the API; localhost is any of this machine, * any. "
        "May be repeated.",
        "--cors-origin ORIGIN", NETWORK, vllm=ours("the front answers browsers"))
    root_path: str | None = param(
        None, "Paths may begin with this, such as /llm behind a proxy.", "--root-path PATH",
        NETWORK, none="none", vllm=ours("the front removes it"))
    generation_defaults: bool = param(
        True, "Sample by the model's generation_config.json where a request says nothing.",
        "--generation-defaults/--no-generation-defaults", NETWORK,
        vllm=refused("use --vllm-arg=--generation-config=..."))
    sampling: Mapping[str, Any] = param(
        dict, "For requests without it: temperature=0.7, seed=1, max_tokens=256; may be repeated.",
        "--sampling NAME=VALUE", NETWORK, vllm=refused("use --vllm-arg=--generation-config=..."))
    strict: bool = param(
        False, "Refuse fields of bodies that have no effect here.", "--strict", NETWORK,
        vllm=refused("vLLM reads the bodies"))
    max_queue: int = param(
        256, "Sequences that may wait; more get a 503.", "--max-queue N", LIMITS, low=1,
        vllm=ours("more than max-num-seqs + max-queue requests get a 503"))
    queue_timeout_s: float = param(
        60.0, "Longest wait in the queue.", "--queue-timeout S", LIMITS, above=0,
        vllm=refused("vLLM's queue has no time limit"))
    drain_timeout_s: float = param(
        30.0, "On SIGTERM, wait so long for running requests.", "--drain-timeout S", LIMITS, low=0,
        vllm=ours("on SIGTERM, then vLLM is ended"))
    stall_timeout_s: float = param(
        120.0, "A step that takes longer fails /health.", "--stall-timeout S", LIMITS, above=0,
        vllm=ours("vLLM's /health must answer within this time"))
    body_timeout_s: float = param(20.0, "A request's body must arrive within this time.", above=0)
    send_timeout_s: float = param(60.0, "A client that reads nothing so long is cut off.", above=0)
    max_body_bytes: int = param(8 << 20, "Most bytes of a request's body.")
    max_header_bytes: int = param(32 << 10, "Most bytes of a request's headers.")
    log_format: str = param(
        "text", "text or json.", "--log-format NAME", OUTPUT, choices=("text", "json"),
        vllm=ours("of the front; vLLM writes its own log"))
    log_level: str = param(
        "info", "debug, info, warning or error.", "--log-level NAME", OUTPUT,
        choices=("debug", "info", "warning", "error"), vllm=passed("VLLM_LOGGING_LEVEL"))
    log_prompts: bool = param(
        False, "Also log the text of every prompt.", "--log-prompts", OUTPUT,
        vllm=refused("vLLM logs them itself: --vllm-arg=--enable-log-requests"))
    otlp_endpoint: str | None = param(
        None, "Send OpenTelemetry traces there, e.g. http://localhost:4318/v1/traces.",
        "--otlp-endpoint URL", OUTPUT, none="off", vllm=passed("--otlp-traces-endpoint"))
    pad: bool | None = param(
        None, "Frame sizes in buckets: hide how many tokens a step confirmed.", "--pad/--no-pad",
        PRIVACY, none="on unless only this machine can connect",
        vllm=refused("vLLM's frames are passed on as they are"))
    paced: float | None = param(
        None, "Stream at a constant rate, in tokens per second.", "--paced RATE", PRIVACY,
        none="off", above=0, high=10_000, vllm=refused("vLLM's frames are passed on as they come"))

    def __post_init__(self) -> None:
        check(self, config_error)
        try:
            SamplingParams(**self.sampling)
        except (RequestError, TypeError) as error:
            raise ConfigError(f"sampling: {str(error).partition('() ')[2] or error}") from None
        if self.root_path is not None and not self.root_path.startswith("/"):
            raise ConfigError(f"root_path {self.root_path!r} must begin with /")
        learning = (self.learn_per_key, self.learn_folder is not None)
        if any(learning) and not self.learn:
            raise ConfigError("options that begin with --learn- need --learn")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII and not empty")
        if not self.is_local and not self.api_keys:
            raise ConfigError(
                f"{self.host} is open to other machines: set an API key "
                "(--api-key-file FILE or OUTRIDER_API_KEY), or bind 127.0.0.1"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def pads(self) -> bool:
        return not self.is_local if self.pad is None else self.pad


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Parameters of `outrider serve --backend vllm` alone."""

    pipeline_parallel_size: int = param(
        1, "Devices that share the layers.", "--pipeline-parallel-size --pp N", VLLM, low=1,
        vllm=passed("--pipeline-parallel-size")
    )
    data_parallel_size: int = param(
        1, "Copies of the model.", "--data-parallel-size --dp N", VLLM, low=1,
        vllm=passed("--data-parallel-size")
    )
    executor: str | None = param(
        None, "mp, ray, uni or external_launcher.", "--distributed-executor-backend NAME", VLLM,
        none="vLLM's choice", choices=("mp", "ray", "uni", "external_launcher"),
        vllm=passed("--distributed-executor-backend")
    )
    draft_table: Sequence[tuple[int, int, int]] | None = param(
        None, "Drafted tokens by batch size, like 1-4:5,5-16:2,17-:0, or a JSON file.",
        "--draft-table TABLE", VLLM, none="the same for all",
        vllm=passed("`num_speculative_tokens_per_batch_size`")
    )
    restarts: int = param(
        0, "Start vLLM again so often if it dies.", "--restarts N", VLLM, low=0,
        vllm=ours("how often vLLM is started again when it dies")
    )
    vllm_args: tuple[str, ...] = param(
        (), "A further argument of vllm serve; may be repeated.", "--vllm-arg ARG", VLLM,
        vllm=passed("as they are, last")
    )

    def __post_init__(self) -> None:
        check(self, config_error)
