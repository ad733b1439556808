"""Folders in the layouts that vLLM loads, so that a head trained here serves there.

Draft models are ordinary Hugging Face folders and need nothing. EAGLE-3 heads are written in vLLM's
names from the start. Medusa heads that share the target's output head get a copy of it, and DFlash
heads lose DSpark's additions, which vLLM's DFlash does not know.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from outrider.errors import ModelError
from outrider.model.heads import DFlashHead, Eagle3Head, MedusaHeads, load_head

logger = logging.getLogger(__name__)


def export_vllm(head_folder: Path, target_folder: Path, out: Path) -> dict[str, Any]:
    """Write `head_folder` for vLLM and return the `--speculative-config` that serves it."""
    head = load_head(head_folder)
    tensors = load_file(head_folder / "model.safetensors")
    config = json.loads((head_folder / "config.json").read_text())
    method, num_draft_tokens = head.kind, 4
    if isinstance(head, MedusaHeads):
        num_draft_tokens = head.config.num_heads
        if head.config.original_lm_head:
            tensors["lm_heads.0.weight"] = _output_weight(target_folder).to(
                next(iter(tensors.values())).dtype
            )
    elif isinstance(head, DFlashHead):
        num_draft_tokens = head.config.block_size - 1
        extra = [name for name in tensors if name.startswith(("markov_", "confidence_"))]
        for name in extra:
            del tensors[name]
        if extra:
            logger.warning("vLLM's DFlash has no Markov bias and no confidence: left out")
        for name in ("markov_rank", "confidence"):
            config["dflash_config"].pop(name, None)
    elif not isinstance(head, Eagle3Head):
        raise ModelError(f"{head_folder}: no layout for {head.kind} heads")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config["torch_dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"method": method, "model": str(out), "num_speculative_tokens": num_draft_tokens}


def _output_weight(folder: Path) -> Any:
    """The output head of a model folder; the embedding where the two are tied."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    index = folder / "model.safetensors.index.json"
    places = (
        json.loads(index.read_text())["weight_map"]
        if index.exists()
        else dict.fromkeys(names, "model.safetensors")
    )
    for name in names:
        if name in places:
            tensors = load_file(folder / places[name])
            if name in tensors:
                return tensors[name]
    raise ModelError(f"{folder} has no output head that Medusa could share")
