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
from outrider.model.tensors import Weights
from outrider.model.weights import read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """The defaults are a Llama's."""

    embedding_VH: Tensor  # as stored: without the factor with which some families multiply it
    norm_H: Tensor
    head_VH: Tensor
    norm_eps: float
    norm_bias_H: Tensor | None = None
    layer_norm: bool = False
    head_bias_V: Tensor | None = None
    logit_scale: float = 1.0
    logit_cap: float | None = None
    embedding_scale: float = 1.0  # what the target itself multiplies its embeddings by

    def embed(self, ids: list[int]) -> Tensor:
        """[len(ids), H], as stored: this is what heads are trained on."""
        return self.embedding_VH[torch.tensor(ids, device=self.embedding_VH.device)]

    def normed(self, hidden: Tensor) -> Tensor:
        """Applies the target's last norm to its hidden state after all layers."""
        weight = self.norm_H
        if self.layer_norm:
            return F.layer_norm(hidden, weight.shape, weight, self.norm_bias_H, self.norm_eps)
        return F.rms_norm(hidden, weight.shape, weight, self.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Applies the target's output head to normalised hidden states."""
        logits = F.linear(hidden, self.head_VH, self.head_bias_V)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_cap is not None:
            logits = torch.tanh(logits / self.logit_cap) * self.logit_cap
        return logits

    @property
    def has_plain_head(self) -> bool:
        """Whether logits are a product of the head and a state, no more."""
        return self.head_bias_V is None and self.logit_scale == 1.0 and self.logit_cap is None

    @property
    def has_plain_ends(self) -> bool:
        """Whether the last norm is RMS and the head is plain as well."""
        return self.has_plain_head and not self.layer_norm


def borrow(folder: Path, device: torch.device, dtype: torch.dtype) -> Borrowed:
    """Raises ModelError for a target of a family that our decoder cannot run."""
    try:
        config = read_decoder_config(read_config(folder))
    except UnsupportedByDecoder as error:
        raise ModelError(f"drafting heads need a target of our own decoder: {error}") from None
    weights = Weights(open_checkpoint(folder), config)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype).contiguous()

    embedding_VH = place(weights.embedding())
    norm_H, norm_bias_H = weights.final_norm()
    head, head_bias = weights.head(), weights.head_bias()
    return Borrowed(
        embedding_VH=embedding_VH,
        norm_H=place(norm_H),
        norm_bias_H=None if norm_bias_H is None else place(norm_bias_H),
        head_VH=embedding_VH if head is None else place(head),
        head_bias_V=None if head_bias is None else place(head_bias),
        norm_eps=config.norm_eps,
        layer_norm=config.layer_norm,
        logit_scale=config.logit_scale,
        logit_cap=config.logit_cap,
        embedding_scale=config.embedding_scale,
    )
