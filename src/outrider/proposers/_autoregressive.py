"""The loop every autoregressive drafter shares: feed the committed text, then draft K tokens.

The last draft is never fed: after a full accept it is committed text like any other.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch

from outrider.contracts import (
    DraftsInOneCall,
    Draw,
    Model,
    Proposal,
    SequenceView,
    StepBatch,
    Stream,
)
from outrider.layout import Slice, pack
from outrider.noise import draw_key, mix, sequence_key
from outrider.sampling import RowParams, draw_tokens, law_of, true_vocabulary


class Memory(Protocol):
    """Whose model drafts and where its K/V goes; see `DraftMemory`, which is the usual one."""

    @property
    def model(self) -> Model: ...

    def room(self, view: SequenceView) -> int: ...

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None: ...

    def drafted(self, view: SequenceView, tokens: list[int]) -> None: ...


class AutoregressiveDrafter:
    def __init__(
        self, memory: Memory, num_tokens: int, name: str, exit_layer: int | None = None
    ) -> None:
        """`num_tokens`: the target's true vocabulary, which q is a law over.

        `exit_layer`: draft with the model's first layers only.
        """
        self._memory = memory
        self._model = memory.model
        self._num_tokens = num_tokens
        self._name = name
        self._exit_layer = exit_layer

    def draft(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        """A chain for each view; empty where the drafter's KV or positions are used up."""
        proposals = [Proposal(source=self._name) for _ in views]
        active: list[int] = []
        lengths: list[int] = []
        slices: list[Slice] = []
        for i, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            length = min(budget, self._memory.room(view))
            slice_ = self._memory.catch_up(view, length - 1) if length > 0 else None
            if slice_ is not None:
                active.append(i)
                lengths.append(length)
                slices.append(slice_)
        if active:
            drawn = self._draft_chains([views[i] for i in active], lengths, slices)
            for i, proposal in zip(active, drawn, strict=True):
                proposals[i] = proposal
                self._memory.drafted(views[i], proposal.tokens[:-1])
        return proposals

    def _draft_chains(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        if isinstance(self._model, DraftsInOneCall) and all(
            view.draw is Draw.COUPLED and view.edits is None and not view.params.filters
            for view in views
        ):
            chains = self._model.draft_chain(
                self._pack(slices),
                np.array(budgets, np.int32),
                np.array([view.params.temperature for view in views], np.float32),
                np.array(
                    [sequence_key(v.seed, v.sample_index, Stream.TARGET) for v in views], np.uint64
                ),
            )
            return [Proposal(chain, draw=Draw.COUPLED, source=self._name) for chain in chains]
        return self._draft_stepwise(views, budgets, slices)

    def _pack(self, slices: list[Slice]) -> StepBatch:
        batch = pack(slices)
        batch.exit_layer = self._exit_layer
        return batch

    def _draft_stepwise(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        chains: list[list[int]] = [[] for _ in views]
        laws: list[list[torch.Tensor]] = [[] for _ in views]
        active = list(range(len(views)))
        while active:
            logits = self._model.forward(self._pack([slices[i] for i in active])).logits_RV
            logits = true_vocabulary(logits, self._num_tokens)
            keys = []
            for row, i in enumerate(active):
                view = views[i]
                if view.edits is not None:
                    view.edits.apply(logits[row], view.tokens, chains[i])
                keys.append(draft_key(view, len(chains[i]), len(chains[i])))
            rows = RowParams.of([views[i].params for i in active], [1] * len(active))
            tokens = draw_tokens(logits, rows, keys)
            if any(views[i].draw is Draw.SAMPLED for i in active):
                law = law_of(logits, rows)
                for row, i in enumerate(active):
                    laws[i].append(law[row])
            still = []
            for i, token in zip(active, tokens, strict=True):
                chains[i].append(token)
                if len(chains[i]) < budgets[i] and token not in views[i].finish_ids:
                    slices[i].context += len(slices[i].tokens)
                    slices[i].tokens = [token]
                    still.append(i)
            active = still
        return [
            Proposal(
                chain,
                draw=view.draw,
                q=torch.stack(law) if view.draw is Draw.SAMPLED else None,
                source=self._name,
            )
            for view, chain, law in zip(views, chains, laws, strict=True)
        ]


def draft_key(view: SequenceView, depth: int, node: int) -> int:
    """The noise of one draw: `depth` tokens after the last committed one, the step's `node`-th.

    Coupled drafts share the target's noise, which belongs to the position. Sampled ones must
    not: the block and tree rules look at drafts beside and behind those they keep, so every node
    and, since the next step drafts the same positions again, every step needs fresh noise.
    """
    start = len(view.tokens)
    if view.draw is Draw.COUPLED:
        return draw_key(view.seed, view.sample_index, start + depth, Stream.TARGET)
    return mix(draw_key(view.seed, view.sample_index, start, Stream.DRAFT) + node)
