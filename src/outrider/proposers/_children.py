"""Which tokens a node's children get: the k best guesses of what the target will draw there.

Shape legend: R rows (nodes to expand), V vocabulary, C children.
"""

from __future__ import annotations

import torch

from outrider.noise import gumbel
from outrider.sampling import RowParams, filtered


def best_children(
    logits_RV: torch.Tensor, rows: RowParams, keys: list[int], num_children: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The first children of each row and how likely each is to be the target's draw, as logs.

    `keys` are draw keys, unused on greedy rows. Suppose the target's logits were the drafter's
    plus Gumbel noise of scale 1. Then the token that wins under *known* sampling noise g is
    distributed as softmax(logits + T g).
    """
    scaled_RV = filtered(logits_RV, rows)
    if rows.temperature_R.any():
        temperature = torch.from_numpy(rows.temperature_R).to(scaled_RV.device)[:, None]
        noisy_RV = scaled_RV + gumbel(keys, scaled_RV.shape[-1], scaled_RV.device)
        scaled_RV = torch.where(temperature > 0, noisy_RV * temperature, scaled_RV)
    best_RC = scaled_RV.topk(min(num_children, scaled_RV.shape[-1]))
    scores_RC = best_RC.values - scaled_RV.logsumexp(dim=-1, keepdim=True)
    return best_RC.indices.tolist(), scores_RC.tolist()
