"""A draft model distilled from the target: it learns the target's distribution, not the text.

The loss is a mixture of a divergence (forward KL by default) and the total variation, whose weight
rises over the run: acceptance is one minus the total variation, but its gradient is weak far from
the target. Rows are text or the target's own generations; the target's distribution is computed
during training.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.train.config import DraftConfig
from outrider.train.losses import acceptance, get_loss, greedy_agreement, tvd
from outrider.train.measure import measure, model_logits
from outrider.train.models import compile_layers, hidden_states, output_logits, save_model
from outrider.train.recipes.heads import FrozenTarget


class DraftRecipe:
    """Distil `draft` from the frozen `target`. Mutates `draft` in training.

    Recipes that share a `target` and run `Together` compute its states once per batch.
    """

    def __init__(self, draft: Any, target: FrozenTarget, config: DraftConfig) -> None:
        self.module: nn.Module = draft
        self.draft, self.target, self.config = draft, target, config
        self._base = get_loss(config.loss)
        self._distil = self._distil_slice
        if config.compiled:
            compile_layers(draft)
            self._distil = torch.compile(self._distil_slice)

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        target_NH = self.target.last(tokens_BL).flatten(0, 1)
        draft_NH = hidden_states(self.draft, tokens_BL).flatten(0, 1)
        risen = min(1.0, done / self.config.tvd_by)
        weight = torch.tensor(self.config.tvd_share * risen, device=tokens_BL.device)
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
            p_NV = self.target.logits(p_NH)
        tvd_N = tvd(q_NV, p_NV)
        if self.config.sharp_share:
            tvd_N = torch.lerp(tvd_N, tvd(2 * q_NV, 2 * p_NV), self.config.sharp_share)
        loss = ((1 - weight) * self._base(q_NV, p_NV) + weight * tvd_N).sum()
        alpha = acceptance(q_NV, p_NV).sum()
        return torch.stack([loss, alpha, greedy_agreement(q_NV, p_NV).sum()])

    def measure(self, rows_BL: Tensor) -> dict[str, Any]:
        return measure(model_logits(self.draft), model_logits(self.target.model), rows_BL).as_dict()

    def save(self, folder: Path) -> None:
        save_model(self.draft, folder)
