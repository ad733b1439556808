"""The parts of a target that its drafting heads use: embedding, last norm and output head.

They are read from the target's folder, because a loaded model may hold them packed or quantised.

Shapes: V vocabulary, H hidden; leading dimensions are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.checkpoints import open_checkpoint
from outrider.model.families import UnsupportedByDecoder, read_decoder_config
from outrider.model.weights import read_config


@dataclass(frozen=True, slots=True)
class Borrowed:
    embedding_VH: Tensor
    norm_H: Tensor
    head_VH: Tensor
    norm_eps: float

    def embed(self, ids: list[int]) -> Tensor:
        """[len(ids), H]"""
        return self.embedding_VH[torch.tensor(ids, device=self.embedding_VH.device)]

    def normed(self, hidden: Tensor) -> Tensor:
        """Applies the target's last norm to its hidden state after all layers."""
        return F.rms_norm(hidden, self.norm_H.shape, self.norm_H, self.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Applies the target's output head to normalised hidden states."""
        return F.linear(hidden, self.head_VH)


def borrow(folder: Path, device: torch.device, dtype: torch.dtype) -> Borrowed:
    """Raises ModelError for a target that is not Llama-shaped."""
    raw = read_config(folder)
    try:
        config = read_decoder_config(raw)
    except UnsupportedByDecoder as error:
        raise ModelError(f"drafting heads need a Llama-shaped target: {error}") from None
    if not config.is_llama:
        raise ModelError(f"drafting heads need a Llama-shaped target, not {config.family}")
    checkpoint = open_checkpoint(folder)
    shape = (config.vocab_size, config.hidden_size)

    def read(name: str, size: tuple[int, ...]) -> Tensor:
        return checkpoint.tensor(name, size).to(device, dtype).contiguous()

    embedding_VH = read("model.embed_tokens.weight", shape)
    return Borrowed(
        embedding_VH=embedding_VH,
        norm_H=read("model.norm.weight", shape[1:]),
        head_VH=embedding_VH if config.tied else read("lm_head.weight", shape),
        norm_eps=config.norm_eps,
    )
