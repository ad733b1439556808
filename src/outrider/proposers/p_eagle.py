"""P-EAGLE: an EAGLE-3 head that gives all drafts in one pass.

Rows of a mask token with a learned feature follow the text's; the last row of the text and they
guess one draft each. Nothing is fed back, so a draft does not depend on the drafts before it.

Shapes: B sequences, K rows that guess, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.contracts import Draw, Needs, Proposal, ProposerContext, SequenceView
from outrider.model.heads import Eagle3Head
from outrider.proposers._autoregressive import Chains
from outrider.proposers._eagle_rows import EagleRows
from outrider.proposers._feature_heads import FeatureHeadProposer
from outrider.proposers._heads import Loaded, load_fitting_head
from outrider.proposers.options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig:
    """`head` is the folder of the head, where it is not the draft model."""

    head: str | None = None
    weights: str | None = None


class PEagleProposer(FeatureHeadProposer):
    name = "p-eagle"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(self, loaded: Loaded[Eagle3Head]) -> None:
        super().__init__(loaded.head.taps, loaded.head.config.num_hidden_layers)
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._rows = EagleRows(loaded, self._memories)

    @classmethod
    def build(cls, context: ProposerContext) -> PEagleProposer:
        config = read_options(PEagleConfig, cls.name, context.options)
        loaded = load_fitting_head(Eagle3Head, context, config.head, cls.name)
        loaded.weights(config.weights)
        return cls(loaded)

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        most = max(budgets)
        drafts, logits_XV = self._rows.read_on(views, most - 1)
        for draft in drafts:
            draft.close()
        logits_BKV = logits_XV.view(len(views), most, -1)
        chains = Chains(views, budgets, self._loaded.num_tokens)
        for place in range(most):
            if not chains.active:
                break
            chains.draw(logits_BKV[chains.active, place])
        return chains.proposals(self.name)
