"""Which rows of a model's state store hold the state after which token.

A model with recurrent layers keeps a *state* beside the K/V: what its convolutions and scans
remember of the text. K/V of a rejected draft is ignored; a state that a rejected draft changed is
wrong. So no state is changed in place. A state is kept under the physical slot of the token after
which it holds, and a pass that continues a context of n tokens starts from the state of slot n - 1:

    pass over root and drafts     r d d d          a state after each, in four rows
    two drafts are accepted       r d d            the next pass starts from the second draft's row
    the next pass                       r d d d    writes these slots again: the old rows are free

Commits, rejections and shared prefixes thus need no further code: a slot that a pass may start from
was written by a pass with the same text before it. Rows are a cache. If the wanted one is gone, the
model computes it again from the nearest row before it (`latest`).

*Checkpoints* are the rows of ends of blocks, from which a shared prefix continues. They are kept
until the room is needed. The other rows are kept for a few passes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

ZEROS = 0  # the row of the empty text: never written


class StateRows:
    """Rows 1 to `num_rows` - 1 of a store, by slot. No torch here: the model owns the tensors."""

    def __init__(self, num_rows: int, block_size: int, least_recent: int = 8) -> None:
        """`least_recent`: rows that the last passes may hold besides checkpoints, if not more."""
        self.num_rows = num_rows
        self._block_size = block_size
        self._free = list(range(num_rows - 1, ZEROS, -1))
        self._recent: OrderedDict[int, int] = OrderedDict()  # slot -> row, oldest use first
        self._checkpoints: OrderedDict[int, int] = OrderedDict()
        self._most_recent = least_recent

    def __contains__(self, slot: int) -> bool:
        return slot in self._recent or slot in self._checkpoints

    def __len__(self) -> int:
        return len(self._recent) + len(self._checkpoints)

    def num_missing(self, num_starts: int, num_kept: int) -> int:
        """Rows to add before a pass that starts from and keeps so many."""
        self._most_recent = max(self._most_recent, num_starts + num_kept)
        return max(0, self._most_recent + num_starts + num_kept + 1 - self.num_rows)

    def add(self, num_rows: int) -> None:
        """The store has so many rows more."""
        self._free += range(self.num_rows + num_rows - 1, self.num_rows - 1, -1)
        self.num_rows += num_rows

    def row(self, slot: int) -> int:
        """The row of the state after the token in `slot`, which counts as a use."""
        rows = self._recent if slot in self._recent else self._checkpoints
        rows.move_to_end(slot)
        return rows[slot]

    def latest(self, slots: Sequence[int]) -> int | None:
        """The last index in `slots` with a state; None if none has one."""
        return next((i for i in range(len(slots) - 1, -1, -1) if slots[i] in self), None)

    def forget(self, slots: Iterable[int]) -> None:
        """Other tokens are written to these slots."""
        for slot in slots:
            row = self._recent.pop(slot, None)
            if row is None:
                row = self._checkpoints.pop(slot, None)
            if row is not None:
                self._free.append(row)

    def take(self, slot: int) -> int:
        """A row for the state after the token in `slot`, which has none yet.

        It may be one that was used long ago. `num_missing` was asked before.
        """
        checkpoint = self._ends_block(slot)
        if not checkpoint:
            while len(self._recent) >= self._most_recent:
                self._free.append(self._recent.popitem(last=False)[1])
        if not self._free:
            longest = self._checkpoints or self._recent
            self._free.append(longest.popitem(last=False)[1])
        row = self._free.pop()
        (self._checkpoints if checkpoint else self._recent)[slot] = row
        return row

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """The tokens of slots `source` stand in slots `target` now, and their states with them."""
        rows = [
            self._recent.pop(slot, None) or self._checkpoints.pop(slot, None) for slot in source
        ]
        self.forget(target)
        for slot, row in zip(target, rows, strict=True):
            if row is not None:
                (self._checkpoints if self._ends_block(slot) else self._recent)[slot] = row

    def _ends_block(self, slot: int) -> bool:
        return (slot + 1) % self._block_size == 0
