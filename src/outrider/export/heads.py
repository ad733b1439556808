"""Drafting heads in the layouts of vLLM, `speculators` and SpecForge.

What we export loads here again with the same drafts. Other engines expect copies of the target's
tensors in some layouts: vLLM in Medusa heads that share its output head, `speculators` of the
embedding. Only `speculators` has a Markov bias for blocks like those of our DFlash heads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.dialects.folder import Tensors
from outrider.model.head_base import Head, write_folder
from outrider.model.head_json import layers_json
from outrider.model.heads import DFlashHead, Eagle3Head, MedusaHeads, load_head
from outrider.model.weights import Checkpoint, read_config

logger = logging.getLogger(__name__)

LAYOUTS = ("vllm", "speculators", "specforge")


def check_empty(out: Path) -> None:
    """ConfigError if there is anything in the folder."""
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: give a new folder")


def export_head(drafter: Path, target: Path, out: Path, layout: str) -> Head:
    """Writes the head in `drafter`, stored as precisely as there, and returns what was written.

    Raises ConfigError where the layout has no form for it.
    """
    check_empty(out)
    num_layers = int(read_config(target)["num_hidden_layers"])
    head = load_head(drafter, num_layers=num_layers)
    dtype = Tensors(drafter).dtype
    if layout == "speculators":
        config, tensors = _speculators(head, target, dtype)
    else:
        head = _plain(head, drafter)
        config, tensors = head.config_json(), head.published()
        if isinstance(head, MedusaHeads) and head.config.original_lm_head:
            tensors["lm_heads.0.weight"] = _output_weight(target)
            size = int(read_config(target)["vocab_size"])
            config |= {"vocab_size": size, "truncated_vocab_size": size}
        if layout == "specforge" and isinstance(head, Eagle3Head):
            config |= _sglang_taps(head)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    write_folder(out, config, tensors, dtype)
    return head


def _plain(head: Head, drafter: Path) -> Head:
    """A DFlash head without what only `speculators` has a form for."""
    if not isinstance(head, DFlashHead) or head.is_plain_dflash:
        return head
    if head.config.samples_from_anchor or head.config.draft_vocab_size is not None:
        raise ConfigError(f"{drafter} has no form in this layout: use outrider export speculators")
    logger.warning("this layout's DFlash has no Markov bias and no confidence: left out")
    plain = DFlashHead(replace(head.config, markov_rank=0, confidence=False))
    wanted = plain.state_dict()
    plain.load_state_dict({n: t for n, t in head.state_dict().items() if n in wanted})
    return plain


def _sglang_taps(head: Eagle3Head) -> dict[str, Any]:
    """SGLang reads the layers whose outputs are tapped, counted from 0."""
    if head.config.reads_last_state:
        return {}
    if 0 in head.taps:
        raise ConfigError("SpecForge's layout cannot name the embeddings as a tap")
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps]}}


def _speculators(
    head: Head, target: Path, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(head, DFlashHead):
        if head.config.sinks:
            raise ConfigError(
                "the speculators format has no attention sinks: export another layout"
            )
        config, tensors = head.speculators_json(), head.published()
    elif isinstance(head, Eagle3Head) and head.kind != "eagle":
        config, tensors = _speculators_eagle(head), head.state_dict()
    else:
        raise ConfigError(f"the speculators format has no {head.kind} heads: export another layout")
    read = read_config(target)
    config["speculators_config"]["verifier"] = {
        "name_or_path": str(target),
        "architectures": list(read.get("architectures") or []),
    }
    if "embed_tokens.weight" not in tensors:
        tensors["embed_tokens.weight"] = _tensor(target, "model.embed_tokens.weight")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = _output_weight(target)
    rows = len(tensors["lm_head.weight"])
    if rows == head.vocab_size:
        tensors.pop("d2t", None)
    else:
        ids = torch.arange(rows) + tensors["d2t"].cpu()
        tensors["t2d"] = torch.zeros(head.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return config, tensors


def _speculators_eagle(head: Eagle3Head) -> dict[str, Any]:
    config = head.config
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    if config.reads_last_state or config.fc_bias:
        raise ConfigError("the speculators format has no form for this head: export another layout")
    written: dict[str, Any] = {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": head.num_draft_tokens or 4}
            ],
        },
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **layers_json(config),
            "num_hidden_layers": config.num_hidden_layers,
            "vocab_size": config.vocab_size,
        },
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.input_norm,
        "fc_norm": config.num_fc_norms > 0,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }
    if config.mask_token_id is not None:
        written["mask_token_id"] = config.mask_token_id
    return written


def _tensor(folder: Path, name: str) -> Tensor:
    config = read_config(folder)
    shape = (int(config["vocab_size"]), int(config["hidden_size"]))
    return Checkpoint(folder).tensor(name, shape)


def _output_weight(folder: Path) -> Tensor:
    """The output head of a model folder; the embedding where the two are tied."""
    checkpoint = Checkpoint(folder)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        if name in checkpoint:
            return _tensor(folder, name)
    raise ConfigError(f"{folder} has no output head that the drafter could share")
