"""Medusa's heads: residual blocks on the target's last normalised state.

Shapes: B sequences, Q positions, H hidden, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.model.head_base import Head


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    hidden_size: int
    vocab_size: int  # 0: the target's, whatever it is
    num_heads: int = 4
    num_hidden_layers: int = 1
    # True: all heads share the target's output head, which is not stored here.
    original_lm_head: bool = True
    one_lm_head: bool = False  # one output head is stored here, and all heads use it
    bias: bool = False
    draft_vocab_size: int = 0  # rows of the output heads; 0: vocab_size
    logit_scale: float = 1.0


class MedusaHeads(Head):
    """Head h predicts the token h + 2 places after the token whose state it reads (Medusa-1)."""

    kind = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, self.vocab_size = config, config.vocab_size
        self.num_draft_tokens = config.num_heads
        size = self.target_size = config.hidden_size
        rows = config.draft_vocab_size or config.vocab_size
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList(
                        nn.Linear(size, size, bias=config.bias)
                        for _ in range(config.num_hidden_layers)
                    )
                }
            )
            for _ in range(config.num_heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # starts with the target's own prediction
        self.token_map: Tensor | None
        ids = None
        if not config.original_lm_head:
            num_lm_heads = 1 if config.one_lm_head else config.num_heads
            self.lm_heads = nn.ModuleList(
                nn.Linear(size, rows, bias=False) for _ in range(num_lm_heads)
            )
            ids = torch.arange(rows) if rows != config.vocab_size else None
        self.register_buffer("token_map", ids)  # the target ids of the rows; None: all in order

    def forward(self, hidden_BQH: Tensor, num_heads: int | None = None) -> Tensor:
        """The states of all heads, [num_heads, B, Q, H], from the target's normalised state."""
        outputs = []
        for block in self.blocks[:num_heads]:
            x_BQH = hidden_BQH
            for layer in block["layers"]:  # type: ignore[index]
                x_BQH = x_BQH + F.silu(layer(x_BQH))
            outputs.append(x_BQH)
        return torch.stack(outputs)

    def own_logits(self, states_DBH: Tensor) -> Tensor:
        """Logits of the first D heads, [D, B, W]; only with output heads of their own."""
        if self.config.one_lm_head:
            logits_DBW: Tensor = self.lm_heads[0](states_DBH)
        else:
            pairs = zip(self.lm_heads, states_DBH, strict=False)
            logits_DBW = torch.stack([head(states_BH) for head, states_BH in pairs])
        return (
            logits_DBW if self.config.logit_scale == 1.0 else logits_DBW * self.config.logit_scale
        )

    def config_json(self) -> dict[str, Any]:
        fields = asdict(self.config)
        bias, size = fields.pop("bias"), fields.pop("draft_vocab_size")
        scale = fields.pop("logit_scale")
        fields["original_lm_head"] |= fields.pop("one_lm_head")
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_fc_bias": bias,
            "truncated_vocab_size": size or self.config.vocab_size,
            **fields,
            **({} if scale == 1.0 else {"logit_scale": scale}),
        }
