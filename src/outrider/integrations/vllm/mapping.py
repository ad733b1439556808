"""Our options as vLLM's. `OPTIONS` and `PROPOSERS` are the whole mapping: the docs print them.

Whatever vLLM would drop without a word, or cannot do exactly, is refused here in one line, before
anything is started.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.errors import ConfigError, UnknownName
from outrider.model.bundled import find_folder
from outrider.model.head_base import head_kind
from outrider.model.weights import read_config

Table = list[tuple[int, int, int]]  # from, to (inclusive batch sizes), draft tokens

LOOK_UPS = ("hybrid", "ngram", "prediction", "suffix")
DEFAULT_K = {"draft-model": 4, "cross-vocab": 4, "eagle3": 4, "ngram": 8}
LOOK_UP_K = 8
MAX_BATCH = 1 << 20  # where a table's last, open range ends
CLASS = "outrider.integrations.vllm.proposers."


@dataclass(frozen=True, slots=True)
class Option:
    """What becomes of one option of `outrider serve`."""

    name: str  # the parameter of the command
    fate: Literal["passed", "ours", "refused"]  # to vLLM, done by the front, not possible
    theirs: str  # vLLM's name for it; what the front does; why not
    example: tuple[str, ...] = ()  # a use of it on the command line

    @property
    def flag(self) -> str:
        """As users write it."""
        if self.example:
            return self.example[0] if self.example[0].startswith("--") else self.name.upper()
        return f"--{self.name.replace('_', '-')}"


OPTIONS = (
    Option("model", "passed", "the model of `vllm serve`", ("bundled",)),
    Option("draft_model", "passed", "`model` of --speculative-config", ("--draft-model", "D")),
    Option("proposer", "passed", "`method` of --speculative-config", ("--proposer", "ngram")),
    Option(
        "num_draft_tokens",
        "passed",
        "`num_speculative_tokens`; 0 leaves speculation out",
        ("--num-draft-tokens", "3"),
    ),
    Option(
        "draft_table",
        "passed",
        "`num_speculative_tokens_per_batch_size`",
        ("--draft-table", "1-4:5,5-16:2,17-:0"),
    ),
    Option(
        "verifier",
        "passed",
        "token: `rejection_sample_method` standard with `draft_sample_method` probabilistic; "
        "block: `rejection_sample_method` block, in vLLM's V2 runner only; coupled, tree: refused",
        ("--verifier", "token"),
    ),
    Option("served_model_name", "passed", "--served-model-name", ("--served-model-name", "m")),
    Option("chat_template", "passed", "--chat-template", ("--chat-template", "T")),
    Option("max_sequences", "passed", "--max-num-seqs", ("--max-num-seqs", "8")),
    Option(
        "prefix_caching",
        "passed",
        "--enable-prefix-caching or --no-enable-prefix-caching",
        ("--no-prefix-caching",),
    ),
    Option("dtype", "passed", "--dtype", ("--dtype", "float32")),
    Option(
        "otlp_endpoint",
        "passed",
        "--otlp-traces-endpoint",
        ("--otlp-endpoint", "http://localhost:4318/v1/traces"),
    ),
    Option("log_level", "passed", "VLLM_LOGGING_LEVEL", ("--log-level", "warning")),
    Option(
        "tensor_parallel_size",
        "passed",
        "--tensor-parallel-size",
        ("--tensor-parallel-size", "2"),
    ),
    Option(
        "pipeline_parallel_size",
        "passed",
        "--pipeline-parallel-size",
        ("--pipeline-parallel-size", "2"),
    ),
    Option("data_parallel_size", "passed", "--data-parallel-size", ("--data-parallel-size", "2")),
    Option(
        "executor",
        "passed",
        "--distributed-executor-backend",
        ("--distributed-executor-backend", "mp"),
    ),
    Option("vllm_args", "passed", "as they are, last", ("--vllm-arg", "--enforce-eager")),
    Option("host", "ours", "the front listens there; vLLM on a free local port"),
    Option("port", "ours", "the front listens there"),
    Option("api_key_file", "ours", "the front checks keys; vLLM is not reachable from outside"),
    Option("max_queue", "ours", "more than max-num-seqs + max-queue requests get a 503"),
    Option("drain_timeout", "ours", "on SIGTERM, then vLLM is ended"),
    Option("stall_timeout", "ours", "vLLM's /health must answer within this time"),
    Option("log_format", "ours", "of the front; vLLM writes its own log"),
    Option("restarts", "ours", "how often vLLM is started again when it dies"),
    Option("backend", "ours", "chooses vLLM"),
    Option(
        "proposers", "refused", "vLLM has one drafter for all requests", ("--proposers", "ngram")
    ),
    Option(
        "proposer_option",
        "refused",
        "they are our proposers' options",
        ("--proposer-option", "ngram.min_n=2"),
    ),
    Option("queue_timeout", "refused", "vLLM's queue has no time limit", ("--queue-timeout", "5")),
    Option(
        "buckets",
        "refused",
        "vLLM captures its graphs itself: --vllm-arg=--cudagraph-capture-sizes=N",
        ("--buckets", "1x4"),
    ),
    Option(
        "kv_tokens",
        "refused",
        "vLLM counts its KV cache in bytes: --vllm-arg=--kv-cache-memory-bytes=N",
        ("--kv-tokens", "4096"),
    ),
    Option(
        "log_prompts",
        "refused",
        "vLLM logs them itself: --vllm-arg=--enable-log-requests",
        ("--log-prompts",),
    ),
    Option("pad", "refused", "vLLM's frames are passed on as they are", ("--pad",)),
    Option("paced", "refused", "vLLM's frames are passed on as they come", ("--paced", "20")),
    Option("device", "refused", "the vLLM that is installed decides", ("--device", "cpu")),
    Option(
        "threads",
        "refused",
        "on a CPU vLLM takes VLLM_CPU_OMP_THREADS_BIND from the environment",
        ("--threads", "1"),
    ),
)

# Ours -> vLLM's method, or why there is none.
PROPOSERS = {
    "draft-model": "`draft_model`",
    "cross-vocab": "`draft_model` with `use_heterogeneous_vocab`, greedy drafts",
    "medusa": "`medusa`, the most probable chain instead of a tree",
    "eagle3": "`eagle3`, a chain",
    "dflash": "`dflash`, without DSpark's additions (`outrider export vllm` leaves them out)",
    "ngram": "`ngram` with windows of 2 to 4 tokens",
    "suffix": "`custom_class`: ours, chains, nothing shared between requests",
    "prediction": "`custom_class`: ours",
    "hybrid": "`custom_class`: prediction and suffix, whichever has been right more often",
    "cascade": "refused: vLLM has one drafter",
    "draft-tree": "refused: vLLM verifies chains",
    "early-exit": "refused: vLLM cannot stop after some of the layers",
    "lookahead": "refused: vLLM has no Jacobi window",
    "quantized": "refused: vLLM would load the weights twice; give a quantized draft model",
}


def on_cpu_build(proposer: str) -> str:
    """What a proposer's row says of vLLM's CPU build: see `build.py`."""
    if PROPOSERS[proposer].startswith("refused"):
        return "–"
    fewer = "; fewer accepted drafts for heads of several layers" if proposer == "dflash" else ""
    return f"temperature 0 only{fewer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for, by the names of `outrider serve`'s parameters."""

    model: str = "bundled"
    draft_model: str | None = None
    proposer: str | None = None
    num_draft_tokens: int | Literal["auto"] = "auto"
    draft_table: Table | None = None
    verifier: str | None = None
    served_model_name: str | None = None
    chat_template: Path | None = None
    max_sequences: int = 64
    prefix_caching: bool = True
    dtype: str = "auto"
    otlp_endpoint: str | None = None
    log_level: str = "info"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    executor: str | None = None
    vllm_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.executor not in (None, "mp", "ray", "uni", "external_launcher"):
            raise ConfigError(
                "--distributed-executor-backend is mp, ray, uni or external_launcher, "
                f"not {self.executor!r}"
            )
        if self.num_draft_tokens != "auto" and self.num_draft_tokens < 0:
            raise ConfigError(
                f"--num-draft-tokens must be 0 or more, or auto, not {self.num_draft_tokens}"
            )


