"""Experts in torch: a router chooses a few MLPs for each token, and each is run once per pass.

Shape legend: T tokens of the pass, E experts, C chosen experts of a token, n tokens of one expert,
H hidden, I intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.model.families.description import Experts
from outrider.model.mlp import ACTIVATIONS


@dataclass(slots=True, kw_only=True)
class ExpertLayer:
    """The router and the experts of one layer."""

    config: Experts
    activation: str
    gated: bool
    router_EH: torch.Tensor
    router_bias_E: torch.Tensor | None
    choice_bias_E: torch.Tensor | None
    gate_up: list[torch.Tensor]  # [2 * I, H] each, or [I, H] without a gate
    gate_up_bias: list[torch.Tensor] | None
    down: list[torch.Tensor]  # [H, I] each
    down_bias: list[torch.Tensor] | None
    shared_gate_H: torch.Tensor | None
    scales_E: torch.Tensor | None = None  # multiply the weights
    # Experts apart from the MLP beside them: norms of what experts read, of their sum, and of what
    # that MLP gives.
    eps: float = 0.0
    in_norm_H: torch.Tensor | None = None
    out_norm_H: torch.Tensor | None = None
    beside_norm_H: torch.Tensor | None = None

    def apart(self, x_TH: torch.Tensor, beside_TH: torch.Tensor) -> torch.Tensor:
        """[T, H]: the experts of the residual, and what the MLP beside them gives."""
        assert self.in_norm_H is not None
        unit_TH = F.rms_norm(x_TH, x_TH.shape[-1:], None, self.eps)
        given = self.run(unit_TH * self.in_norm_H, *self.route(unit_TH))
        given = F.rms_norm(given, given.shape[-1:], self.out_norm_H, self.eps)
        return given + F.rms_norm(beside_TH, given.shape[-1:], self.beside_norm_H, self.eps)

    def __call__(self, h_TH: torch.Tensor) -> torch.Tensor:
        """[T, H]: the weighted sum of the chosen experts."""
        return self.run(h_TH, *self.route(h_TH))

    def run(
        self, h_TH: torch.Tensor, weights_TC: torch.Tensor, chosen_TC: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], with weights and choice of `route`."""
        out_TH = torch.zeros_like(h_TH)
        for expert in torch.unique(chosen_TC).tolist():
            rows, slots = torch.nonzero(chosen_TC == expert, as_tuple=True)
            weight_n = weights_TC[rows, slots, None].to(h_TH.dtype)
            x = h_TH[rows] * weight_n if self.config.weighs_input else h_TH[rows]
            y = self._expert(expert, x)
            out_TH.index_add_(0, rows, y if self.config.weighs_input else y * weight_n)
        return out_TH

    def shared_factor(self, h_TH: torch.Tensor) -> torch.Tensor | None:
        """[T, 1]: what the output of the shared MLP is multiplied by."""
        if self.shared_gate_H is None:
            return None
        return torch.sigmoid(h_TH @ self.shared_gate_H)[:, None]

    def _expert(self, index: int, x_nH: torch.Tensor) -> torch.Tensor:
        bias = None if self.gate_up_bias is None else self.gate_up_bias[index]
        inner = F.linear(x_nH, self.gate_up[index], bias)
        limit = self.config.clamp
        if not self.gated:
            return F.linear(ACTIVATIONS[self.activation](inner), self.down[index])
        gate, up = inner.chunk(2, dim=-1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(gate * self.config.alpha)
        else:
            inner = ACTIVATIONS[self.activation](gate) * up
        bias = None if self.down_bias is None else self.down_bias[index]
        return F.linear(inner, self.down[index], bias)

    def route(self, h_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of the chosen experts, float32, and which they are: [T, C] each."""
        config = self.config
        scores_TE = F.linear(h_TH.float(), self.router_EH, self.router_bias_E)
        if config.router == "sparsemixer":
            return _sparsemixer(scores_TE, config.jitter)
        if config.router == "softmax_of_chosen":
            best_TC, chosen_TC = scores_TE.topk(config.active, dim=-1)
            return best_TC.softmax(-1), chosen_TC
        if config.router == "sigmoid_of_chosen":
            best_TC, chosen_TC = scores_TE.topk(config.active, dim=-1)
            return best_TC.sigmoid(), chosen_TC
        sigmoid = config.router == "sigmoid"
        weights_TE = scores_TE.sigmoid() if sigmoid else scores_TE.softmax(-1)
        choice_TE = weights_TE if self.choice_bias_E is None else weights_TE + self.choice_bias_E
        if config.groups > 1:
            choice_TE = self._in_best_groups(choice_TE)
        chosen_TC = choice_TE.topk(config.active, dim=-1)[1]
        weights_TC = weights_TE.gather(1, chosen_TC)
        if config.normalised:
            total = weights_TC.sum(-1, keepdim=True)
            weights_TC = weights_TC / total.clamp(min=config.least_sum)
        if self.scales_E is not None:
            weights_TC = weights_TC * self.scales_E[chosen_TC]
        return weights_TC * config.scale, chosen_TC

    def _in_best_groups(self, choice_TE: torch.Tensor) -> torch.Tensor:
        """-inf for experts outside the best groups."""
        config = self.config
        groups = choice_TE.view(len(choice_TE), config.groups, -1)
        scores = groups.topk(config.group_best, dim=-1)[0].sum(-1)
        open_groups = scores.topk(config.open_groups, dim=-1)[1]
        closed = torch.ones_like(scores, dtype=torch.bool).scatter_(1, open_groups, False)
        return groups.masked_fill(closed[..., None], -torch.inf).flatten(1)


def _sparsemixer(scores_TE: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen, left_TE = [], [], scores_TE
    for _ in range(2):
        best, index = left_TE.max(-1, keepdim=True)
        scale = scores_TE.abs().clamp(min=best)
        far = (best - scores_TE) / scale > 2 * jitter
        weights.append(left_TE.masked_fill(far, -torch.inf).softmax(-1).gather(1, index))
        chosen.append(index)
        left_TE = left_TE.scatter(1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)
