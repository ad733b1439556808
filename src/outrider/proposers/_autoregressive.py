"""The loop every autoregressive drafter shares: feed the committed text, then draft K tokens.

The last draft is never fed: after a full accept it is committed text like any other.

Shape legend: R chains still growing, D the drafter's vocabulary, V the target's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import (
    Draw,
    IntArray,
    Model,
    Proposal,
    SequenceView,
    StepBatch,
    StepOutput,
    Stream,
)
from outrider.layout import Slice, pack
from outrider.model.capabilities import DraftsChains, DraftsWithStopRules
from outrider.noise import draw_key, mix, sequence_key
from outrider.sampling import RowParams, distribution_of, draw_tokens, true_vocabulary


class Memory(Protocol):
    """The drafting model and its K/V; `DraftMemory` is the usual one."""

    @property
    def model(self) -> Model: ...

    def room(self, view: SequenceView) -> int: ...

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None: ...

    def drafted(self, view: SequenceView, tokens: list[int]) -> None: ...


def target_keys(views: Seq[SequenceView]) -> npt.NDArray[np.uint64]:
    """The key of the target's own noise, for each sequence."""
    return np.array([sequence_key(v.seed, v.sample_index, Stream.TARGET) for v in views], np.uint64)


class Chains:
    """A chain for each view, of at most `lengths` tokens; nothing follows a finishing token."""

    def __init__(self, views: Seq[SequenceView], lengths: Seq[int], num_tokens: int) -> None:
        """`num_tokens`: the size of the target's true vocabulary, over which q is defined."""
        self.tokens: list[list[int]] = [[] for _ in views]
        self.active = [i for i, length in enumerate(lengths) if length > 0]  # still growing
        self._views = views
        self._lengths = lengths
        self._num_tokens = num_tokens
        self._dists: list[list[torch.Tensor]] = [[] for _ in views]

    def draw(self, logits_RV: torch.Tensor) -> None:
        """Adds one token to each active chain, in order; may edit `logits_RV` in place."""
        views, active = self._views, self.active
        logits_RV = true_vocabulary(logits_RV, self._num_tokens)
        keys = []
        for row, i in enumerate(active):
            view, chain = views[i], self.tokens[i]
            if view.edits is not None:
                view.edits.apply(logits_RV[row], view.tokens, chain)
            keys.append(draft_key(view, len(chain), len(chain)))
        rows = RowParams.of([views[i].params for i in active], [1] * len(active))
        tokens = draw_tokens(logits_RV, rows, keys)
        if any(views[i].draw is Draw.SAMPLED for i in active):
            dist_RV = distribution_of(logits_RV, rows)
            for row, i in enumerate(active):
                self._dists[i].append(dist_RV[row])
        self.active = []
        for i, token in zip(active, tokens, strict=True):
            self.tokens[i].append(token)
            if len(self.tokens[i]) < self._lengths[i] and token not in views[i].finish_ids:
                self.active.append(i)

    def proposals(self, source: str) -> list[Proposal]:
        return [
            Proposal(
                chain,
                draw=view.draw,
                q=torch.stack(dist) if dist and view.draw is Draw.SAMPLED else None,
                source=source,
            )
            for view, chain, dist in zip(self._views, self.tokens, self._dists, strict=True)
        ]


def draft_key(view: SequenceView, depth: int, node: int) -> int:
    """The noise of one draw: `depth` tokens after the last committed one, the step's `node`-th.

    Coupled drafts share the target's noise of the position. Sampled drafts must not: the block and
    tree rules use siblings and later nodes of those they accept, so every node needs fresh noise.
    The next step drafts the same positions again, so every step needs fresh noise too.
    """
    start = len(view.tokens)
    if view.draw is Draw.COUPLED:
        return draw_key(view.seed, view.sample_index, start + depth, Stream.TARGET)
    return mix(draw_key(view.seed, view.sample_index, start, Stream.DRAFT) + node)


class AutoregressiveDrafter:
    def __init__(
        self, memory: Memory, num_tokens: int, name: str, exit_layer: int | None = None
    ) -> None:
        """`num_tokens`: the size of the target's true vocabulary, over which q is defined.

        `exit_layer`: draft with the model's first layers only.
        """
        self._memory = memory
        self._model = memory.model
        # Looked up once: a protocol's check is slow.
        self._chains = memory.model if isinstance(memory.model, DraftsChains) else None
        self._ruled = memory.model if isinstance(memory.model, DraftsWithStopRules) else None
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
                drawn_last = len(proposal.levels or proposal.tokens) - 1
                self._memory.drafted(views[i], proposal.tokens[:drawn_last])
        return proposals

    def _draft_chains(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        if self._chains is not None and all(
            view.draw is Draw.COUPLED and view.edits is None for view in views
        ):
            batch, lengths = self._pack(slices), np.array(budgets, np.int32)
            rows = RowParams.of([view.params for view in views], [1] * len(views))
            keys, stop_rules = target_keys(views), [view.stop_rule for view in views]
            if self._ruled is not None and any(stop_rules):
                chains, levels = self._ruled.draft_with_stop_rules(
                    batch, lengths, rows, keys, stop_rules
                )
                return [
                    Proposal(chain, draw=Draw.COUPLED, source=self._name, levels=some)
                    for chain, some in zip(chains, levels, strict=True)
                ]
            proposals = self._draft_at_once(self._chains, batch, lengths, rows, keys)
            if proposals is not None:
                return proposals
        return self._draft_stepwise(views, budgets, slices)

    def _draft_at_once(
        self,
        model: DraftsChains,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[Proposal] | None:
        """Chains from one call of the model; None if it cannot draft these."""
        chains = model.draft_chain(batch, num_tokens_S, rows, key_S)
        if chains is None:
            return None
        return [Proposal(chain, draw=Draw.COUPLED, source=self._name) for chain in chains]

    def _pack(self, slices: list[Slice]) -> StepBatch:
        batch = pack(slices)
        batch.exit_layer = self._exit_layer
        return batch

    def _draft_stepwise(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        chains = Chains(views, budgets, self._num_tokens)
        while chains.active:
            batch = self._pack([slices[i] for i in chains.active])
            output = self._model.forward(batch)
            self._notice(chains.active, output)
            chains.draw(self._dists(output.logits_RV))
            for i in chains.active:
                slices[i].context += len(slices[i].tokens)
                slices[i].tokens = [self._fed(chains.tokens[i][-1])]
        return chains.proposals(self._name)

    def _notice(self, active: Seq[int], output: StepOutput) -> None:
        """Called with the output of every pass over the active chains."""

    def _dists(self, logits_RD: torch.Tensor) -> torch.Tensor:
        """The drafter's logits by the target's ids."""
        return logits_RD

    def _fed(self, token: int) -> int:
        """The drafter's id of a drafted token."""
        return token
