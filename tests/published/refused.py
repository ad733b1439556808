"""Drafters that are other models than those we load: each is refused in a line that names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from published.cases import H, V, W, dflash, eagle3, llama, midlayer, qwen3, write

REFUSED: dict[str, Callable[[Path], None]] = {}


def refused(write: Callable[[Path], None]) -> Callable[[Path], None]:
    REFUSED[write.__name__] = write
    return write


def _dflash_like(folder: Path, name: str) -> None:
    config = qwen3(architectures=[name], block_size=4, num_target_layers=8)
    write(folder, config | {"dflash_config": {"mask_token_id": 3}}, dflash())


@refused
def dflash2(folder: Path) -> None:
    _dflash_like(folder, "DFlash2DraftModel")


@refused
def domino(folder: Path) -> None:
    _dflash_like(folder, "DominoDraftModel")


@refused
def arctic_lstm(folder: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"],
        "method": "sum_lstm", "input_hidden_dim": H, "inner_dim": "20.20", "emb_dim": "20.20",
        "proj_dim": "20.20", "n_predict": 3, "vocab_size": V,
    }  # fmt: skip
    write(folder, config, {"speculator.emb.0.weight": torch.ones(V, 20)})


@refused
def eagle3_of_deepseek(folder: Path) -> None:
    w = eagle3()
    w["layers.0.self_attn.kv_a_proj_with_mqa.weight"] = torch.ones(12, 2 * H)
    config = llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=W)
    write(folder, config, midlayer(w))


@refused
def dspark_of_kimi(folder: Path) -> None:
    """MLA layers under the names of DSpark."""
    tensors = dflash() | {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(12, H)}
    config = qwen3(architectures=["DSparkDraftModel"], block_size=4)
    config["dflash_config"] = {"mask_token_id": 3, "target_layer_ids": [1, 5]}
    write(folder, config, tensors)


@refused
def hydra(folder: Path) -> None:
    config = {"architectures": ["HydraModel"], "hydra_num_heads": 4, "hydra_num_layers": 1}
    write(folder, config, {"0.0.linear.weight": torch.ones(H, H)})
