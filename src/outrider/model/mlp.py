"""The activations of MLPs, by the names of `DecoderConfig.activation`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square_()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu_squared,
}


def cut_gates(gate_TI: torch.Tensor, share: float) -> torch.Tensor:
    """What a token's gates exceed by the point below which this share of them lies, if they are
    distributed normally; 0 for the others."""
    point = torch.special.ndtri(torch.tensor(share)).to(gate_TI.dtype)
    mean = gate_TI.mean(-1, keepdim=True)
    spread = gate_TI.std(-1, keepdim=True, unbiased=False)
    return F.relu(gate_TI - (mean + spread * point))
