"""Heads that use their target's embedding, norm and output head draft right on every family.

What the target's own parts compute is taken from transformers, not from our decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from family_models import FAMILY_CONFIGS
from native_models import needs_native
from outrider.testing import write_tiny_tokenizer
from outrider.train.models import output_logits
from published.cases import Json, Reference, dflash, eagle1, llama, qwen3, rand, write
from published.comparing import Seen, compare, engine_for
from published.references import DFlash, Eagle, Medusa, Shown
from tiny_models import reference
from tiny_models import write as write_target

H, V = 32, 64
# Scaled and capped logits, biased heads, norms with bias and without weight, learned positions.
FAMILIES = (
    *("gemma2", "gemma3", "granite", "cohere", "phi", "gpt2", "olmo", "nemotron", "phimoe"),
    *("glm4", "starcoder2", "deepseek_v3", "gpt_oss", "opt"),
)


def eagle(folder: Path) -> Reference:
    """EAGLE-1 without an embedding of its own."""
    w = eagle1(bias=False)
    del w["embed_tokens.weight"]
    write(folder, llama(architectures=["LlamaForCausalLM"], bias=False), w)
    return Eagle(w, projects=True)


def medusa(folder: Path) -> Reference:
    """With the target's output head, as Medusa's first trainer stores it."""
    w = {f"{head}.0.linear.weight": 0.3 * rand(f"{head}", H, H) for head in range(4)}
    w |= {f"{head}.0.linear.bias": 0.3 * rand(f"{head}b", H) for head in range(4)}
    write(folder, {"medusa_num_heads": 2, "medusa_num_layers": 1}, w)
    return Medusa(w)


def dflash_zlab(folder: Path) -> Reference:
    w = dflash()
    inner: Json = {"mask_token_id": 7, "target_layer_ids": [0, 1]}
    config = qwen3(
        architectures=["DFlashDraftModel"], block_size=5, num_target_layers=3, dflash_config=inner
    )
    write(folder, config, w)
    return DFlash(w, taps=(1, 2), size=5, mask=7)


class SeenBy(Seen):
    """The target's norm and output head by transformers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.theirs = reference(folder)

    @torch.no_grad()
    def shown(self, text: list[int]) -> Shown:
        shown = super().shown(text)
        tokens = torch.tensor([text[:-1]])
        last = self.theirs.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        embedding = self.theirs.get_input_embeddings().weight
        return Shown(text, shown.taps, last, embedding, lambda x: output_logits(self.theirs, x))


RUNS = [
    *((name, "torch") for name in FAMILIES),
    *(
        pytest.param(name, "native", marks=needs_native)
        for name in FAMILIES
        if name != "deepseek_v3"  # torch only
    ),
]


@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_heads_draft_right(name: str, backend: str, tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", FAMILY_CONFIGS[name])
    write_tiny_tokenizer(target)
    seen = SeenBy(target)
    writers: dict[str, Callable[[Path], Reference]] = {
        "eagle": eagle,
        "medusa": medusa,
        "dflash": dflash_zlab,
    }
    for kind, writer in writers.items():
        folder = tmp_path / kind
        wanted = writer(folder)
        options: dict[str, object] = {"weights": "float32"}
        if kind != "dflash":
            options["children"] = 1
        count = compare(engine_for(target, folder, backend, **options), wanted, seen)
        assert count["steps"] >= 10, (kind, count)
        assert count["same"] >= 0.99 * count["drafts"] > 0, (kind, count)
