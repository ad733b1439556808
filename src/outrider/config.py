"""Every parameter of engines and requests, declared once: type, default, help, limits, names.

Those of servers are in `outrider.server_config`.

`outrider.options` derives from these declarations the options of the command line, the fields of
HTTP bodies, the mapping to vLLM's options and the reference pages; `make reference` writes the
keyword arguments of `LLM`. To add a parameter, add one field here and run `make reference`.

    name: type = param(default, help, command line, group of --help, limits, HTTP, vLLM)
Standard library only, so that `outrider --help` starts at once.
"""

# A declaration is easier to read in two lines than with a line for each argument.
# fmt: off
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError, RequestError
from outrider.parameters import (
    LIMITS,
    MACHINE,
    OUTPUT,
    SAMPLING,
    SPECULATION,
    STOPPING,
    check,
    config_error,
    ours,
    param,
    passed,
    refused,
)

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
    kv_dtype: str = param(
        "auto", "auto, or int8: rounded keys and values, in a quarter of the memory. It changes "
        "what the target says; drafts still change nothing.",
        "--kv-dtype NAME", LIMITS, choices=("auto", "int8"),
        vllm=refused("use --vllm-arg=--kv-cache-dtype=fp8")
    )
    max_model_len: int | None = param(
        None, "Most tokens of a prompt with its completion. Past the original length of a longrope "
        "it takes the factors of long texts for all texts.", "--max-model-len N", LIMITS,
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
