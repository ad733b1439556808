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
