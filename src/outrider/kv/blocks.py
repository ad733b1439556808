"""Physical blocks: how many sequences hold each one, and which to allocate next.

A block is in exactly one of three states:

    free     no table contains it, and its content is meaningless
    held     `refs[block] > 0` block tables contain it
    cached   no table contains it, but the prefix index does: sharing may revive it, and
             allocation may evict it once no free block is left

Attention over consecutive physical blocks is a view, over scattered ones a gather that costs
1.2-3 times as much. So a growing sequence gets the physical neighbour of its last block if
possible, and new sequences start far apart to leave each other room to grow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

_NUM_STARTS = 64


class BlockPool:
    """A fixed number of reference-counted blocks. Every call is O(1) in the number of blocks.

    `on_evict(block)` is called just before a cached block is handed out for other content.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        # Ordered so that popitem(), the last resort of `allocate`, hands out low blocks first.
        self._free = dict.fromkeys(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._clock = 0  # counts the blocks that ever became cached
        self._cached_at = [0] * num_blocks
        self._starts = _spread(num_blocks)

    @property
    def num_available(self) -> int:
        """How many allocations would succeed now: free and cached blocks."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks whose content is meaningless."""
        return len(self._free)

    @property
    def starts(self) -> list[int]:
        """The first blocks of new sequences while all blocks are free, in order."""
        return list(self._starts)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def allocate(self, after: int = -1) -> int:
        """A block held once, if possible the one that follows `after`; may evict a cached one.

        The caller has checked that `num_available > 0`.
        """
        block = after + 1
        if block in self._free:
            del self._free[block]
        elif self._free:
            block = self._roomy()
        else:
            block = self._evict(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a block that is held or cached."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """One holder less; the last one leaves the block cached (`keep`) or free."""
        assert self._refs[block] > 0, f"block {block} released twice"
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if keep:
            self._clock += 1
            self._cached_at[block] = self._clock
            self._cached[block] = None
        else:
            self._free[block] = None

    def snapshot(self) -> object:
        """The state of every block, as values to compare. For tests."""
        return list(self._free), list(self._cached), list(self._refs)

    def check(self) -> None:
        """Asserts that every block is in exactly one state. For tests: O(num_blocks)."""
        held = {block for block, count in enumerate(self._refs) if count}
        assert all(count >= 0 for count in self._refs)
        assert held.isdisjoint(self._free)
        assert held.isdisjoint(self._cached)
        assert self._free.keys().isdisjoint(self._cached)
        assert len(held) + len(self._free) + len(self._cached) == self.num_blocks

    def _roomy(self) -> int:
        """Takes a free block, preferably one with a free neighbour to grow into."""
        for block in self._starts:
            if block in self._free and block + 1 in self._free:
                del self._free[block]
                return block
        return self._free.popitem()[0]

    def _evict(self, neighbour: int) -> int:
        """Takes the neighbour if it has been cached for long, else the least recently used."""
        oldest = next(iter(self._cached))
        block = oldest
        if neighbour in self._cached:
            # "Long" is the older half by age: contiguity must not cost a hot prefix its blocks.
            middle = (self._cached_at[oldest] + self._clock) // 2
            if self._cached_at[neighbour] <= middle:
                block = neighbour
        del self._cached[block]
        self._on_evict(block)
        return block


def _spread(num_blocks: int) -> list[int]:
    """Starting points 0, 1/2, 1/4, 3/4, 1/8, ... of the pool: each far from those before it.

    (The van der Corput sequence: the bits of i, mirrored at the binary point.)
    """
    points = []
    for i in range(_NUM_STARTS):
        mirrored = int(f"{i:06b}"[::-1], 2)
        points.append(mirrored * num_blocks // _NUM_STARTS)
    return list(dict.fromkeys(points))
