"""How well a drafter agrees with its target on given rows: the figures of every model card.

alpha is the ratio rule's acceptance (sum of min(p, q), averaged over positions); agreement is the
share of positions with the same most likely token. Acceptance length counts the correction or bonus
token; the greedy one is the mean of K greedy drafts at every position of the rows, the sampled one
the expectation under the ratio rule (from the product of the alphas ahead).
Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.train.losses import acceptance, greedy_agreement

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    alpha: float
    agreement: float
    greedy_acceptance_length: float
    sampled_acceptance_length: float
    num_draft_tokens: int
    num_positions: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def model_logits(model: Any) -> Logits:
    """Logits of a causal language model for whole rows."""

    def logits(tokens_BL: Tensor) -> Tensor:
        output: Tensor = model(input_ids=tokens_BL, use_cache=False).logits
        return output

    return logits


def exit_logits(model: Any, num_layers: int) -> Logits:
    """Logits of the first `num_layers` layers, through the model's own norm and head."""

    def logits(tokens_BL: Tensor) -> Tensor:
        states = model(input_ids=tokens_BL, use_cache=False, output_hidden_states=True)
        output: Tensor = model.lm_head(model.model.norm(states.hidden_states[num_layers]))
        return output

    return logits


@torch.no_grad()
def measure(
    draft: Logits,
    target: Logits,
    rows_BL: Tensor,
    *,
    num_draft_tokens: int = 4,
    rows_per_pass: int = 4,
    skip: int = 0,
    temperature: float = 1.0,
) -> Agreement:
    """Compares two models at every position of `rows_BL` after the first `skip` of each row."""
    alpha_sum = agreement_sum = 0.0
    greedy_sum = sampled_sum = 0.0
    num_positions = num_starts = 0
    for part_BL in torch.split(rows_BL, rows_per_pass):
        p_BLV, q_BLV = target(part_BL)[:, skip:], draft(part_BL)[:, skip:]
        for p_LV, q_LV in zip(p_BLV, q_BLV, strict=True):
            alpha_L = acceptance(q_LV / temperature, p_LV / temperature)
            alpha_sum += alpha_L.sum().item()
            same_L = greedy_agreement(q_LV, p_LV)
            agreement_sum += same_L.sum().item()
            num_positions += len(same_L)
            starts = len(same_L) - num_draft_tokens + 1
            if starts > 0:
                greedy_sum += _runs(same_L, num_draft_tokens)
                sampled_sum += _runs(alpha_L, num_draft_tokens)
                num_starts += starts
    return Agreement(
        alpha=alpha_sum / num_positions,
        agreement=agreement_sum / num_positions,
        greedy_acceptance_length=1 + greedy_sum / max(1, num_starts),
        sampled_acceptance_length=1 + sampled_sum / max(1, num_starts),
        num_draft_tokens=num_draft_tokens,
        num_positions=num_positions,
    )


def _runs(accepted_L: Tensor, num_draft_tokens: int) -> float:
    """Expected accepted drafts, summed over all starts with `num_draft_tokens` positions ahead."""
    ahead: Tensor = accepted_L.unfold(0, num_draft_tokens, 1)
    return ahead.cumprod(-1).sum().item()


@torch.no_grad()
def cross_entropy(logits: Logits, rows_BL: Tensor, *, rows_per_pass: int = 4) -> float:
    """Mean next-token loss in nats."""
    total, count = 0.0, 0
    for part_BL in torch.split(rows_BL, rows_per_pass):
        output_BLV = logits(part_BL)[:, :-1].float()
        total += F.cross_entropy(
            output_BLV.flatten(0, 1), part_BL[:, 1:].flatten(), reduction="sum"
        ).item()
        count += part_BL[:, 1:].numel()
    return total / count
