"""The loop every autoregressive drafter shares: catch up on the committed text, then draft K.

The drafter keeps its own KV. It feeds what the target committed since it last looked (one token
after a rejection, two after a full accept: its own last draft was never fed) and then its own
tokens. What the target refused is rolled back as soon as the verdict is known.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.contracts import DraftsInOneCall, Draw, Model, Proposal, SequenceView, Stream
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack
from outrider.noise import draw_key, mix, sequence_key
from outrider.sampling import RowParams, draw_tokens, law_of, true_vocabulary

CATCH_UP_TOKENS = 512  # most tokens of one catch-up pass


@dataclass(slots=True)
class _State:
    num_fed: int  # tokens of the sequence whose K/V the drafter holds
    start: int = 0  # where the last draft began
    drafted: list[int] = field(default_factory=list)  # drafted tokens that were fed


class AutoregressiveDrafter:
    def __init__(self, model: Model, kv: KVCache, num_tokens: int, name: str) -> None:
        """`num_tokens`: the target's true vocabulary, which q is a law over."""
        self._model = model
        self._kv = kv
        self._num_tokens = num_tokens
        self._name = name
        self._states: dict[int, _State] = {}

    def draft(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self._name) for _ in views]
        active: list[int] = []
        for i, (view, budget) in enumerate(zip(views, budgets, strict=True)):
            last = min(len(view.tokens) + budget - 1, self._model.spec.max_positions)
            if last >= len(view.tokens) and self._catch_up(view, last):
                active.append(i)
        if not active:
            return proposals
        room = [
            min(budgets[i], self._model.spec.max_positions - len(views[i].tokens) + 1)
            for i in active
        ]
        drawn = self._draft_chains([views[i] for i in active], room)
        for i, proposal in zip(active, drawn, strict=True):
            proposals[i] = proposal
            state = self._states[views[i].id]
            state.start = len(views[i].tokens)
            state.drafted = proposal.tokens[:-1]
            state.num_fed = state.start + len(state.drafted)
        return proposals

    def rollback(self, view: SequenceView) -> None:
        """Drop the K/V of drafted tokens that were not committed."""
        state = self._states.get(view.id)
        if state is None:
            return
        agreed = 0
        for drafted, committed in zip(state.drafted, view.tokens[state.start :], strict=False):
            if drafted != committed:
                break
            agreed += 1
        state.num_fed = min(state.num_fed, state.start + agreed)
        state.start, state.drafted = state.num_fed, []
        self._kv.commit(view.id, view.tokens, state.num_fed)

    def release(self, sequence_id: int) -> None:
        if self._states.pop(sequence_id, None) is not None:
            self._kv.free(sequence_id)

    def _catch_up(self, view: SequenceView, num_slots: int) -> bool:
        """Feed all committed tokens but the last chunk; False when the drafter's KV is full."""
        state = self._states.get(view.id)
        if state is None:
            state = _State(self._kv.match(view.id, view.tokens, view.salt))
            self._states[view.id] = state
        if not self._kv.reserve(view.id, num_slots):
            self.release(view.id)
            return False
        while len(view.tokens) - state.num_fed > CATCH_UP_TOKENS:
            stop = state.num_fed + CATCH_UP_TOKENS
            chunk = Slice(
                view.tokens[state.num_fed : stop], state.num_fed, self._kv.table(view.id), None
            )
            self._model.forward(pack([chunk]))
            state.num_fed = stop
        return True

    def _draft_chains(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        slices = []
        for view in views:
            fed = self._states[view.id].num_fed
            slices.append(Slice(view.tokens[fed:], fed, self._kv.table(view.id), Proposal()))
        if isinstance(self._model, DraftsInOneCall) and all(
            view.draw is Draw.COUPLED and view.edits is None and not view.params.filters
            for view in views
        ):
            chains = self._model.draft_chain(
                pack(slices),
                np.array(budgets, np.int32),
                np.array([view.params.temperature for view in views], np.float32),
                np.array(
                    [sequence_key(v.seed, v.sample_index, Stream.TARGET) for v in views], np.uint64
                ),
            )
            return [Proposal(chain, draw=Draw.COUPLED, source=self._name) for chain in chains]
        return self._draft_stepwise(views, budgets, slices)

    def _draft_stepwise(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        chains: list[list[int]] = [[] for _ in views]
        laws: list[list[torch.Tensor]] = [[] for _ in views]
        active = list(range(len(views)))
        while active:
            logits = self._model.forward(pack([slices[i] for i in active])).logits_RV
            logits = true_vocabulary(logits, self._num_tokens)
            keys = []
            for row, i in enumerate(active):
                view = views[i]
                if view.edits is not None:
                    view.edits.apply(logits[row], view.tokens, chains[i])
                keys.append(_draw_key(view, len(chains[i])))
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


def _draw_key(view: SequenceView, depth: int) -> int:
    """The noise of the draft `depth` tokens after the last committed one.

    Coupled drafts share the target's noise, which belongs to the position. Sampled ones must
    not: the block and tree rules look at drafts behind the last token they keep, so the next
    step, which drafts the same positions again, needs fresh noise.
    """
    start = len(view.tokens)
    if view.draw is Draw.COUPLED:
        return draw_key(view.seed, view.sample_index, start + depth, Stream.TARGET)
    return mix(draw_key(view.seed, view.sample_index, start, Stream.DRAFT) + depth)