def refuse(given: Collection[str]) -> None:
    """ConfigError for the first option among `given` that has no counterpart."""
    for option in OPTIONS:
        if option.fate == "refused" and option.name in given:
            raise ConfigError(f"{option.flag} has no effect with --backend vllm: {option.theirs}")


def speculative_config(wish: Wish) -> dict[str, Any] | None:
    """vLLM's `--speculative-config`; None without speculation. Raises ConfigError, ModelError."""
    if wish.num_draft_tokens == 0:
        return None
    target = find_folder(wish.model)
    drafter = wish.draft_model
    if drafter is None and wish.model == "bundled" and wish.proposer in (None, "draft-model"):
        drafter = "bundled:draft"
    folder = None if drafter is None else find_folder(drafter)
    name = wish.proposer or _default_proposer(folder)
    if name not in PROPOSERS:
        raise UnknownName("proposer", name, PROPOSERS)
    if PROPOSERS[name].startswith("refused"):
        raise ConfigError(
            f"--proposer {name} {PROPOSERS[name].replace('refused: ', 'is refused: ')}"
        )
    config = _look_up(name) if name in LOOK_UPS else _drafter(name, target, folder)
    config["num_speculative_tokens"] = _num_draft_tokens(wish, name, folder)
    config |= _rule(wish.verifier, name)
    if wish.draft_table is not None:
        config["num_speculative_tokens_per_batch_size"] = _table(wish, config)
    if config["method"] in ("draft_model", "eagle3", "dflash"):
        _check_split(wish, folder)
    return config


