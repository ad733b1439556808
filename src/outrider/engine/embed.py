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


def embedding(
    engine: Engine, tokens: Sequence[int], pooling: Pooling, *, normalised: bool = True
) -> list[float]:
    """A vector, of length 1 if `normalised`. Only the engine's thread may call it, between steps.

    Every state is scaled to the same size before the mean: the first token's is far larger than
    all others.
    """
    depth = engine.target.spec.num_layers
    states_TH = states_of(engine, list(tokens), (depth,))[depth].float().cpu()
    scaled_TH = states_TH / states_TH.norm(dim=-1, keepdim=True).clamp(min=1e-9)
    pooled_H = scaled_TH.mean(dim=0) if pooling == "mean" else scaled_TH[-1]
    if normalised:
        pooled_H = pooled_H / pooled_H.norm().clamp(min=1e-9)
    found: list[float] = pooled_H.tolist()
    return found


def states_of(engine: Engine, tokens: list[int], taps: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """The target's hidden states of a text by tap, [T, H] each, before the final norm.

    Only the engine's thread may call it, between steps.
    """
    size = engine.scheduler.config.max_step_tokens
    (id,) = engine.kv.scratch(1)
    try:
        if not engine.kv.reserve(id, len(tokens)):
            raise Overloaded("the KV cache is full: try again later")
        found: dict[int, list[torch.Tensor]] = {tap: [] for tap in taps}
        for start in range(0, len(tokens), size):
            piece = Slice(tokens[start : start + size], start, engine.kv.table(id), None)
            output = engine.target.forward(pack([piece], taps=taps))
            for tap, parts in found.items():
                parts.append(output.taps[tap].clone())
        return {tap: torch.cat(parts) for tap, parts in found.items()}
    finally:
        engine.kv.free(id, keep=False)
