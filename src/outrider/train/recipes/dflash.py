"""A DFlash block head: one bidirectional pass denoises a whole block of tokens.

Each step trains on many blocks of a row. A block that starts at position a (the last known token)
attends to the target's features of the positions before a and to all of itself. The target's
distribution for position a + i comes from the target's pass over the row. Options add DSpark's
Markov bias and confidence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.heads import DFlashConfig, DFlashHead
from outrider.model.rope import RopeConfig
from outrider.train.config import DFlashRecipeConfig
from outrider.train.models import rope_theta
from outrider.train.recipes.eagle3 import default_taps
from outrider.train.recipes.heads import Depth, FrozenTarget, HeadRecipe


def new_head(target: FrozenTarget, config: DFlashRecipeConfig) -> DFlashHead:
    if config.block_size < 2:
        raise ConfigError("a block holds the last known token and at least one guess")
    shape = target.model.config
    return DFlashHead(
        DFlashConfig(
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            taps=config.taps or default_taps(shape.num_hidden_layers),
            mask_token_id=config.mask_token_id,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=getattr(shape, "num_key_value_heads", shape.num_attention_heads),
            head_dim=shape.hidden_size // shape.num_attention_heads,
            intermediate_size=config.intermediate_size or shape.intermediate_size,
            block_size=config.block_size,
            markov_rank=config.markov_rank,
            confidence=config.confidence,
            max_position_embeddings=shape.max_position_embeddings,
            rope=RopeConfig(theta=rope_theta(shape)),
            rms_norm_eps=getattr(shape, "rms_norm_eps", 1e-6),
        )
    )


class DFlashRecipe(HeadRecipe):
    def __init__(
        self, target: FrozenTarget, config: DFlashRecipeConfig, head: DFlashHead | None = None
    ) -> None:
        """Trains `head` further, or a new one when there is none."""
        head = head or new_head(target, config)
        super().__init__(head.to(target.head.weight.device), target, config)
        self.head, self.blocks_per_row = head, config.blocks_per_row

    def depths(self, tokens_BL: Tensor, step: int, skip: int = 0) -> Iterator[Depth]:
        size = self.head.config.block_size
        length = tokens_BL.shape[1]
        starts_A = self._starts(max(1, skip), length - size, step).to(tokens_BL.device)
        places_AS = starts_A[:, None] + torch.arange(size, device=tokens_BL.device)
        taps_BLTH = self.target.taps(tokens_BL, self.head.taps)
        positions_1L = torch.arange(length, device=tokens_BL.device)[None]
        context = self.head.context(self.head.fuse(taps_BLTH), positions_1L)
        block_BAS = tokens_BL[:, places_AS]
        noisy_BAS = block_BAS.clone()
        noisy_BAS[..., 1:] = self.head.config.mask_token_id
        hidden = self.head(
            self.target.embed(noisy_BAS.flatten(1)),
            places_AS.flatten()[None],
            context,
            self._mask(starts_A, length, size),
        ).unflatten(1, places_AS.shape)
        for place in range(1, size):
            hidden_NH = hidden[:, :, place].flatten(0, 1)
            q_NV = self.target.logits(hidden_NH)
            if self.head.config.markov_rank:
                q_NV = q_NV + self.head.markov_bias(block_BAS[..., place - 1].flatten())
            p_NV = self.target.next_logits(tokens_BL)[:, starts_A + place - 1].flatten(0, 1)
            trust = self.head.confidence(hidden_NH) if self.head.config.confidence else None
            yield Depth(q_NW=q_NV, p_NV=p_NV, confidence_N=trust)

    def _starts(self, first: int, end: int, step: int) -> Tensor:
        if end <= first:
            raise ConfigError("rows are too short for the block size")
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        return first + torch.randperm(end - first, generator=generator)[: self.blocks_per_row]

    @staticmethod
    def _mask(starts_A: Tensor, length: int, size: int) -> Tensor:
        """[1, 1, A * S, L + A * S]: features before the block's start, then the block itself."""
        start_Q = starts_A.repeat_interleave(size)
        block_Q = torch.arange(len(starts_A), device=starts_A.device).repeat_interleave(size)
        context = torch.arange(length, device=starts_A.device) < start_Q[:, None]
        own = block_Q[:, None] == block_Q
        return torch.cat([context, own], dim=1)[None, None]
