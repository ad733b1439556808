"""A draft model and the content of its own KV for each sequence.

Every drafter with a model repeats three things: compute the newly committed tokens, compute some of
its own drafts after them, and after the verdict keep the K/V of those that were committed. Tokens
not computed yet (the last draft, a step of another proposer) are computed the next time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from outrider.contracts import Model, Proposal, SequenceView
from outrider.draft_plans import Chain
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack

CATCH_UP_TOKENS = 512  # most tokens of one catch-up pass
_NOTHING = Slice([], 0, np.empty(0, np.int32), None)


@dataclass(slots=True)
class _State:
    num_fed: int  # committed tokens whose K/V the drafter holds
    drafted: list[int] = field(default_factory=list)  # drafts with K/V after them
    parents: Seq[int] = ()
    is_settled: bool = False  # no draft since the last `settle`


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
        """Feeds the committed text except its last chunk, and reserves room for drafts.

        Returns that chunk, which the caller must feed; it requests the logits of the last token.
        None if the drafter's KV is full: the sequence is then released.
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

    def plan(
        self,
        views: Seq[SequenceView],
        num_tokens: list[int],
        max_steps: int,
        source: str,
        max_found: Seq[int] | None = None,
    ) -> Chain | None:
        """`num_tokens` drafts a step for each view, 0: none; a look-up may draft `max_found`.

        None if a text is too long to catch up in one pass, or if the pool is short.
        """
        slices = []
        max_emitted = []
        for i, (view, num_drafts) in enumerate(zip(views, num_tokens, strict=True)):
            room = self.room(view)
            max_emitted.append(room + 1 if num_drafts else sys.maxsize)
            if num_drafts == 0:
                slices.append(_NOTHING)
                continue
            most = num_drafts if max_found is None else max(num_drafts, max_found[i])
            num_left = view.params.max_tokens - len(view.tokens) + view.num_prompt_tokens
            furthest = min(num_left, room + 1, max_steps * (most + 1))
            slice_ = self._hold(view, num_drafts, furthest)
            if slice_ is None:
                for other in views[:i]:
                    self.kv.hold(other.id, 0)
                return None
            slices.append(slice_)
        return Chain(source, self.model, self.kv, pack(slices), num_tokens, max_emitted)

    def _hold(self, view: SequenceView, num_drafts: int, furthest: int) -> Slice | None:
        """Holds slots for `furthest` more tokens; returns the text to read first."""
        is_new = view.id not in self._states
        num_unread = len(view.tokens) - self._state(view).num_fed
        is_possible = num_unread <= CATCH_UP_TOKENS and num_drafts <= self.room(view)
        if is_possible and self.kv.hold(view.id, len(view.tokens) + furthest):
            return self.catch_up(view, furthest)
        if is_new:
            self.release(view.id)
        return None

    def drafted(
        self,
        view: SequenceView,
        tokens: list[int],
        parents: Seq[int] | None = None,
        num_fed: int | None = None,
    ) -> None:
        """The model was fed the first `num_fed` tokens (None: all), and then these drafts."""
        state = self._states[view.id]
        state.num_fed = len(view.tokens) if num_fed is None else num_fed
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
