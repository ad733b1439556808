"""DFlash: a whole block of tokens denoised in one pass over the target's features.

The block is the last committed token followed by masks. Its places see each other and, in every
layer, keys and values made from the target's hidden states of the text before. Only one cheap part
runs token by token: a low-rank bias by the token drawn just before (DSpark's Markov bias).

Shapes: B sequences, S places of a block, n tokens, T taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.contracts import (
    Draw,
    IntArray,
    Needs,
    Proposal,
    ProposerContext,
    SequenceView,
    StepBatch,
)
from outrider.errors import ConfigError
from outrider.model.dflash_head import DFlashHead, Mix
from outrider.model.head_layers import KeyValue
from outrider.model.heads import FastHead
from outrider.proposers._autoregressive import Chains
from outrider.proposers._feature_heads import FastHeadProposer, NativeRows
from outrider.proposers._heads import Loaded, load_fitting_head, native_rows
from outrider.proposers.head_memory import HeadMemory, gather
from outrider.proposers.options import read_options
from outrider.sampling import RowParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    """A draft ends before the first place whose predicted chance to be reached and accepted is
    below `floor`. `head` is the folder of the head, if it is not the draft model."""

    floor: float = 0.0
    head: str | None = None
    weights: str | None = None  # of the head; None: int8 where no torch module runs it

    def __post_init__(self) -> None:
        if not 0 <= self.floor < 1:
            raise ConfigError(f"dflash needs 0 <= floor < 1, not {self.floor}")


class DFlashProposer(FastHeadProposer):
    name = "dflash"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(
        self,
        loaded: Loaded[DFlashHead],
        config: DFlashConfig | None = None,
        native: NativeRows[FastHead] | None = None,
    ) -> None:
        super().__init__(loaded.head.taps, loaded.head.config.num_hidden_layers, native)
        self.config = config or DFlashConfig()
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._head = loaded.head
        self._ids_W = None if loaded.head.d2t is None else loaded.head.target_ids

    @classmethod
    def build(cls, context: ProposerContext) -> DFlashProposer:
        config = read_options(DFlashConfig, cls.name, context.options)
        loaded = load_fitting_head(DFlashHead, context, config.head)
        if config.floor:  # only the torch module predicts its acceptance
            loaded.weights(config.weights)
            return cls(loaded, config)
        return cls(loaded, config, native_rows(loaded, context, config.weights))

    @property
    def recommended(self) -> int | None:
        """See `contracts.Recommends`."""
        return self._loaded.recommended

    @property
    def _num_scribbled(self) -> int:
        return self._head.config.block_size

    def _call(
        self, batch: StepBatch, sizes_S: IntArray, rows: RowParams, key_S: npt.NDArray[np.uint64]
    ) -> list[tuple[list[int], list[int] | None]]:
        assert self._native is not None
        sizes_S = np.minimum(sizes_S, self._head.config.num_drafts).astype(np.int32)
        chains = self._native.head.draft_chain(batch, sizes_S, rows, key_S)
        return [(chain, None) for chain in chains]

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        for view in views:
            self._read_on(view)
        hidden_BSH = self._denoise(views)
        lengths = [min(budget, self._head.config.num_drafts) for budget in budgets]
        return self._draw(views, lengths, hidden_BSH[:, self._head.config.first_place :])

    def _read_on(self, view: SequenceView) -> None:
        """Turns the features of tokens committed since the last draft into keys and values."""
        memory = self._memories[view.id]
        taps_nTH, places = memory.take()
        features_1nH = self._head.fuse(taps_nTH[None].to(self._head.fc.weight.dtype))
        positions_1n = torch.arange(places.start, places.stop, device=taps_nTH.device)[None]
        context = self._head.context(features_1nH, positions_1n)
        for layer, own in zip(memory.layers, context, strict=True):
            layer.append(own)

    def _denoise(self, views: list[SequenceView]) -> Tensor:
        """One pass over all blocks, packed one after the other: [B, S, H]."""
        size = self._head.config.block_size
        masks = [self._head.config.mask_token_id] * (size - 1)
        tokens: list[int] = []
        places: list[int] = []
        for view in views:
            tokens += [view.tokens[-1], *masks]
            places += range(len(view.tokens) - 1, len(view.tokens) - 1 + size)
        embeds_1XH = self._loaded.embed(tokens)[None]
        if self._head.config.mask_embedding:
            embeds_1XH.view(len(views), size, -1)[:, 1:] = self._head.mask_embedding
        positions_1X = torch.tensor(places, device=embeds_1XH.device)[None]
        memories = [self._memories[view.id] for view in views]
        mixes = [self._mix(memories, layer) for layer in range(len(self._head.layers))]
        hidden_1XH = self._head.denoise(embeds_1XH, positions_1X, mixes)
        return hidden_1XH.view(len(views), size, -1)

    def _mix(self, memories: list[HeadMemory], layer: int) -> Mix:
        size = self._head.config.block_size

        def mix(queries_1NXD: Tensor, own: KeyValue) -> Tensor:
            mixed = []
            for i, memory in enumerate(memories):
                block = slice(i * size, (i + 1) * size)
                past = memory.layers[layer].glance((own[0][:, :, block], own[1][:, :, block]))
                mask = self._mask(layer, past[0].shape[2], queries_1NXD)
                past, mask = self._head.with_sinks(layer, past, mask, size)
                mixed.append(gather(queries_1NXD[0, :, block], past, mask))
            return torch.cat(mixed, dim=1)[None]

        return mix

    def _mask(self, layer: int, end: int, like: Tensor) -> Tensor | None:
        """What the places of a block that ends at row `end` may not see; None: they see all."""
        config = self._head.config
        window = config.windows[layer] if config.windows else None
        causal = bool(config.causal) and config.causal[layer]
        if not causal and (window is None or end <= window):
            return None
        rows, columns = torch.arange(end - config.block_size, end)[:, None], torch.arange(end)
        seen = columns <= rows if causal else torch.ones(len(rows), end, dtype=torch.bool)
        if window is not None:
            seen &= (columns - rows).abs() < window
        return torch.zeros(len(rows), end).masked_fill_(~seen, -math.inf).to(like)

    def _draw(
        self, views: list[SequenceView], lengths: list[int], hidden_BSH: Tensor
    ) -> list[Proposal]:
        """Draws place by place; `hidden_BSH` starts with the place of the first draft."""
        config, head = self._head.config, self._head
        logits_BSW = self._loaded.output(hidden_BSH[:, : max(lengths)])
        chains = Chains(views, lengths, self._loaded.num_tokens)
        state_BM = hidden_BSH.new_zeros(len(views), config.markov_rank)
        doubts = bool(self.config.floor) and config.confidence
        chances_B = hidden_BSH.new_ones(len(views))
        for place in range(max(lengths)):
            if doubts and chains.active:
                self._stop(chains, views, hidden_BSH[:, place], chances_B, place)
            if not chains.active:
                break
            rows = chains.active
            logits_RW = logits_BSW[rows, place]
            if config.markov_rank:
                previous_R = self._previous(chains, views, rows)
                bias_RW, state_BM[rows] = head.markov_step(
                    hidden_BSH[rows, place], previous_R, state_BM[rows]
                )
                logits_RW += bias_RW
            chains.draw(self._loaded.spread(logits_RW, self._ids_W))
        return chains.proposals(self.name)

    def _stop(
        self,
        chains: Chains,
        views: list[SequenceView],
        hidden_BH: Tensor,
        chances_B: Tensor,
        place: int,
    ) -> None:
        """Ends the chains whose chance to be accepted here is too small; every chain has a token.

        It looks at no token that is drawn later on, so that ratio rules stay exact.
        """
        rows = chains.active
        previous_R = self._previous(chains, views, rows)
        chances_B[rows] *= self._head.confidence(hidden_BH[rows], previous_R)
        if place:
            chains.active = [i for i in rows if chances_B[i] >= self.config.floor]

    def _previous(self, chains: Chains, views: list[SequenceView], rows: list[int]) -> Tensor:
        """The token before the one to draw, of each row."""
        before = [(chains.tokens[i] or views[i].tokens)[-1] for i in rows]
        return torch.tensor(before, device=self._head.norm.weight.device)
