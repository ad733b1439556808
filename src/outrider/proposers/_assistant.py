"""Drafts with Gemma 4's assistant, for `proposers.mtp`: `model.gemma_assistant`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outrider.contracts import Draw, Needs, Proposal, ProposerContext, SequenceView
from outrider.model.bundled import find_folder
from outrider.model.gemma_assistant import GemmaAssistant
from outrider.model.head_layers import KeyValue
from outrider.proposers._autoregressive import Chains
from outrider.proposers._feature_heads import FeatureHeadProposer
from outrider.proposers.head_memory import gather
from outrider.sampling import true_vocabulary


class AssistantProposer(FeatureHeadProposer):
    """Drafts chains."""

    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    recommended = None  # its checkpoint says nothing

    def __init__(self, context: ProposerContext, folder: Path, name: str) -> None:
        self.name = name
        spec = context.target.spec
        self._assistant = GemmaAssistant(context.target, find_folder(context.model), folder)
        taps = (*self._assistant.taps, spec.num_layers)
        super().__init__(taps, len(self._assistant.shared))
        self.needs = Needs(taps=taps)
        self._num_tokens = spec.num_tokens

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        read = [self._read_on(view) for view in views]
        chains = Chains(views, budgets, self._num_tokens)
        tokens = [view.tokens[-1] for view in views]
        states_RH = self._assistant.first_states(torch.stack([state_H for _, state_H in read]))
        while True:
            rows = chains.active
            pasts = [read[i][0] for i in rows]

            def mix(
                shared: int, reach: int | None, queries: Tensor, pasts: list[list[KeyValue]] = pasts
            ) -> Tensor:
                return _attend(queries, [past[shared] for past in pasts], reach)

            places = [len(views[i].tokens) - 1 for i in rows]
            states_RH, logits_RV = self._assistant.run(tokens, states_RH, places, mix)
            chains.draw(true_vocabulary(logits_RV, self._num_tokens))
            if not chains.active:
                return chains.proposals(self.name)
            states_RH = states_RH[[rows.index(i) for i in chains.active]]
            tokens = [chains.tokens[i][-1] for i in chains.active]

    def _read_on(self, view: SequenceView) -> tuple[list[KeyValue], Tensor]:
        """All keys and values of a text but its last token, and the target's last state."""
        memory = self._memories[view.id]
        taps_nTH, places = memory.take()
        positions = torch.arange(places.start, places.stop, device=taps_nTH.device)
        past = []
        for i, layer in enumerate(self._assistant.shared):
            states_nH = taps_nTH[:, i].to(layer.keys)
            past.append(memory.layers[i].append(layer.keys_values(states_nH, positions)))
        return past, taps_nTH[-1, -1]


def _attend(queries_1NRD: Tensor, pasts: list[KeyValue], reach: int | None) -> Tensor:
    """Each row over its own past; `reach`: over the last ones of it."""
    mixed = []
    for row, (keys, values) in enumerate(pasts):
        first = 0 if reach is None else max(0, keys.shape[2] - reach)
        past = keys[:, :, first:], values[:, :, first:]
        mixed.append(gather(queries_1NRD[0, :, row : row + 1], past))
    return torch.cat(mixed, dim=1)[None]
