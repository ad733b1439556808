"""Which tokens a node's children get: the k best guesses of what the target will draw there.

Shape legend: R rows (nodes to expand), V vocabulary, C children.
"""

from __future__ import annotations

import numpy as np
import torch

from outrider import native
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
    num_children = min(num_children, logits_RV.shape[-1])
    if native.available() and logits_RV.device.type == "cpu":
        found_RC, logs_RC = native.best_guesses(
            logits_RV,
            rows.temperature_R,
            rows.top_k_R,
            rows.top_p_R,
            rows.min_p_R,
            np.array(keys, np.uint64),
            num_children,
        )
        return found_RC.tolist(), logs_RC.tolist()
    noisy_RV = logits_RV
    if rows.temperature_R.any():
        temperature = torch.from_numpy(rows.temperature_R).to(logits_RV.device)[:, None]
        if rows.filters:
            noisy_RV = filtered(logits_RV, rows) * torch.where(temperature > 0, temperature, 1.0)
        # Coupled nodes of one depth share their noise, and noise costs more than all the rest.
        unique = list(dict.fromkeys(keys))
        noise_UV = gumbel(unique, noisy_RV.shape[-1], noisy_RV.device)
        noise_RV = noise_UV[[unique.index(key) for key in keys]]
        noisy_RV = torch.addcmul(noisy_RV, temperature, noise_RV)
    best_RC = noisy_RV.topk(num_children)
    scores_RC = best_RC.values - noisy_RV.logsumexp(dim=-1, keepdim=True)
    return best_RC.indices.tolist(), scores_RC.tolist()