def command(
    wish: Wish, *, host: str, port: int, more: Mapping[str, Any] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Arguments of `vllm` and what to add to its environment; `more` is our additional config."""
    config = speculative_config(wish)
    args = ["serve", str(find_folder(wish.model)), "--host", host, "--port", str(port)]
    args += ["--served-model-name", wish.served_model_name or wish.model]
    if wish.chat_template is not None:
        args += ["--chat-template", str(wish.chat_template)]
    args += ["--max-num-seqs", str(wish.max_sequences), "--dtype", wish.dtype]
    args.append("--enable-prefix-caching" if wish.prefix_caching else "--no-enable-prefix-caching")
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if getattr(wish, name) > 1:
            args += [f"--{name.replace('_', '-')}", str(getattr(wish, name))]
    if wish.otlp_endpoint is not None:
        args += ["--otlp-traces-endpoint", wish.otlp_endpoint]
    if wish.executor is not None:
        args += ["--distributed-executor-backend", wish.executor]
    environment = {"VLLM_LOGGING_LEVEL": wish.log_level.upper()}
    if config is not None:
        args += ["--speculative-config", json.dumps(config)]
        if config.get("rejection_sample_method") == "block":
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # or it would be dropped silently
    if more:
        args += ["--additional-config", json.dumps({"outrider": dict(more)})]
    return [*args, *wish.vllm_args], environment


def shown(args: Seq[str]) -> str:
    """A command line for a shell."""
    return shlex.join(["vllm", *args])


def read_table(text: str) -> Table:
    """`1-4:5,5-16:2,17-:0`, a JSON file of [from, to, K] rows, or what `outrider doctor --json`
    printed; ConfigError if it is none of these."""
    path = Path(text)
    try:
        if path.suffix == ".json":
            table = _rows(json.loads(path.read_text()))
        else:
            table = [_range(part) for part in text.split(",")]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"--draft-table is like 1-4:5,5-16:2,17-:0, a JSON file of [from, to, K] or the "
            f"doctor's, not {text!r} ({type(error).__name__})"
        ) from None
    ends = [0, *(last for _, last, _ in table[:-1])]
    if any(first != end + 1 for (first, _, _), end in zip(table, ends, strict=True)):
        raise ConfigError("--draft-table must start at batch size 1 and leave no gap")
    if any(last < first or k < 0 for first, last, k in table):
        raise ConfigError("--draft-table has an empty range or a negative number of drafts")
    return table


def table_of(best: Mapping[int, int]) -> Table:
    """A table from the best K at some batch sizes; each holds up to the next measured size."""
    sizes = sorted(best)
    starts = [1, *(size for size in sizes[1:])]
    ends = [*(start - 1 for start in starts[1:]), MAX_BATCH]
    return [(start, end, best[size]) for start, end, size in zip(starts, ends, sizes, strict=True)]


def _rows(record: Any) -> Table:
    if isinstance(record, dict):  # the doctor's
        best = {int(row["batch"]): int(row["num_draft_tokens"]) for row in record["advice"]}
        return table_of(best)
    return [(int(first), int(last), int(k)) for first, last, k in record]


def _range(text: str) -> tuple[int, int, int]:
    sizes, k = text.split(":")
    first, dash, last = sizes.strip().partition("-")
    if not dash:
        last = first
    return int(first), int(last) if last else MAX_BATCH, int(k)


def _default_proposer(folder: Path | None) -> str:
    if folder is None:
        return "ngram"
    return head_kind(folder) or "draft-model"


def _look_up(name: str) -> dict[str, Any]:
    if name == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    return {"method": "custom_class", "model": CLASS + name.capitalize()}


def _drafter(name: str, target: Path, folder: Path | None) -> dict[str, Any]:
    if folder is None:
        raise ConfigError(f"--proposer {name} needs --draft-model")
    kind = head_kind(folder) or "draft-model"
    if kind != ("draft-model" if name == "cross-vocab" else name):
        raise ConfigError(f"--proposer {name} cannot draft with {folder}, which holds {kind}")
    if name == "medusa" and not _has_output_heads(folder):
        raise ConfigError(
            f"{folder} shares its target's output head: first run outrider export vllm {folder} OUT"
        )
    if name == "dflash" and read_config(folder).get("dflash_config", {}).get("markov_rank"):
        raise ConfigError(
            f"{folder} has DSpark's additions: first run outrider export vllm {folder} OUT"
        )
    if name == "draft-model":
        sizes = [read_config(place).get("vocab_size") for place in (target, folder)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"vLLM needs vocabularies of one size, not {sizes[0]} and {sizes[1]}; "
                "--proposer cross-vocab drafts across tokenizers"
            )
    config: dict[str, Any] = {"method": name.replace("-", "_"), "model": str(folder)}
    if name == "cross-vocab":
        config |= {"method": "draft_model", "use_heterogeneous_vocab": True}
    return config


def _export(folder: Path) -> str:
    return f"first run outrider export vllm {folder} OUT, then --draft-model OUT"


def _has_output_heads(folder: Path) -> bool:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return any(name.startswith("lm_head") for name in tensors.keys())  # noqa: SIM118


def _num_draft_tokens(wish: Wish, name: str, folder: Path | None) -> int:
    limit = None
    if folder is not None and name == "medusa":
        limit = int(read_config(folder)["num_heads"])
    elif folder is not None and name == "dflash":
        limit = int(read_config(folder)["block_size"]) - 1
    if wish.num_draft_tokens == "auto":
        if wish.draft_table is not None:
            wanted = max(k for _, _, k in wish.draft_table)
        else:
            wanted = limit or DEFAULT_K.get(name, LOOK_UP_K)
    else:
        wanted = wish.num_draft_tokens
    if limit is not None and wanted > limit:
        raise ConfigError(f"{folder} drafts at most {limit} tokens, not {wanted}")
    if wanted < 1:
        raise ConfigError("--draft-table never drafts: -k 0 is plain decoding")
    return wanted


def _rule(verifier: str | None, name: str) -> dict[str, Any]:
    """The law stays the target's under any of them; what differs is how much is accepted."""
    if verifier in ("coupled", "tree"):
        raise ConfigError(
            f"vLLM has no {verifier} rule: --verifier token has the same law "
            "(the same seed gives the same tokens with the native backend only)"
        )
    if verifier not in (None, "token", "block"):
        raise UnknownName("verifier", verifier, ("token", "block"))
    samples = name in ("draft-model", "eagle3", "dflash")
    rule: dict[str, Any] = {"draft_sample_method": "probabilistic"} if samples else {}
    if verifier == "block":
        if name in ("medusa", "hybrid", "prediction", "suffix"):
            raise ConfigError(f"vLLM's block rule does not run with {name}: --verifier token does")
        rule["rejection_sample_method"] = "block"
    return rule


def _table(wish: Wish, config: Mapping[str, Any]) -> Table:
    assert wish.draft_table is not None
    if config["method"] in ("medusa", "custom_class"):
        raise ConfigError(f"vLLM has no --draft-table for {config['method']} drafts")
    if wish.data_parallel_size > 1:
        raise ConfigError("vLLM drops --draft-table with data parallelism: use -k N")
    if any(k > config["num_speculative_tokens"] for _, _, k in wish.draft_table):
        raise ConfigError(
            f"--draft-table drafts more than the {config['num_speculative_tokens']} of -k"
        )
    return wish.draft_table


def _check_split(wish: Wish, folder: Path | None) -> None:
    """vLLM splits a draft model as it splits the target."""
    assert folder is not None
    heads = int(read_config(folder).get("num_attention_heads", 1))
    if heads % wish.tensor_parallel_size:
        raise ConfigError(
            f"vLLM cannot split {folder} with its {heads} attention heads among "
            f"{wish.tensor_parallel_size} workers"
        )
