"""Inputs of single layers and several residual streams, in torch: Gemma 3n and 4.

Shape legend: T tokens, L layers, P numbers of a layer's input, N streams, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.model.families.description import DecoderConfig
from outrider.model.mlp import ACTIVATIONS
from outrider.model.tensors import Weights

Place = Callable[[torch.Tensor], torch.Tensor]
_LEAST_POWER = 1e-5  # of a stream's mean square


@dataclass(slots=True, kw_only=True)
class InputTable:
    """Makes the inputs of all layers."""

    size: int
    eps: float
    table: torch.Tensor  # [rows, L * P]
    product: torch.Tensor  # [L * P, H]
    norm_P: torch.Tensor

    def __call__(self, tokens_T: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
        """[L, T, P], of the tokens and their embeddings."""
        made = F.linear(x_TH, self.product) * x_TH.shape[-1] ** -0.5
        made = made.view(len(x_TH), -1, self.size)
        made = F.rms_norm(made, (self.size,), self.norm_P, self.eps)
        tokens = torch.where(tokens_T < len(self.table), tokens_T, 0)
        factor = torch.tensor(self.size**0.5, dtype=x_TH.dtype, device=x_TH.device)
        stored = self.table[tokens].view_as(made) * factor
        both: torch.Tensor = (made + stored) * 2.0**-0.5
        return both.transpose(0, 1)


@dataclass(slots=True, kw_only=True)
class InputGate:
    """What a layer adds last: its state gates its input."""

    activation: str
    eps: float
    gate: torch.Tensor  # [P, H]
    out: torch.Tensor  # [H, P]
    norm_H: torch.Tensor

    def __call__(self, x_TH: torch.Tensor, input_TP: torch.Tensor) -> torch.Tensor:
        gated = ACTIVATIONS[self.activation](F.linear(x_TH, self.gate)) * input_TP
        return F.rms_norm(F.linear(gated, self.out), self.norm_H.shape, self.norm_H, self.eps)


@dataclass(slots=True, kw_only=True)
class StreamEnds:
    """Makes the streams of an embedding, and one state of the streams."""

    first: list[torch.Tensor]  # [H, H] each
    last: list[torch.Tensor]

    def begin(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, N, H]"""
        others = [F.linear(x_TH, weight) for weight in self.first]
        return torch.stack([x_TH, *_as_long_as(x_TH, others)], dim=1)

    def end(self, x_TNH: torch.Tensor) -> torch.Tensor:
        """[T, H]"""
        x_TH = x_TNH[:, 0]
        others = [F.linear(x_TNH[:, i + 1], weight) for i, weight in enumerate(self.last)]
        return torch.stack([x_TH, *_as_long_as(x_TH, others)]).mean(dim=0)


def _as_long_as(x_TH: torch.Tensor, others: list[torch.Tensor]) -> list[torch.Tensor]:
    """The others, scaled to the mean square of `x_TH`."""
    length = x_TH.square().mean(-1, keepdim=True).sqrt()
    powers = [other.square().mean(-1, keepdim=True).clamp(min=_LEAST_POWER) for other in others]
    return [other * length / power.sqrt() for other, power in zip(others, powers, strict=True)]


@dataclass(slots=True, kw_only=True)
class StreamLayer:
    """How a layer predicts all streams, and corrects them by the one that it computed."""

    active: int
    eps: float
    predicts: torch.Tensor  # [N * N, N]
    corrects: torch.Tensor  # [N, N]
    router: torch.Tensor  # [N, H]
    router_norm_H: torch.Tensor
    scale_H: torch.Tensor | None
    left: torch.Tensor  # [rank, H]
    right: torch.Tensor  # [H, rank]
    low_norm_H: torch.Tensor

    def predict(self, x_TNH: torch.Tensor) -> torch.Tensor:
        weights = F.linear(self._route(x_TNH[:, self.active]), self.predicts)
        count = x_TNH.shape[1]
        return x_TNH + weights.view(-1, count, count) @ x_TNH

    def correct(self, x_TNH: torch.Tensor, computed_TH: torch.Tensor) -> torch.Tensor:
        weights_TN = F.linear(self._route(computed_TH), self.corrects) + 1.0
        off_TH = computed_TH - x_TNH[:, self.active]
        return x_TNH + weights_TN[..., None] * off_TH[:, None]

    def low_rank(self, h_TH: torch.Tensor) -> torch.Tensor:
        low = F.linear(F.linear(h_TH, self.left), self.right)
        return h_TH + F.rms_norm(low, self.low_norm_H.shape, self.low_norm_H, self.eps)

    def add_input(self, x_TNH: torch.Tensor, gate: InputGate, input_TP: torch.Tensor) -> None:
        """Adds the layer's input to all streams but the first."""
        seen = x_TNH[:, self.active]
        seen = seen if self.scale_H is None else seen * self.scale_H
        x_TNH[:, 1:] += gate(seen, input_TP)[:, None]

    def _route(self, x_TH: torch.Tensor) -> torch.Tensor:
        """[T, N]"""
        h = F.rms_norm(x_TH, self.router_norm_H.shape, self.router_norm_H, self.eps)
        return torch.tanh(F.linear(h * x_TH.shape[-1] ** -1.0, self.router))


def read_input_table(weights: Weights, place: Place) -> InputTable | None:
    config = weights.config
    if config.layer_inputs is None:
        return None
    return InputTable(
        size=config.layer_inputs.size,
        eps=config.norm_eps,
        table=place(weights.trunk("embed_tokens_per_layer.weight")),
        product=place(weights.trunk("per_layer_model_projection.weight")),
        norm_P=place(weights.trunk("per_layer_projection_norm.weight")),
    )


def read_input_gate(weights: Weights, layer: int, place: Place) -> InputGate | None:
    config = weights.config
    if config.layer_inputs is None:
        return None
    return InputGate(
        activation=config.activation,
        eps=config.norm_eps,
        gate=place(weights.layer(layer, "per_layer_input_gate.weight")),
        out=place(weights.layer(layer, "per_layer_projection.weight")),
        norm_H=place(weights.layer(layer, "post_per_layer_input_norm.weight")),
    )


def read_stream_ends(weights: Weights, place: Place) -> StreamEnds | None:
    streams = weights.config.streams
    if streams is None:
        return None
    first, last = (
        [place(weights.trunk(f"{name}.{i}.weight")) for i in range(streams.count - 1)]
        for name in ("altup_projections", "altup_unembed_projections")
    )
    return StreamEnds(first=first, last=last)


def read_stream_layer(weights: Weights, layer: int, place: Place) -> StreamLayer | None:
    config: DecoderConfig = weights.config
    streams = config.streams
    if streams is None:
        return None

    def read(name: str) -> torch.Tensor:
        return place(weights.layer(layer, name))

    scale_H = read("altup.correct_output_scale")
    return StreamLayer(
        active=streams.active,
        eps=config.norm_eps,
        predicts=read("altup.prediction_coefs.weight"),
        corrects=read("altup.correction_coefs.weight"),
        router=read("altup.modality_router.weight"),
        router_norm_H=read("altup.router_norm.weight"),
        scale_H=scale_H if streams.scaled else None,
        left=read("laurel.linear_left.weight"),
        right=read("laurel.linear_right.weight"),
        low_norm_H=read("laurel.post_laurel_norm.weight"),
    )
