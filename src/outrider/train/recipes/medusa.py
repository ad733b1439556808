"""Medusa heads: each guesses one token further ahead from the last hidden state (Medusa-1).

The target is frozen. Head h at position t is compared with the target's own distribution for token
t + 2 + h, given the text in between; one pass of the target over the row gives all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.heads import MedusaConfig, MedusaHeads
from outrider.train.config import MedusaRecipeConfig
from outrider.train.recipes.heads import Depth, FrozenTarget, HeadRecipe


def new_heads(target: FrozenTarget, config: MedusaRecipeConfig) -> MedusaHeads:
    shape = target.model.config
    heads = MedusaHeads(
        MedusaConfig(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            num_heads=config.num_heads,
            num_hidden_layers=config.num_hidden_layers,
            original_lm_head=config.original_lm_head,
        )
    )
    if not config.original_lm_head:
        for head in heads.lm_heads:
            head.load_state_dict({"weight": target.head.weight.detach().float()})
    return heads


class MedusaRecipe(HeadRecipe):
    def __init__(
        self, target: FrozenTarget, config: MedusaRecipeConfig, heads: MedusaHeads | None = None
    ) -> None:
        """Continues the training of `heads`; new ones if None."""
        heads = heads or new_heads(target, config)
        super().__init__(heads.to(target.head.weight.device), target, config)
        self.heads, self.positions_per_row = heads, config.positions_per_row

    def depths(self, tokens_BL: Tensor, step: int, skip: int = 0) -> Iterator[Depth]:
        hidden_BLH = self.target.states(tokens_BL)[-1]
        num_heads = self.heads.config.num_heads
        usable = tokens_BL.shape[1] - 1 - num_heads - skip
        if usable < 1:
            raise ConfigError(f"rows of {tokens_BL.shape[1]} are too short for {num_heads} heads")
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        starts = torch.randperm(usable, generator=generator)[: self.positions_per_row]
        starts = skip + starts.to(tokens_BL.device)
        guesses = self.heads(hidden_BLH[:, starts])
        for index in range(num_heads):
            guess_NH = guesses[index].flatten(0, 1)
            shared = self.heads.config.original_lm_head
            q_NV = self.target.logits(guess_NH) if shared else self.heads.lm_heads[index](guess_NH)
            p_NV = self.target.next_logits(tokens_BL)[:, starts + 1 + index].flatten(0, 1)
            yield Depth(q_NW=q_NV, p_NV=p_NV)
