"""P-EAGLE: an EAGLE-3 head that gives all drafts in one pass.

Rows of a mask token with a learned feature follow the text's; the last row of the text and they
guess one draft each. Nothing is fed back, so a draft does not depend on the drafts before it.

Shapes: B sequences, K rows that guess, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.contracts import (
    Draw,
    Needs,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.model.heads import Eagle3Head, FastHead
from outrider.model.heads_native import NativePEagle
from outrider.proposers._autoregressive import Chains
from outrider.proposers._eagle_rows import EagleRows
from outrider.proposers._feature_heads import NativeHeadProposer, NativeRows
from outrider.proposers._heads import Loaded, load_fitting_head, native_rows, reader
from outrider.proposers.options import read_options
from outrider.sampling import true_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig:
    """`head` is the folder of the head, where it is not the draft model."""

    head: str | None = None
    weights: str | None = None


class PEagleProposer(NativeHeadProposer):
    name = "p-eagle"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(self, loaded: Loaded[Eagle3Head], native: NativeRows[FastHead] | None) -> None:
        super().__init__(loaded.head.taps, loaded.head.config.num_hidden_layers, native)
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._rows = EagleRows(loaded, self._memories)

    @classmethod
    def build(cls, context: ProposerContext) -> PEagleProposer:
        config = read_options(PEagleConfig, cls.name, context.options)
        loaded = load_fitting_head(Eagle3Head, context, config.head, cls.name)
        return cls(loaded, native_rows(loaded, context, config.weights, reader(loaded)))

    @property
    def recommended(self) -> int | None:
        """See `contracts.Recommends`."""
        return self._loaded.recommended

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        most = max(budgets)
        drafts, logits_XV = self._rows.read_on(views, most - 1)
        for draft in drafts:
            draft.close()
        return self._draw(views, budgets, logits_XV.view(len(views), most, -1))

    def _draft_natively(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        assert self._native is not None
        head, most = self._native.head, max(budgets)
        assert isinstance(head, NativePEagle)
        proposals = [Proposal(source=self.name) for _ in views]
        members, batch = self._native.read_on(views, most - 1)
        if members:
            logits_XV = head.guess(batch, most - 1).flatten(0, 1)
            logits_XV = true_vocabulary(logits_XV, self._loaded.num_tokens)
            logits_BKV = logits_XV.view(len(members), most, -1)
            some, sizes = [views[i] for i in members], [budgets[i] for i in members]
            for i, drawn in zip(members, self._draw(some, sizes, logits_BKV), strict=True):
                proposals[i] = drawn
        return proposals

    def _draw(
        self, views: list[SequenceView], budgets: list[int], logits_BKV: Tensor
    ) -> list[Proposal]:
        chains = Chains(views, budgets, self._loaded.num_tokens)
        for place in range(logits_BKV.shape[1]):
            if not chains.active:
                break
            chains.draw(logits_BKV[chains.active, place])
        return chains.proposals(self.name)
