"""The MLP speculator (Wertheimer et al. 2024): a recurrent net on the target's last state.

It starts from the state of the last computed token and reads the tokens that follow one by one.

Shapes: R chains still growing, H hidden, I inner, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.model.heads import MlpHead
from outrider.model.heads_native import HEAD_WEIGHTS, NativeMlp
from outrider.model.native_model import NativeModel
from outrider.proposers._autoregressive import Chains
from outrider.proposers._heads import Loaded, last_states, load_fitting_head
from outrider.proposers._last_state import LastStates
from outrider.proposers.options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpConfig:
    """`head` is the folder of the speculator, where it is not the draft model."""

    head: str | None = None
    weights: str | None = None  # of its output heads; None: int8 where native code runs them


class MlpProposer:
    name = "mlp"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(self, loaded: Loaded[MlpHead], native: NativeMlp | None = None) -> None:
        self._native = native
        self.needs = Needs(taps=(loaded.num_layers,))
        self._loaded = loaded
        self._head = loaded.head
        self._states = LastStates(loaded.num_layers)

    @classmethod
    def build(cls, context: ProposerContext) -> MlpProposer:
        config = read_options(MlpConfig, cls.name, context.options)
        loaded = load_fitting_head(MlpHead, context, config.head)
        if not isinstance(context.target, NativeModel):
            loaded.weights(config.weights)
            return cls(loaded)
        weights = loaded.weights(config.weights, *HEAD_WEIGHTS)
        return cls(loaded, NativeMlp(loaded.head, context.target.spec, weights))

    @property
    def recommended(self) -> int | None:
        """See `contracts.Recommends`."""
        return self._loaded.recommended

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        ready = [i for i, view in enumerate(views) if self._states.knows(view)]
        if ready:
            drafts = self._draft([views[i] for i in ready], [budgets[i] for i in ready])
            for i, proposal in zip(ready, drafts, strict=True):
                proposals[i] = proposal
        return proposals

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        lengths = [min(budget, self._head.config.n_predict) for budget in budgets]
        chains = Chains(views, lengths, self._loaded.num_tokens)
        state_RI = self._head.start(last_states(self._loaded.borrowed, self._states.of(views)))
        before = [view.tokens[-1] for view in views]
        for step in range(max(lengths)):
            tokens_R = torch.tensor(before, device=state_RI.device)
            state_RI = self._head.mix(state_RI, tokens_R, step)
            drawn = chains.active
            chains.draw(self._logits(state_RI, step))
            if not chains.active:
                break
            state_RI = state_RI[[drawn.index(i) for i in chains.active]]
            before = [chains.tokens[i][-1] for i in chains.active]
        return chains.proposals(self.name)

    def _logits(self, state_RI: torch.Tensor, step: int) -> torch.Tensor:
        if self._native is not None:
            return self._native.logits(state_RI, step)
        return self._head.logits(state_RI, step).float()

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        self._states.see(views, seen)

    def release(self, sequence_id: int) -> None:
        self._states.release(sequence_id)
