"""Finished outputs that later requests may draft from: per tenant, bounded, newest text kept.

Each tenant has two indexes. New outputs go to the younger; when it holds half of the room, it
becomes the older, and the older before it is dropped as a whole. That is a least-recently-used
order without further bookkeeping: text that was drafted from an old output and accepted is part of
the new output too, so the dropped index contains only text that was not used since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.proposers.suffix_index import SuffixIndex


class SharedOutputs:
    """At most `capacity` tokens of all tenants together; 0 keeps nothing."""

    def __init__(self, capacity: int, make_index: Callable[[], SuffixIndex]) -> None:
        self._half = capacity // 2
        self._make_index = make_index
        # Newer first, for each salt; the tenant that finished something last comes last.
        self._indexes: OrderedDict[str, list[SuffixIndex]] = OrderedDict()

    def of(self, salt: str) -> Seq[SuffixIndex]:
        """The indexes of this tenant, without outputs of other tenants."""
        return self._indexes.get(salt, ())

    def add(self, salt: str, output: Seq[int]) -> None:
        output = output[max(0, len(output) - self._half) :]
        if not output:
            return
        indexes = self._indexes.setdefault(salt, [])
        self._indexes.move_to_end(salt)
        if not indexes or indexes[0].num_tokens + len(output) > self._half:
            indexes[:] = [self._make_index(), *indexes[:1]]
        indexes[0].begin()
        indexes[0].extend(output)
        while self.num_tokens > 2 * self._half:
            self._indexes.popitem(last=False)

    @property
    def num_tokens(self) -> int:
        return sum(i.num_tokens for indexes in self._indexes.values() for i in indexes)
