"""Every parameter of Outrider, declared once: type, default, help text, limits and names.

`outrider.options` derives from these declarations the options of the command line, the fields of
HTTP bodies, the mapping to vLLM's options and the reference pages; `make reference` writes the
keyword arguments of `LLM`. To add a parameter, add one field here and run `make reference`.

    name: type = param(default, help, command line, group of --help, limits, HTTP, vLLM)
Standard library only, so that `outrider --help` starts at once.
"""

# A declaration is easier to read in two lines than with a line for each argument.
# fmt: off
from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError, RequestError
from outrider.parameters import (
    LIMITS,
    MACHINE,
    NETWORK,
    OUTPUT,
    PRIVACY,
    SAMPLING,
    SPECULATION,
    STOPPING,
    VLLM,
    check,
    config_error,
    ours,
    param,
    passed,
    refused,
)
from outrider.registry import served_names

NumDraftTokens = int | Literal["auto"]

MAX_LOGPROBS = 20
INT32 = (1 << 31) - 1
INT64 = (1 << 63) - 1

# Parameters of an engine that a request may set for itself, too.
_NUM_DRAFT_TOKENS: dict[str, Any] = {
    "help": "Tokens drafted per step; 0 is plain decoding, auto what pays.",
    "cli": "--num-draft-tokens -k K|auto",
    "aliases": ("num-speculative-tokens",),
    "panel": SPECULATION,
    "low": 0,
    "http": "num_draft_tokens",
    "http_high": 128,
    "http_help": "drafted per step; `auto`: what pays",
    "vllm": passed("`num_speculative_tokens`; 0 leaves speculation out"),
}
_VERIFIER: dict[str, Any] = {
    "help": "Acceptance rule: coupled, token, block, tree. All are exact.",
    "cli": "--verifier NAME",
    "panel": SPECULATION,
    "http": "verifier",
    "http_help": "`coupled`, `token`, `block` or `tree`; a pair that is not exact is refused",
    "vllm": passed(
        "token: `rejection_sample_method` standard with `draft_sample_method` probabilistic; "
        "block: `rejection_sample_method` block, in vLLM's V2 runner only; coupled, tree: refused",
    ),
}
BUNDLED = ("bundled", "bundled:draft", "bundled:eagle3", "bundled:medusa", "bundled:dflash")
VERIFIERS = ("coupled", "token", "block", "tree")
BACKENDS = ("auto", "native", "torch", "transformers")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Parameters of an engine. None means: choose for me."""

    model: str = param(
        "bundled", "Target: a folder, a GGUF file, a hub name, bundled or smollm2.", "MODEL",
        suggestions=("bundled", "smollm2"), vllm=passed("the model of `vllm serve`")
    )
    draft_model: str | None = param(
        None, "Drafter: a folder, a hub name or bundled:NAME.", "--draft-model MODEL", SPECULATION,
        aliases=("speculative-model",),
        none="of bundled and smollm2 their own", suggestions=BUNDLED,
        vllm=passed("`model` of --speculative-config"))
    other_drafters: tuple[str, ...] = param((), "Further drafters, which requests may name.")
    proposer: str | None = param(
        None, "What drafts; a wrong name lists the valid ones.", "--proposer NAME", SPECULATION,
        none="draft-model where there is one, else ngram",
        vllm=passed("`method` of --speculative-config")
    )
    proposer_options: Mapping[str, Mapping[str, object]] = param(
        dict, "An option of a proposer, such as suffix.tree=false; may be repeated.",
        "--proposer-option NAME.KEY=VALUE", SPECULATION,
        vllm=refused("they are our proposers' options")
    )
    num_draft_tokens: NumDraftTokens = param("auto", **_NUM_DRAFT_TOKENS)  # noqa: RUF009
    verifier: str = param("coupled", choices=VERIFIERS, **_VERIFIER)
    device: str = param(
        "cpu", "cpu, cuda or cuda:N.", "--device NAME", MACHINE,
        vllm=refused("the vLLM that is installed decides")
    )
    dtype: str = param(
        "auto", "auto (as stored), float32, bfloat16, float16; int8 or int4 round the weights.",
        "--dtype NAME", MACHINE,
        choices=("auto", "float32", "bfloat16", "float16", "int8", "int4"), vllm=passed("--dtype")
    )
    backend: Literal["auto", "native", "torch", "transformers"] = param(
        "auto", "auto, native, torch or transformers.", "--backend NAME", MACHINE,
        choices=BACKENDS, vllm=ours("chooses vLLM")
    )
    threads: int | None = param(
        None, "CPU threads.", "--threads N", MACHINE, none="every core", low=1,
        vllm=refused("on a CPU vLLM takes VLLM_CPU_OMP_THREADS_BIND from the environment")
    )
    tensor_parallel_size: int = param(
        1, "Processes or GPUs that share each layer of the target.",
        "--tensor-parallel-size --tp N", MACHINE, low=1, vllm=passed("--tensor-parallel-size")
    )
    block_size: int = param(16, "Tokens in a block of the KV cache.", low=1)
    kv_tokens: int | None = param(
        None, "Capacity of the KV cache, in tokens.", "--kv-tokens N", LIMITS, none="2 GiB's worth",
        vllm=refused("vLLM counts its KV cache in bytes: --vllm-arg=--kv-cache-memory-bytes=N")
    )
    kv_memory: int | None = param(
        None, "The same in bytes, such as 2GiB.", "--kv-memory SIZE", LIMITS, none="2 GiB", low=1,
        vllm=refused("use --vllm-arg=--kv-cache-memory-bytes=N"))
    max_model_len: int | None = param(
        None, "Most tokens of a prompt with its completion.", "--max-model-len N", LIMITS,
        none="what the model and the KV cache allow", low=2,
        vllm=refused("use --vllm-arg=--max-model-len=N"))
    prefix_caching: bool = param(
        True, "Reuse the K/V of shared prefixes, per API key.",
        "--prefix-caching/--no-prefix-caching", LIMITS,
        vllm=passed("--enable-prefix-caching or --no-enable-prefix-caching")
    )
    max_sequences: int = param(
        64, "Sequences decoded at once.", "--max-num-seqs N", LIMITS, low=1,
        vllm=passed("--max-num-seqs")
    )
    max_step_tokens: int = param(
        512, "Most tokens of a pass without drafts; longer prompts are split.", low=1
    )
    max_ahead_steps: int = param(
        16, "Most steps that one native call takes while the batch cannot change; 1: one.", low=1
    )
    buckets: tuple[tuple[int, int], ...] | None = param(
        None, "Steps that a GPU prepares at the start; the doctor says which.",
        "--buckets NxK,...", MACHINE, none="all sizes, up to 8 drafts",
        vllm=refused("vLLM captures its graphs itself: --vllm-arg=--cudagraph-capture-sizes=N")
    )

    def __post_init__(self) -> None:
        wanted = self.num_draft_tokens
        if wanted != "auto" and not (isinstance(wanted, int) and wanted >= 0):
            raise ConfigError(f"num_draft_tokens must be 'auto', 0 or more, not {wanted!r}")
        check(self, config_error)
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise ConfigError(f"kv_tokens must be at least one block ({self.block_size})")
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise ConfigError("give kv_tokens or kv_memory, not both")
        if any(size < 1 or k < 0 for size, k in self.buckets or ()):
            raise ConfigError("buckets are (sequences, drafts): at least 1 and 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How a request drafts: the proposer, the number of tokens, the acceptance rule."""

    proposer: str | None = param(
        None, "What drafts.", none="plain decoding", http="proposer",
        http_help="what drafts: the server's default, one of `--proposers`, another `--draft-model`"
    )
    num_draft_tokens: NumDraftTokens = param(  # noqa: RUF009
        EngineConfig.num_draft_tokens, **_NUM_DRAFT_TOKENS
    )
    verifier: str = param(EngineConfig.verifier, **_VERIFIER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Invalid values raise RequestError naming the field."""

    temperature: float = param(
        0.0, "0 is greedy.", "--temperature -t T", SAMPLING, aliases=("temp",), low=0,
        high=100, http="temperature", http_default=1.0
    )
    top_k: int = param(
        0, "Keep the K most probable; 0: all.", "--top-k K", SAMPLING, low=0, high=1 << 30,
        http="top_k", http_low=-1, http_high=INT32, http_help="keep that many; -1 or 0: all"
    )
    top_p: float = param(
        1.0, "Keep the smallest set of mass P.", "--top-p P", SAMPLING, above=0, high=1,
        http="top_p"
    )
    min_p: float = param(
        0.0, "Keep what has P times the top probability.", "--min-p P", SAMPLING, low=0, high=1,
        http="min_p"
    )
    presence_penalty: float = param(
        0.0, "Against tokens already produced.", "--presence-penalty X", SAMPLING, low=-100,
        high=100, http="presence_penalty", http_low=-2, http_high=2
    )
    frequency_penalty: float = param(
        0.0, "The same, per occurrence.", "--frequency-penalty X", SAMPLING, low=-100, high=100,
        http="frequency_penalty", http_low=-2, http_high=2
    )
    repetition_penalty: float = param(
        1.0, "Against tokens of prompt and output.", "--repetition-penalty X", SAMPLING, above=0,
        high=100, http="repetition_penalty"
    )
    logit_bias: Mapping[int, float] = param(
        dict, "Token id to a number that is added to its logit.", http="logit_bias"
    )
    banned_ids: tuple[int, ...] = param((), "Token ids that are never chosen.")
    seed: int | None = param(
        None, "The same seed gives the same tokens, with and without speculation.", "--seed INT",
        SAMPLING, none="a fresh one", low=-INT64 - 1, high=2 * INT64 + 1, http="seed",
        http_high=INT64,
        http_help="the same tokens with and without speculation, alone and in a batch; left out: "
        "random"
    )
    n: int = param(
        1, "How many completions.", "--n N", SAMPLING, low=1, high=1 << 16, http="n", http_high=16
    )
    max_tokens: int = param(
        128, "Most tokens.", "--max-tokens -m N", STOPPING, aliases=("max-new-tokens",),
        low=1, high=1 << 30, http="max_tokens", http_low=0, http_high=INT32,
        http_help="left out: 16, chat: the rest of the context; with `echo` also 0"
    )
    min_tokens: int = param(
        0, "Fewest tokens.", "--min-tokens N", STOPPING, low=0, http="min_tokens", http_high=INT32
    )
    stop: tuple[str, ...] = param(
        (), "Stop before this text; may be repeated.", "--stop TEXT", STOPPING, http="stop",
        http_help="texts to stop before")
    stop_ids: tuple[int, ...] = param((), "Token ids to stop at.", http="stop_token_ids")
    ignore_eos: bool = param(
        False, "Go on after the end-of-text token.", "--ignore-eos", STOPPING, http="ignore_eos"
    )
    skip_special_tokens: bool = param(
        True, "Leave special tokens out of the text.", http="skip_special_tokens",
        http_help="false: special tokens appear in the text")
    logprobs: int | None = param(
        None, "Log-probabilities, with that many alternatives.", "--logprobs N", OUTPUT,
        none="off", low=0, high=MAX_LOGPROBS)
    prompt_logprobs: int | None = param(
        None, "The same for the prompt's tokens; the prefix cache is not used.", none="off", low=0,
        high=MAX_LOGPROBS, http="prompt_logprobs")
    logprob_ids: tuple[int, ...] = param(
        (), "Log-probabilities of these tokens instead of the most probable ones.",
        http="logprob_token_ids")

    def __post_init__(self) -> None:
        check(self, RequestError)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be in [0, {self.max_tokens}], not {self.min_tokens}",
                "min_tokens",
            )
        if any(not stop for stop in self.stop):
            raise RequestError("stop strings must not be empty", "stop")
        for token, bias in self.logit_bias.items():
            if not math.isfinite(bias):
                raise RequestError(f"logit_bias of token {token} must be finite", "logit_bias")

    @property
    def edits_logits(self) -> bool:
        """Whether logits change with the history, which costs Python time per row."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.banned_ids
            or self.min_tokens
        )

    @property
    def filters(self) -> bool:
        return bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)


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
        (), "Let web pages of this origin call the API; * is any. May be repeated.",
        "--cors-origin ORIGIN", NETWORK, vllm=ours("the front answers browsers"))
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
