"""A draft model and what its own KV holds of each sequence.

Every drafter with a model works in the same rhythm: feed what the target committed since it last
looked, feed some of its own drafts on top, and when the verdict is known keep the K/V of those
that were committed. What was not fed (a last draft, a step that somebody else drafted) is simply
committed text that is fed next time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from outrider.contracts import AheadBatch, Model, Proposal, SequenceView
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack

CATCH_UP_TOKENS = 512  # most tokens of one catch-up pass
_NOTHING = Slice([], 0, np.empty(0, np.int32), None)


@dataclass(slots=True)
class _State:
    num_fed: int  # committed tokens whose K/V the drafter holds
    drafted: list[int] = field(default_factory=list)  # drafts whose K/V lies behind them
    parents: Seq[int] = ()
    is_settled: bool = False  # it was not asked to draft since


class DraftMemory:
    def __init__(self, model: Model, kv: KVCache) -> None:
        self.model = model
        self.kv = kv
        self._states: dict[int, _State] = {}

    def room(self, view: SequenceView) -> int:
        """How many tokens deep a draft may be before the model's positions run out."""
        return self.model.spec.max_positions - len(view.tokens) + 1

    def _state(self, view: SequenceView) -> _State:
        state = self._states.get(view.id)
        if state is None:
            state = _State(self.kv.match(view.id, view.tokens, view.salt))
            self._states[view.id] = state
        return state

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None:
        """Feeds the committed text but for its last chunk, and reserves room for drafts.

        Returns that chunk, which the caller must feed: it asks for the logits of the last token.
        None when the drafter's KV is full: the sequence is forgotten then.
        """
        tokens = view.tokens
        state = self._state(view)
        state.is_settled = False
        if not self.kv.reserve(view.id, len(tokens) + num_drafts):
            self.release(view.id)
            return None
        table = self.kv.table(view.id)
        while len(tokens) - state.num_fed > CATCH_UP_TOKENS:
            stop = state.num_fed + CATCH_UP_TOKENS
            self.model.forward(
                pack([Slice(tokens[state.num_fed : stop], state.num_fed, table, None)])
            )
            state.num_fed = stop
        return Slice(tokens[state.num_fed :], state.num_fed, table, Proposal())

    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        """contracts.DraftsAhead."""
        slices = []
        lookups = batch.lookups or [None] * len(views)
        for i, (view, num_drafts, lookup) in enumerate(
            zip(views, batch.num_drafts_S, lookups, strict=True)
        ):
            if num_drafts == 0:
                slices.append(_NOTHING)
                continue
            room = self.room(view)
            batch.num_left_S[i] = min(batch.num_left_S[i], room + 1)
            most = num_drafts if lookup is None else max(num_drafts, lookup.num_tokens)
            furthest = min(batch.num_left_S[i], most_steps * (most + 1))
            is_new = view.id not in self._states
            state = self._state(view)
            # Long texts are read in a step of its own, and a full pool costs no more than speed.
            if (
                room < num_drafts
                or len(view.tokens) - state.num_fed > CATCH_UP_TOKENS
                or not self.kv.reserve(view.id, len(view.tokens) + furthest)
            ):
                if is_new:
                    self.release(view.id)
                return False
            slice_ = self.catch_up(view, furthest)
            if slice_ is None:
                return False
            self.kv.hold(view.id, len(view.tokens) + furthest)
            slices.append(slice_)
        batch.drafter = self.model
        batch.catch_up = pack(slices)
        return True

    def end_ahead(self, view: SequenceView) -> None:
        self.kv.hold(view.id, 0)

    def drafted(
        self, view: SequenceView, tokens: list[int], parents: Seq[int] | None = None
    ) -> None:
        """Says that all committed tokens were fed, and then these drafts, in this order."""
        state = self._states[view.id]
        state.num_fed = len(view.tokens)
        state.drafted, state.is_settled = tokens, False
        state.parents = range(-1, len(tokens) - 1) if parents is None else parents

    def settle(self, view: SequenceView) -> None:
        """Keeps the K/V of the drafts that were committed and drops the rest."""
        state = self._states.get(view.id)
        if state is None or state.is_settled:
            return
        path: list[int] = []
        # The last committed token is always fed again: the next draft starts from its logits.
        stop = len(view.tokens) - 1
        start = min(state.num_fed, stop)
        last, end = -1, start
        for node, (token, parent) in enumerate(zip(state.drafted, state.parents, strict=True)):
            if parent == last and end < stop and token == view.tokens[end]:
                path.append(node)
                last, end = node, end + 1
        source, target = self.kv.compact(view.id, start, path)
        if len(source):
            self.model.copy_slots(source, target)
        state.num_fed = end
        state.drafted, state.parents, state.is_settled = [], (), True
        self.kv.commit(view.id, view.tokens, end)

    def release(self, sequence_id: int) -> None:
        if self._states.pop(sequence_id, None) is not None:
            self.kv.free(sequence_id)
