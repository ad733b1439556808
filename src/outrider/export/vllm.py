"""Drafters in the layouts that vLLM loads, so that what was trained here serves there.

Draft models are ordinary Hugging Face folders and are copied. EAGLE-3 heads are written in vLLM's
names from the start. Medusa heads that share the target's output head get a copy of it, and DFlash
heads lose DSpark's additions, which vLLM's DFlash does not know.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from outrider.errors import ConfigError
from outrider.model.head_base import head_kind
from outrider.model.heads import DFlashHead, Head, MedusaHeads, load_head
from outrider.model.weights import Checkpoint, read_config

logger = logging.getLogger(__name__)

DRAFT_MODEL_K = EAGLE3_K = 4
SAMPLED_DRAFTS = {"draft_sample_method": "probabilistic"}  # drawn from q, like Outrider's
_ADDITIONS = ("markov_", "confidence_")  # DSpark's


def export_vllm(drafter: Path, target: Path, out: Path) -> dict[str, Any]:
    """Writes `drafter` for vLLM and returns the `--speculative-config` that serves it.

    Raises ModelError for a folder that holds no drafter, ConfigError where vLLM could not use it.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: give a new folder")
    kind = head_kind(drafter)
    if kind is None:
        return _export_model(drafter, target, out)
    head = load_head(drafter)
    num_draft_tokens = _export_head(head, drafter, target, out)
    config = {"method": kind, "model": str(out), "num_speculative_tokens": num_draft_tokens}
    return config if kind == "medusa" else {**config, **SAMPLED_DRAFTS}


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


def _export_head(head: Head, drafter: Path, target: Path, out: Path) -> int:
    """Writes the head and returns how many tokens it drafts."""
    tensors = load_file(drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text())
    dtype = next(iter(tensors.values())).dtype
    num_draft_tokens = EAGLE3_K
    if isinstance(head, MedusaHeads):
        num_draft_tokens = head.config.num_heads
        if head.config.original_lm_head and "lm_heads.0.weight" not in tensors:
            tensors["lm_heads.0.weight"] = _output_weight(target).to(dtype)
    elif isinstance(head, DFlashHead):
        num_draft_tokens = head.config.block_size - 1
        extra = [name for name in tensors if name.startswith(_ADDITIONS)]
        for name in extra:
            del tensors[name]
        if extra:
            logger.warning("vLLM's DFlash has no Markov bias and no confidence: left out")
        for name in ("markov_rank", "confidence"):
            config["dflash_config"].pop(name, None)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return num_draft_tokens


def _output_weight(folder: Path) -> Any:
    """The output head of a model folder; the embedding where the two are tied."""
    config = read_config(folder)
    checkpoint = Checkpoint(folder)
    shape = (int(config["vocab_size"]), int(config["hidden_size"]))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in checkpoint:
            return checkpoint.tensor(name, shape)
    raise ConfigError(f"{folder} has no output head that Medusa could share")
