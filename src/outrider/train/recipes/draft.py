"""A draft model distilled from the target: it imitates the target's law, not the text.

The loss is a mixture of a steady divergence (forward KL by default) and the total variation, whose
weight rises over the run: acceptance is one minus the total variation, but its gradient is weak far
from the target. Rows may be text or the target's own generations; the target's law is computed on
the fly either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.train.losses import acceptance, get_loss, greedy_agreement
from outrider.train.measure import measure, model_logits
from outrider.train.models import compile_layers, hidden_states, output_logits, save_model


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    loss: str = "forward-kl"
    # Share of the total variation in the loss at the end of the run (0 at the start, linear
    # between).
    tvd_share: float = 0.9
    # Positions per slice of the loss: the fp32 laws of a whole batch need not fit in memory.
    slice_rows: int = 1 << 15
    compiled: bool = False

    def __post_init__(self) -> None:
        get_loss(self.loss)


class DraftRecipe:
    """Distil `draft` from the frozen `target`. Mutates `draft` in training."""

    def __init__(self, draft: Any, target: Any, config: DraftConfig) -> None:
        self.module: nn.Module = draft
        self.draft, self.target, self.config = draft, target.eval().requires_grad_(False), config
        self._base = get_loss(config.loss)
        self._distil = self._distil_slice
        if config.compiled:
            compile_layers(draft)
            compile_layers(target)
            self._distil = torch.compile(self._distil_slice)

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            target_NH = hidden_states(self.target, tokens_BL).flatten(0, 1)
        draft_NH = hidden_states(self.draft, tokens_BL).flatten(0, 1)
        weight = torch.tensor(self.config.tvd_share * done, device=tokens_BL.device)
        totals = torch.zeros(3, device=tokens_BL.device)
        for q_NH, p_NH in zip(
            torch.split(draft_NH, self.config.slice_rows),
            torch.split(target_NH, self.config.slice_rows),
            strict=True,
        ):
            totals = totals + self._distil(q_NH, p_NH, weight)
        mean = totals / len(draft_NH)
        return mean[0], {"alpha": mean[1], "agreement": mean[2]}

    def _distil_slice(self, q_NH: Tensor, p_NH: Tensor, weight: Tensor) -> Tensor:
        """[sum of the loss, of alpha, of greedy agreement] over the slice's positions."""
        q_NV = output_logits(self.draft, q_NH)
        with torch.no_grad():
            p_NV = output_logits(self.target, p_NH)
        tvd_N = get_loss("tvd")(q_NV, p_NV)
        loss = ((1 - weight) * self._base(q_NV, p_NV) + weight * tvd_N).sum()
        alpha = acceptance(q_NV, p_NV).sum()
        return torch.stack([loss, alpha, greedy_agreement(q_NV, p_NV).sum()])

    def measure(self, rows_BL: Tensor) -> dict[str, Any]:
        return measure(model_logits(self.draft), model_logits(self.target), rows_BL).as_dict()

    def save(self, folder: Path) -> None:
        save_model(self.draft, folder)
