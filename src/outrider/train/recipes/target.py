"""A target whose first layers can draft for it (LayerSkip: layer dropout + early-exit loss).

Every layer's output, passed through the model's own final norm and head, is trained to predict the
next token: each step adds the loss of a few exits in rotation. Layers are dropped per row with a
probability that rises with depth, so that shallow outputs remain usable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.train.config import TargetConfig
from outrider.train.measure import cross_entropy, exit_logits, measure, model_logits
from outrider.train.models import compile_layers, save_model


class TargetRecipe:
    """Next-token loss with early exits on a Llama-shaped model. Mutates `model` in training."""

    def __init__(self, model: Any, config: TargetConfig) -> None:
        self.module: nn.Module = model
        self.model, self.config = model, config
        self.num_layers: int = model.config.num_hidden_layers
        self.exits = config.exits or tuple(range(1, self.num_layers))
        self._head_loss = head_loss
        if config.compiled:
            compile_layers(model)
            self._head_loss = torch.compile(head_loss)
        depth = max(1, self.num_layers - 1)
        # Rises as 2^(l/depth) - 1: nothing for the first layer, the full rate for the last.
        self.drop_rates = [
            config.layer_dropout * (2 ** (layer / depth) - 1) for layer in range(self.num_layers)
        ]

    def loss(self, tokens_BL: Tensor, step: int, done: float) -> tuple[Tensor, dict[str, Tensor]]:
        inputs_BL, labels_BL = tokens_BL[:, :-1], tokens_BL[:, 1:]
        wanted = self._exits_of(step)
        hidden_BLH, exits = self._forward(inputs_BL, wanted, step)
        norm, head = self.model.model.norm, self.model.lm_head
        final = self._head_loss(norm, head, hidden_BLH, labels_BL)
        loss = final
        figures = {"final": final}
        for exit_layer, exit_BLH in exits.items():
            exit_loss = self._head_loss(norm, head, exit_BLH, labels_BL)
            loss = loss + self.config.exit_weight / len(exits) * exit_loss
            figures[f"exit_{exit_layer}"] = exit_loss
        return loss, figures

    def _exits_of(self, step: int) -> tuple[int, ...]:
        count = min(self.config.exits_per_step, len(self.exits))
        return tuple(self.exits[(step * count + i) % len(self.exits)] for i in range(count))

    def _forward(
        self, inputs_BL: Tensor, wanted: tuple[int, ...], step: int
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Hidden state before the final norm, and the outputs of the `wanted` first layers."""
        decoder = self.model.model
        hidden_BLH = decoder.embed_tokens(inputs_BL)
        if torch.is_autocast_enabled(inputs_BL.device.type):
            hidden_BLH = hidden_BLH.to(torch.get_autocast_dtype(inputs_BL.device.type))
        positions_1L = torch.arange(inputs_BL.shape[1], device=inputs_BL.device)[None]
        rotary = decoder.rotary_emb(hidden_BLH, positions_1L)
        keep_LB = self._keep(len(inputs_BL), step, hidden_BLH)
        exits = {}
        for layer, block in enumerate(decoder.layers):
            output_BLH = block(
                hidden_BLH,
                attention_mask=None,
                position_ids=positions_1L,
                position_embeddings=rotary,
            )
            if self.drop_rates[layer] > 0:
                output_BLH = torch.lerp(hidden_BLH, output_BLH, keep_LB[layer][:, None, None])
            hidden_BLH = output_BLH
            if layer + 1 in wanted:
                exits[layer + 1] = hidden_BLH
        return hidden_BLH, exits

    def _keep(self, num_rows: int, step: int, like: Tensor) -> Tensor:
        """1 where a row keeps a layer, 0 where it skips it; a function of (seed, step)."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        uniform_LB = torch.rand(self.num_layers, num_rows, generator=generator)
        rates_L1 = torch.tensor(self.drop_rates)[:, None]
        return (uniform_LB >= rates_L1).to(like)

    def measure(self, rows_BL: Tensor) -> dict[str, Any]:
        """Loss of the whole model and agreement of its exits; `alpha` is the middle exit's."""
        logits = model_logits(self.model)
        exits = {
            str(layer): measure(exit_logits(self.model, layer), logits, rows_BL).as_dict()
            for layer in self.exits
        }
        middle = exits[str(self.exits[len(self.exits) // 2])]
        return {**middle, "nats": cross_entropy(logits, rows_BL), "exits": exits}

    def save(self, folder: Path) -> None:
        save_model(self.model, folder)


def head_loss(norm: nn.Module, head: nn.Module, hidden_BLH: Tensor, labels_BL: Tensor) -> Tensor:
    logits_BLV = head(norm(hidden_BLH))
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), labels_BL.flatten())
