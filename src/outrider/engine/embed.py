"""Vectors of texts: the target's hidden states, pooled.

A generating model is not trained for this. Its vectors tell similar texts apart from others, but a
model that was trained for embeddings does it better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from outrider.engine.engine import Engine
from outrider.errors import Overloaded
from outrider.layout import Slice, pack

Pooling = Literal["mean", "last"]


def embedding(engine: Engine, tokens: Sequence[int], pooling: Pooling) -> list[float]:
    """A vector of length 1. Only the engine's thread may call it, between two steps.

    Every state is scaled to the same size before the mean: the first token's is far larger than
    all others.
    """
    states_TH = _last_states(engine, list(tokens))
    scaled_TH = states_TH / states_TH.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    pooled_H = scaled_TH.mean(dim=0) if pooling == "mean" else scaled_TH[-1]
    found: list[float] = (pooled_H / pooled_H.norm().clamp(min=1e-9)).tolist()
    return found


def _last_states(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """[T, H]: after the last layer, before the final norm."""
    depth, size = engine.target.spec.num_layers, engine.scheduler.config.max_step_tokens
    (id,) = engine.kv.scratch(1)
    try:
        if not engine.kv.reserve(id, len(tokens)):
            raise Overloaded("the KV cache is full: try again later")
        found = []
        for start in range(0, len(tokens), size):
            piece = Slice(tokens[start : start + size], start, engine.kv.table(id), None)
            output = engine.target.forward(pack([piece], taps=(depth,)))
            found.append(output.taps[depth].float().cpu().clone())
        return torch.cat(found)
    finally:
        engine.kv.free(id, keep=False)
