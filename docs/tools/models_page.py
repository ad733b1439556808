"""docs/reference/models.md: which model types run where, and files of which kinds how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import results

from outrider.model.families import FAMILIES, DecoderConfig, read_decoder_config
from outrider.model.gguf.architectures import ARCHITECTURES

_RECORD = Path(__file__).parents[2] / "tests" / "zoo.json"
_NUM_PROPOSERS = 6

# Sizes that fit the defaults of every family.
_SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 4096),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 256),
    "vocab_size": 128,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}

_ABOUT = """\
Three paths run a model. `--backend auto` takes the first that can:

1. The **native step**, on a CPU: the model types below in float32, bfloat16, int8 and int4. Rows
   do not depend on the batch, so that drafts change no bit.
2. The **torch decoder**: the model types below on any device. On a GPU, models that are like
   Llama run on our Triton kernels, the others in torch.
3. **transformers**, with our KV store: any other causal model whose attention can be replaced. A
   self-check at load refuses a model whose drafts cannot be verified exactly. If a window stands
   in the model's mask only, the context ends where the window does.

A model is a Hugging Face folder, quantised or not, or a GGUF file of one of the architectures in
the column GGUF ([how](../how-to/run-your-model.md)).

The table says what a test measured with a tiny random model of each type: the path, whether the
logits of a text are those of transformers, and the proposers with which greedy and sampled tokens
are those of plain decoding. `all` are `suffix`, `lookahead`, `draft-model`, `draft-tree`,
`early-exit` and `quantized`. The context is given where it ends before the configured length.

Of models that also see images, the text part of Gemma 3, 3n and 4, Llama 4, Mistral 3 and Qwen 3.5
runs on the first two paths.

Types with the part `mixer` have recurrent layers; `mixing` says in which layers. They draft with
every proposer, chains and trees.
[Recurrent state](../explanation/recurrent-state.md) explains how it stays exact.

Below the table is what is refused, with the reason.

A rope of type `longrope` has other factors for texts past its original length, where the context
ends by default. With a longer `--max-model-len` the engine takes the long factors for all texts, as
vLLM does, and says so; short texts then get other logits. transformers changes the factors when a
text grows past the length, but not its stored keys. A rope of type `dynamic` changes all keys past
the configured length: the context ends there.
"""


def _described(model_type: str) -> DecoderConfig:
    return read_decoder_config({"model_type": model_type, **_SIZES})


def _record() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(_RECORD.read_text())
    return found


def rows() -> list[list[object]]:
    """Types that run: path, logits equal, proposers, context, parts beyond Llama's."""
    found: list[list[object]] = []
    record = _record()
    for model_type in sorted({*FAMILIES, *record}):
        entry = record.get(model_type, {})
        if "refused" in entry:
            continue
        parts = "-"
        if model_type in FAMILIES:
            config = _described(model_type)
            parts = ", ".join(f"`{name}`" for name in config.deviations) or "none"
        working = entry.get("proposers", [])
        drafts = "all" if len(working) == _NUM_PROPOSERS else ", ".join(f"`{p}`" for p in working)
        exact = ("yes" if entry["exact"] else "no") if entry else "no class in transformers"
        path = entry.get("path", "native")
        context = entry.get("context") or "whole"
        files = _files_of(model_type)
        found.append([f"`{model_type}`", path, exact, drafts or "-", context, files, parts])
    return found


def _files_of(model_type: str) -> str:
    """The GGUF architectures that files of this type may name."""
    named = [name for name, of in ARCHITECTURES.items() if of.model_type == model_type]
    named += [of for of in _ALSO.get(model_type, ()) if of in ARCHITECTURES]
    return ", ".join(f"`{name}`" for name in named) or "-"


def refused() -> list[list[object]]:
    return [
        [f"`{model_type}`", entry["refused"]]
        for model_type, entry in sorted(_record().items())
        if "refused" in entry
    ]


# Model types that an architecture's files may hold, too.
_ALSO = {"mixtral": ("llama",), "mistral": ("llama",), "olmo3": ("olmo2",)}


def measured() -> list[str]:
    """Quantised files beside llama.cpp, from the committed result files."""
    titles = ("tokens/s", "over llama.cpp", "verify(5)", "verify(9)", "starts in s", "llama.cpp")
    speed = [f"| file | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    found = sorted(results.RESULTS.glob("checkpoints-*.json"))
    for path in found:
        tables: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["tables"]
        for row, wide, start in zip(*tables.values(), strict=True):
            figures = (
                f"{row['tokens/s']:.1f}",
                f"{row['ours / llama.cpp']:.2f}",
                f"{wide['verify(5)']:.2f}",
                f"{wide['verify(9)']:.2f}",
                f"{start['load to first s']:.2f}",
                f"{start['llama.cpp load to first s']:.2f}",
            )
            speed.append(f"| {row['case'].replace(':', ' ')} | {' | '.join(figures)} |")
    sources = ", ".join(f"[{p.stem}](../../benchmarks/results/{p.stem}.md)" for p in found)
    return [
        "## Quantised files, measured",
        "",
        "One sequence at context 512 on two cores: SmolLM2 with 135M parameters, random weights in",
        "the shapes of Llama 3.2 1B, Llama 3.1 8B and models of other families. `verify(5)` is the",
        "time of a pass over five tokens, over that of one. A start ends with the first token",
        "after a prompt of 16. llama.cpp computes Q8_0 on the file itself, which starts sooner",
        f"and decodes more slowly. Machine and versions: {sources}.",
        "",
        *speed,
    ]


def about() -> list[str]:
    return ["# Models you can run", "", *_ABOUT.splitlines(), "", *_fallback()]


def _fallback() -> list[str]:
    """The third path beside transformers alone, from the committed result file."""
    rows = json.loads((results.RESULTS / "fallback.json").read_text())["tables"]["SmolLM2-135M"]
    ratio = {row["batch"]: f"{row['ours / transformers']:.2f}" for row in rows}
    return [
        f"On the third path a step of SmolLM2's shape in float32 takes {ratio[1]} of the time of",
        f"transformers' own with one sequence, {ratio[4]} with 4 and {ratio[16]} with 16",
        "([measured](../../benchmarks/results/fallback.md)).",
    ]
