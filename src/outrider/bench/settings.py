"""The parameters of `outrider bench`. Standard library only, so that `--help` starts at once."""

# ruff: noqa: RUF009 (param declares a field)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.errors import ConfigError
from outrider.parameters import OUTPUT, PEERS, WORK, check, param, params


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much is decoded. Reading a prompt gives up to three tokens: fewer leave none to time."""

    max_tokens: int = param(128, "Tokens of each output.", "--max-tokens -m N", WORK, low=4)
    batch: int = param(1, "Outputs decoded at once.", "--batch -b N", WORK, low=1)
    repeats: int = param(5, "Rounds that count.", "--repeats -r N", WORK, low=1)
    num_prompts: int = param(8, "Prompts of each workload.", "--prompts -n N", WORK, low=1)
    seed: int = param(0, "Of the first output; the next one's is one more.")
    context: int | None = param(None, "Tokens of every prompt.", none="as they are")

    def __post_init__(self) -> None:
        check(self, _flag_error)


def _flag_error(message: str, name: str) -> ConfigError:
    return ConfigError(message.replace(name, params(Settings)[name].flag, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is decoded, and how its drafts are made, as users write it."""

    workloads: str = param(
        "code,prose,edit,json,summary,hot,long",
        "code, prose, edit, json, summary, hot, long, mixed, or files of prompts.",
        "--workloads -w NAME,...",
        WORK,
    )
    categories: str = param(
        "chat,rewrite,summary,question,mathematics,retrieval,code-edit,json-records",
        "Which of them.",
        "--categories NAME,...",
        WORK,
    )
    minutes: float | None = param(
        None, "Fewer prompts, so that it ends in time.", "--minutes M", WORK, above=0,
        none="all prompts"
    )  # fmt: skip
    workload: str = param("code", "One of them, or a file.", "--workload -w NAME", WORK)
    temperatures: str | None = param(
        None, "Every workload at these.", "--temperatures T,...", WORK, none="its own"
    )
    temperature: float | None = param(
        None, "Of all requests.", "--temperature -t T", WORK, none="its own"
    )
    proposers: str | None = param(
        None,
        "What drafts; synthetic:ALPHA@PROPOSER drafts what is accepted with probability ALPHA.",
        "--proposers NAME,...",
        WORK,
        none="the engine's own",
    )
    counts: str = param(
        "auto", "Tokens drafted per step.", "--num-draft-tokens -k K,...,auto", WORK
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    axis: str = param("k", "k, batch, context or temperature.", "--axis NAME", WORK)
    values: str | None = param(
        None,
        "Places on the axis (of k: --num-draft-tokens).",
        "--values X,...",
        WORK,
        none="a usual choice",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    transformers: bool = param(
        False, "transformers too: plain, assisted, prompt lookup.", "--transformers", PEERS
    )
    vllm_python: Path | None = param(
        None,
        "vLLM too, with this interpreter: plain, draft model, n-gram.",
        "--vllm-python FILE",
        PEERS,
    )
    llama_python: Path | None = param(
        None,
        "llama-cpp-python too, with this interpreter: plain, prompt lookup.",
        "--llama-python FILE",
        PEERS,
    )
    gguf: Path | None = param(
        None, "The target in llama.cpp's format.", "--gguf FILE", PEERS, none="a GGUF target itself"
    )
    peer_dtype: str = param(
        "float32",
        "float32 or bfloat16, of transformers and vLLM.",
        "--peer-dtype NAME",
        PEERS,
        choices=("float32", "bfloat16"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server under load."""

    backend: str | None = param(
        None,
        "Start outrider serve with native, vllm or both, one after the other.",
        "--backend NAME,...",
        WORK,
        none="URL is a server",
    )
    serve_args: tuple[str, ...] = param(
        (), "With --backend: an argument of outrider serve.", "--serve-arg ARG", WORK
    )
    vllm_args: tuple[str, ...] = param(
        (), "With --backend vllm: an argument of vllm serve.", "--vllm-arg ARG", WORK
    )
    clients: str = param("1,4,16", "Requests in flight.", "--clients N,...", WORK)
    name: str | None = param(
        None, "The model's name there.", "--model NAME", WORK, none="the first"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    out: Path | None = param(None, "Write FILE.json and FILE.md.", "--out -o FILE", OUTPUT)
    title: str | None = param(None, "Heading of the result.", "--title TEXT", OUTPUT)
