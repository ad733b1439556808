"""Our options as vLLM's: see `config.py` for each option and `registry.py` for each proposer.

What vLLM would silently ignore, or cannot do exactly, is refused here in one line, before anything
is started.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.config import EngineConfig, NumDraftTokens
from outrider.errors import ConfigError, UnknownName
from outrider.model.bundled import find_folder
from outrider.model.head_kinds import head_kind
from outrider.model.mtp_layer import holds_mtp
from outrider.model.named import default_drafter
from outrider.model.weights import read_config, read_json
from outrider.parameters import params
from outrider.registry import (
    ACROSS_VOCABULARIES,
    OURS,
    WITH_MODEL,
    WITH_MTP,
    WITHOUT_MODEL,
    Vllm,
    own_entries,
)
from outrider.server_config import ServerConfig, VllmConfig

Table = list[tuple[int, int, int]]  # from, to (inclusive batch sizes), draft tokens

MAX_BATCH = 1 << 20  # where a table's last, open range ends
CLASS = "outrider.integrations.vllm.proposers."


@dataclass(frozen=True, slots=True)
class Option:
    """How one parameter of `outrider serve` is passed to vLLM."""

    name: str
    flag: str  # as users write it
    fate: Literal["passed", "ours", "refused"]  # to vLLM, done by the front, not possible
    theirs: str  # vLLM's name for it; what the front does; why not


def options(*configs: type) -> tuple[Option, ...]:
    return tuple(
        Option(name, param.flag, param.vllm.fate, param.vllm.text)
        for config in configs
        for name, param in params(config).items()
        if param.vllm is not None
    )


OPTIONS = options(EngineConfig, ServerConfig, VllmConfig)


@dataclass(frozen=True, kw_only=True)
class Wish(VllmConfig):
    """The parameters of `outrider serve` that concern vLLM."""

    model: str = EngineConfig.model
    draft_model: str | None = EngineConfig.draft_model
    proposer: str | None = EngineConfig.proposer
    num_draft_tokens: NumDraftTokens = EngineConfig.num_draft_tokens
    verifier: str | None = None
    served_model_name: str | None = None
    chat_template: Path | None = None
    max_sequences: int = EngineConfig.max_sequences
    prefix_caching: bool = EngineConfig.prefix_caching
    dtype: str = EngineConfig.dtype
    otlp_endpoint: str | None = ServerConfig.otlp_endpoint
    log_level: str = ServerConfig.log_level
    tensor_parallel_size: int = EngineConfig.tensor_parallel_size

    @property
    def reads_predictions(self) -> bool:
        """Whether vLLM drafts from the predictions of requests."""
        entry = own_entries().get(self.proposer or "")
        return self.num_draft_tokens != 0 and entry is not None and entry.vllm.reads_prediction


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
    if drafter is None and wish.proposer in (None, WITH_MODEL):
        drafter = default_drafter(wish.model)
    folder = None if drafter is None else find_folder(drafter)
    name = wish.proposer or _default_proposer(target, folder)
    if name not in own_entries():
        raise UnknownName("proposer", name, own_entries())
    theirs = own_entries()[name].vllm
    if not theirs.method:
        raise ConfigError(f"--proposer {name} is refused: {theirs.note}")
    if theirs.method == OURS or not own_entries()[name].drafter:
        config = _look_up(name, theirs)
    else:
        config = _drafter(name, theirs, target, folder)
    config["num_speculative_tokens"] = _num_draft_tokens(wish, theirs, folder)
    config |= _rule(wish.verifier, name, theirs)
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


def _default_proposer(target: Path, folder: Path | None) -> str:
    if folder is None:
        return WITH_MTP if holds_mtp(target) else WITHOUT_MODEL
    return head_kind(folder) or WITH_MODEL


def _look_up(name: str, theirs: Vllm) -> dict[str, Any]:
    more = {"model": CLASS + name.capitalize()} if theirs.method == OURS else theirs.more or {}
    return {"method": theirs.method, **more}


def _drafter(name: str, theirs: Vllm, target: Path, folder: Path | None) -> dict[str, Any]:
    if folder is None and name == WITH_MTP and holds_mtp(target):
        return {"method": theirs.method}
    if folder is None:
        raise ConfigError(f"--proposer {name} needs --draft-model")
    kind = head_kind(folder)
    if kind != (name if own_entries()[name].drafter == "head" else None):
        held = kind or WITH_MODEL
        raise ConfigError(f"--proposer {name} cannot draft with {folder}, which holds {held}")
    if theirs.method == "medusa" and not _has_output_heads(folder):
        raise ConfigError(
            f"{folder} shares its target's output head: first run outrider export vllm {folder} OUT"
        )
    if theirs.method == "dflash" and _written(folder, "markov_rank"):
        raise ConfigError(
            f"{folder} has DSpark's additions: first run outrider export vllm {folder} OUT"
        )
    if theirs.method == "draft_model" and not theirs.more:
        sizes = [read_config(place).get("vocab_size") for place in (target, folder)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"vLLM needs vocabularies of one size, not {sizes[0]} and {sizes[1]}; "
                f"--proposer {ACROSS_VOCABULARIES} drafts across tokenizers"
            )
    return {"method": theirs.method, "model": str(folder), **(theirs.more or {})}


def _has_output_heads(folder: Path) -> bool:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return any(name.startswith("lm_head") for name in tensors.keys())  # noqa: SIM118


def _written(folder: Path, name: str) -> int | None:
    """A number that the config.json of a head has, at the top or in an object inside."""
    config = read_json(folder / "config.json")
    inner = [value for value in config.values() if isinstance(value, dict)]
    found = [part[name] for part in (config, *inner) if isinstance(part.get(name), int)]
    return found[0] if found else None


def _num_draft_tokens(wish: Wish, theirs: Vllm, folder: Path | None) -> int:
    limit: int | None = None
    if folder is not None and theirs.method == "medusa":
        limit = _written(folder, "num_heads")
    elif folder is not None and theirs.method == "dflash":
        size = _written(folder, "block_size")
        limit = None if size is None else size - 1
    if wish.num_draft_tokens == "auto":
        if wish.draft_table is not None:
            wanted = max(k for _, _, k in wish.draft_table)
        else:
            wanted = limit or theirs.k
    else:
        wanted = wish.num_draft_tokens
    if limit is not None and wanted > limit:
        raise ConfigError(f"{folder} drafts at most {limit} tokens, not {wanted}")
    if wanted < 1:
        raise ConfigError("--draft-table never drafts: -k 0 is plain decoding")
    return wanted


def _rule(verifier: str | None, name: str, theirs: Vllm) -> dict[str, Any]:
    """The output's distribution is the target's under each rule; the acceptance rates differ."""
    if verifier in ("coupled", "tree"):
        raise ConfigError(
            f"vLLM has no {verifier} rule: --verifier token has the same distribution "
            "(the same seed gives the same tokens with the native backend only)"
        )
    if verifier not in (None, "token", "block"):
        raise UnknownName("verifier", verifier, ("token", "block"))
    rule: dict[str, Any] = {"draft_sample_method": "probabilistic"} if theirs.samples else {}
    if verifier == "block":
        if theirs.method in ("medusa", OURS):
            raise ConfigError(f"vLLM's block rule does not run with {name}: --verifier token does")
        rule["rejection_sample_method"] = "block"
    return rule


def _table(wish: Wish, config: Mapping[str, Any]) -> Table:
    assert wish.draft_table is not None
    if config["method"] in ("medusa", OURS):
        raise ConfigError(f"vLLM has no --draft-table for {config['method']} drafts")
    if wish.data_parallel_size > 1:
        raise ConfigError("vLLM drops --draft-table with data parallelism: use -k N")
    if any(k > config["num_speculative_tokens"] for _, _, k in wish.draft_table):
        raise ConfigError(
            f"--draft-table drafts more than the {config['num_speculative_tokens']} of -k"
        )
    return list(wish.draft_table)


def _check_split(wish: Wish, folder: Path | None) -> None:
    """vLLM splits a draft model as it splits the target."""
    assert folder is not None
    heads = int(read_config(folder).get("num_attention_heads", 1))
    if heads % wish.tensor_parallel_size:
        raise ConfigError(
            f"vLLM cannot split {folder} with its {heads} attention heads among "
            f"{wish.tensor_parallel_size} workers"
        )
