"""Drafters in the layouts that vLLM loads, so that what was trained here serves there.

Draft models are ordinary Hugging Face folders and are copied. How heads are written is in
`outrider.export.heads`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from outrider.export.heads import check_empty, export_head
from outrider.model.head_kinds import head_kind
from outrider.model.weights import read_config
from outrider.registry import own_entries

DRAFT_MODEL_K = 4
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}  # drawn from q, like Outrider's


def export_vllm(drafter: Path, target: Path, out: Path) -> dict[str, Any]:
    """Writes `drafter` for vLLM and returns the `--speculative-config` that serves it.

    Raises ModelError for a folder that holds no drafter, ConfigError where vLLM could not use it.
    """
    check_empty(out)
    kind = head_kind(drafter)
    if kind is None:
        return _export_model(drafter, target, out)
    theirs = own_entries()[kind].vllm
    if not theirs.method:
        raise ConfigError(f"{drafter} holds {kind} heads: {theirs.note}")
    head = export_head(drafter, target, out, "vllm")
    config: dict[str, Any] = {"method": theirs.method, "model": str(out)}
    config |= {"num_speculative_tokens": head.num_draft_tokens or theirs.k, **(theirs.more or {})}
    return {**config, **SAMPLED_DRAFTS} if theirs.samples else config


def _export_model(drafter: Path, target: Path, out: Path) -> dict[str, Any]:
    sizes = [int(read_config(folder)["vocab_size"]) for folder in (target, drafter)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"vLLM needs vocabularies of one size, not {sizes[0]} and {sizes[1]}: "
            "resize the draft's embedding, or serve it with use_heterogeneous_vocab"
        )
    out.mkdir(parents=True, exist_ok=True)
    for file in drafter.iterdir():
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    return {
        "method": "draft_model",
        "model": str(out),
        "num_speculative_tokens": DRAFT_MODEL_K,
        **SAMPLED_DRAFTS,
    }
