"""Optimiser and learning-rate schedule.

Weight matrices of the layers are trained with Muon (momentum, then the nearest orthogonal matrix by
a Newton-Schulz iteration); embeddings, heads, norms and biases with AdamW. `muon=False` gives plain
AdamW for every parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.train.config import OptimConfig

# Coefficients of the quintic iteration: singular values are about 1 after five steps, rather than
# exactly 1 after many.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def schedule_factor(config: OptimConfig, step: int, num_steps: int | None) -> float:
    """Rate factor of step `step` (from 0); `num_steps` is None while it is unknown."""
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    if config.schedule == "constant" or num_steps is None:
        return warmup
    done = (step + 1) / num_steps
    if config.schedule == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    else:
        shape = min(1.0, (1 - done) / config.decay_share) if config.decay_share else 1.0
    return warmup * (config.final_share + (1 - config.final_share) * max(0.0, shape))


def orthogonalise(update_GRC: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix to each of G matrices, roughly, in bf16 (fp32 on a CPU)."""
    a, b, c = _NEWTON_SCHULZ
    x_GRC = update_GRC.bfloat16() if update_GRC.is_cuda else update_GRC.float()
    tall = x_GRC.size(-2) > x_GRC.size(-1)
    if tall:
        x_GRC = x_GRC.mT
    x_GRC = x_GRC / (x_GRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram_GRR = x_GRC @ x_GRC.mT
        x_GRC = a * x_GRC + (b * gram_GRR + c * gram_GRR @ gram_GRR) @ x_GRC
    result: Tensor = x_GRC.mT if tall else x_GRC
    return result


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for matrices; those of one shape form a batch."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("Muon takes no closure")
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                self._step_shape(
                    shape, weights, group["lr"], group["momentum"], group["weight_decay"]
                )

    def _step_shape(
        self,
        shape: torch.Size,
        weights: list[nn.Parameter],
        lr: float,
        momentum: float,
        decay: float,
    ) -> None:
        buffers = []
        for weight in weights:
            state = self.state[weight]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(weight)
            buffers.append(state["momentum"])
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        lookahead = torch._foreach_lerp(gradients, buffers, momentum)
        updates = orthogonalise(torch.stack(list(lookahead))).to(weights[0].dtype).unbind(0)
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        data = [weight.data for weight in weights]
        if decay:
            torch._foreach_mul_(data, 1 - lr * decay)
        torch._foreach_add_(data, list(updates), alpha=-lr * scale)


class Optimisers:
    """The one or two optimisers of a run, stepped together, with one schedule factor."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig):
        self.config = config
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            if not parameter.requires_grad:
                continue
            is_matrix = parameter.ndim == 2 and not any(word in name for word in ("embed", "head"))
            (matrices if config.muon and is_matrix else others).append(parameter)
        if not matrices and not others:
            raise ConfigError("nothing to train: every parameter is frozen")
        self.parameters = matrices + others
        self.optimisers: list[torch.optim.Optimizer] = []
        if others:
            fused = others[0].is_cuda
            self.optimisers.append(
                torch.optim.AdamW(
                    others,
                    lr=config.learning_rate,
                    betas=config.betas,
                    weight_decay=config.weight_decay,
                    fused=fused,
                )
            )
        if matrices:
            self.optimisers.append(
                Muon(
                    matrices,
                    lr=config.matrix_learning_rate,
                    momentum=config.momentum,
                    weight_decay=config.weight_decay,
                )
            )
        self._base = [
            [group["lr"] for group in optimiser.param_groups] for optimiser in self.optimisers
        ]

    def step(self, factor: float) -> Tensor:
        """One update at `factor` times the base rates; clears gradients, returns their norm."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        for optimiser, rates in zip(self.optimisers, self._base, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return norm

    def state_dict(self) -> list[dict[str, object]]:
        return [optimiser.state_dict() for optimiser in self.optimisers]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for optimiser, state in zip(self.optimisers, states, strict=True):
            optimiser.load_state_dict(state)
