"""Seeded tokens of every exact (proposer, verifier) pair, from the public API alone.

Under the `coupled` rule every proposer emits the tokens of plain decoding, so these are recorded
once. A ratio rule ("token", "block", "tree") emits tokens of its own, which depend on the drafts
and on K; they are recorded per proposer, with a fixed K.

One file holds for every machine, with and without native kernels:
- The models are tiny, and target, draft model and heads run in float32. By default the native
  kernels run draft models and heads in int8 on some instruction sets. Recorded on four instruction
  sets and with the torch decoder, the files are equal.
- `suffix` keeps no outputs of earlier requests, so that the order of the cases does not matter.
- `hybrid` chooses its drafts by measured times, which no seed fixes: under a ratio rule only its
  greedy tokens are compared.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from other_vocabulary import write_with_other_ids
from outrider import LLM, SamplingParams, Speculation
from outrider.errors import LossyPairing
from outrider.testing import write_tiny_head, write_tiny_llama

RATIO_RULES = ("token", "block", "tree")
TEMPERATURES = (0.0, 0.7, 1.0)
HEADS = ("medusa", "eagle3", "dflash")
PLAIN = Speculation(proposer=None)

Tokens = list[list[int]]


@dataclass(frozen=True)
class Drafter:
    """A proposer and how it is set up. `engine`: "trees" has every proposer's defaults, "chains"
    the proposers of trees restricted to chains, "foreign" and "text" a draft model with other token
    ids, for the two methods of cross-vocab."""

    proposer: str
    k: int = 4
    engine: str = "trees"

    def speculation(self, verifier: str = "coupled") -> Speculation:
        return Speculation(proposer=self.proposer, num_draft_tokens=self.k, verifier=verifier)

    @property
    def label(self) -> str:
        return self.proposer + (f" ({self.engine})" if self.engine != "trees" else "")


DRAFTERS = (
    Drafter("cascade"),
    Drafter("cross-vocab", engine="foreign"),
    Drafter("cross-vocab", engine="text"),
    Drafter("dflash"),
    Drafter("draft-model"),
    Drafter("draft-tree", k=8),
    Drafter("eagle3", k=12),
    Drafter("eagle3", engine="chains"),
    Drafter("early-exit"),
    Drafter("hybrid"),
    Drafter("hybrid", engine="chains"),
    Drafter("lookahead", k=8),
    Drafter("medusa", k=8),
    Drafter("medusa", engine="chains"),
    Drafter("ngram"),
    Drafter("prediction"),
    Drafter("quantized"),
    Drafter("suffix", k=6),
    Drafter("suffix", engine="chains"),
)


@dataclass(frozen=True)
class Family:
    target: Path
    mid: Path
    draft: Path
    foreign: Path
    heads: dict[str, Path]


def write_family(folder: Path) -> Family:
    """Three related models, the smallest again under other ids, and a head of each kind."""
    target, mid, draft = (
        write_tiny_llama(folder / name, num_layers=layers, max_positions=128, sharpness=1.7)
        for name, layers in (("target", 3), ("mid", 2), ("draft", 1))
    )
    foreign = write_with_other_ids(draft, folder / "foreign")
    for kind in HEADS:
        write_tiny_head(folder / kind, kind)
    return Family(target, mid, draft, foreign, {kind: folder / kind for kind in HEADS})


def load(family: Family, engine: str, backend: str) -> LLM:
    options: dict[str, dict[str, object]] = {
        kind: {"head": str(folder), "weights": "float32"} for kind, folder in family.heads.items()
    }
    options["early-exit"] = {"exit_layer": 2}
    options["draft-model"] = {"dtype": "float32"}
    options["cascade"] = {"mid": str(family.mid), "passes": 3}
    options["cross-vocab"] = {"method": "text" if engine == "text" else "intersection"}
    options["suffix"] = {"shared_tokens": 0}
    if engine == "chains":
        options["suffix"]["tree"] = False
        options["eagle3"]["children"] = 1
        options["medusa"]["children"] = 1
    config: dict[str, Any] = {
        "draft_model": str(family.foreign if engine in ("foreign", "text") else family.draft),
        "proposer": "ngram",
        "proposer_options": options,
        "num_draft_tokens": 0,
        "backend": backend,
        "dtype": "float32",
        "block_size": 8,
        "kv_tokens": 2048,
        "threads": 1,
    }
    return LLM(str(family.target), **config)


def prompts() -> list[list[int]]:
    """Three lengths; the words repeat, so that look-ups find something."""
    rng = random.Random(0)
    made = []
    for length in (9, 40, 3):
        phrase = [rng.randrange(1, 64) for _ in range(5)]
        made.append([rng.choice(phrase) for _ in range(length)])
    return made


def prediction(plain: Tokens) -> list[int]:
    """A guess of the first prompt's output: one token is missing, one is wrong."""
    guess = list(plain[0])
    del guess[4:5]
    guess[10] = (guess[10] + 1) % 64
    return guess


