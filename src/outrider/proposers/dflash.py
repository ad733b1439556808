"""DFlash: a whole block of tokens denoised in one pass over the target's features.

The block is the last committed token followed by masks. Its places see each other and, in every
layer, keys and values made from the target's hidden states of the text before. Only one cheap part
runs token by token: a low-rank bias by the token drawn just before (DSpark's Markov bias).

Shapes: B sequences, S places of a block, n tokens, T taps, H hidden, V vocabulary.
"""

from __future__ import annotations

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
from outrider.proposers._autoregressive import Chains
from outrider.proposers._feature_heads import FeatureHeadProposer, NativeRows
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


class DFlashProposer(FeatureHeadProposer):
    name = "dflash"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(
        self,
        loaded: Loaded[DFlashHead],
        config: DFlashConfig | None = None,
        native: NativeRows | None = None,
    ) -> None:
        super().__init__(loaded.head.taps, loaded.head.config.num_hidden_layers, native)
        self.config = config or DFlashConfig()
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._head = loaded.head

    @classmethod
    def build(cls, context: ProposerContext) -> DFlashProposer:
        config = read_options(DFlashConfig, cls.name, context.options)
        loaded = load_fitting_head(DFlashHead, context, config.head)
        if config.floor:  # only the torch module predicts its acceptance
            loaded.weights(config.weights)
            return cls(loaded, config)
        return cls(loaded, config, native_rows(loaded, context, config.weights))

    @property
    def _num_scribbled(self) -> int:
        return self._head.config.block_size

    def _call(
        self, batch: StepBatch, sizes_S: IntArray, rows: RowParams, key_S: npt.NDArray[np.uint64]
    ) -> list[tuple[list[int], list[int] | None]]:
        assert self._native is not None
        sizes_S = np.minimum(sizes_S, self._head.config.block_size - 1).astype(np.int32)
        chains = self._native.head.draft_chain(batch, sizes_S, rows, key_S)
        return [(chain, None) for chain in chains]

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        for view in views:
            self._read_on(view)
        hidden_BSH = self._denoise(views)
        most = self._head.config.block_size - 1
        lengths = [min(budget, most) for budget in budgets]
        if self.config.floor and self._head.config.confidence:
            lengths = self._cut(hidden_BSH, lengths)
        return self._draw(views, lengths, hidden_BSH)

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
        embeds_1XH = self._loaded.borrowed.embed(tokens)[None]
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
                mixed.append(gather(queries_1NXD[0, :, block], past))
            return torch.cat(mixed, dim=1)[None]

        return mix

    def _cut(self, hidden_BSH: Tensor, lengths: list[int]) -> list[int]:
        """Shortens drafts by the predicted acceptance. The prediction depends on no token that is
        drawn afterwards, so that ratio rules stay exact."""
        chances_BS = self._head.confidence(hidden_BSH)[:, 1:].cumprod(dim=1)
        trusted = (chances_BS >= self.config.floor).sum(dim=1).tolist()
        return [min(n, max(1, trust)) for n, trust in zip(lengths, trusted, strict=True)]

    def _draw(
        self, views: list[SequenceView], lengths: list[int], hidden_BSH: Tensor
    ) -> list[Proposal]:
        logits_BSV = self._loaded.borrowed.logits(hidden_BSH[:, 1 : 1 + max(lengths)]).float()
        chains = Chains(views, lengths, self._loaded.num_tokens)
        for place in range(max(lengths)):
            if not chains.active:
                break
            logits_RV = logits_BSV[chains.active, place]
            if self._head.config.markov_rank:
                before = [(chains.tokens[i] or views[i].tokens)[-1] for i in chains.active]
                logits_RV += self._head.markov_bias(torch.tensor(before, device=logits_RV.device))
            chains.draw(logits_RV)
        return chains.proposals(self.name)