SAMPLING = {
    f"T={temperature:g}": SamplingParams(temperature=temperature, seed=2026, max_tokens=32)
    for temperature in TEMPERATURES
}
EDITED = SamplingParams(
    temperature=0.7,
    top_k=40,
    top_p=0.95,
    min_p=0.02,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias={5: 1.5, 9: -4.0},
    banned_ids=(3, 4),
    min_tokens=8,
    stop_ids=(7,),
    seed=7,
    n=2,
    max_tokens=32,
)
COUPLED = SAMPLING | {"edited": EDITED}


def generate(
    llm: LLM,
    batch: list[list[int]] | list[str],
    params: SamplingParams,
    speculation: Speculation = PLAIN,
    guess: list[int] | None = None,
) -> Tokens:
    """The tokens of every completion, prompt by prompt. `guess` is the expected output."""
    more: dict[str, Any] = {} if guess is None else {"prediction": guess}
    results = llm.generate(batch, params, speculation=speculation, **more)
    return [completion.tokens for result in results for completion in result.completions]


def ratio(llm: LLM, drafter: Drafter, guess: list[int]) -> dict[str, Tokens]:
    """Tokens by "rule sampling" for every ratio rule that is exact with the drafter."""
    found = {}
    for rule in RATIO_RULES:
        how = drafter.speculation(rule)
        for name, params in SAMPLING.items():
            if drafter.proposer == "hybrid" and params.temperature:
                continue
            try:
                found[f"{rule} {name}"] = generate(llm, prompts(), params, how, guess)
            except LossyPairing:
                break
    return found


# The models that ship: a real vocabulary and drafts that are often right. Not `quantized`: its int8
# products round differently per instruction set.
BUNDLED = (
    (Drafter("draft-model"), "token"),
    (Drafter("draft-model"), "block"),
    (Drafter("draft-tree"), "tree"),
    (Drafter("eagle3"), "tree"),
    (Drafter("medusa"), "tree"),
    (Drafter("dflash"), "block"),
    (Drafter("early-exit"), "block"),
    (Drafter("cascade"), "block"),
)
BUNDLED_PROMPTS = [
    "def quicksort(items):\n",
    '"""Read a table of numbers from a file and print the mean of every column."""\n',
]


def load_bundled(backend: str) -> LLM:
    options: dict[str, dict[str, object]] = {kind: {"weights": "float32"} for kind in HEADS}
    return LLM(
        "bundled",
        backend=backend,  # type: ignore[arg-type]
        dtype="float32",
        num_draft_tokens=0,
        proposer_options=options | {"draft-model": {"dtype": "float32"}},
        kv_tokens=4096,
        threads=1,
    )


def record_bundled(backend: str) -> dict[str, Tokens]:
    """{"plain": tokens, "proposer rule": tokens}, at temperature 0.7."""
    llm, params = load_bundled(backend), SAMPLING["T=0.7"]
    found = {"plain": generate(llm, BUNDLED_PROMPTS, params)}
    for drafter, rule in BUNDLED:
        how = drafter.speculation(rule)
        found[f"{drafter.label} {rule}"] = generate(llm, BUNDLED_PROMPTS, params, how)
    return found


def record(family: Family, backend: str) -> dict[str, dict[str, Tokens]]:
    """{"plain": {sampling: tokens}, drafter's label: {"rule sampling": tokens}}"""
    engines = {name: load(family, name, backend) for name in {d.engine for d in DRAFTERS}}
    plain = {name: generate(engines["trees"], prompts(), p) for name, p in COUPLED.items()}
    guess = prediction(plain["T=1"])
    return {"plain": plain} | {d.label: ratio(engines[d.engine], d, guess) for d in DRAFTERS}
