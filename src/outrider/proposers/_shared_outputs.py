"""Finished outputs that later requests may draft from: per tenant, bounded, newest text kept.

Each tenant has two automata. New outputs go to the younger; when it holds half of the room, it
becomes the older, and the older before it is dropped as a whole. That is a least-recently-used
order without any book-keeping: text that was drafted from an old output and accepted is part of
the new output too, so what leaves with the older automaton is what nobody has used since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from outrider.proposers._suffix_automaton import SuffixAutomaton


class SharedOutputs:
    """At most `capacity` tokens of all tenants together; 0 keeps nothing."""

    def __init__(self, capacity: int, depth: int) -> None:
        self._half = capacity // 2
        self._depth = depth
        # Newer first, for each salt; the tenant that finished something last comes last.
        self._automata: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def automata(self, salt: str) -> Seq[SuffixAutomaton]:
        """What this tenant may read; nobody else's outputs are in it."""
        return self._automata.get(salt, ())

    def add(self, salt: str, output: Seq[int]) -> None:
        output = output[max(0, len(output) - self._half) :]
        if not output:
            return
        automata = self._automata.setdefault(salt, [])
        self._automata.move_to_end(salt)
        if not automata or automata[0].num_tokens + len(output) > self._half:
            automata[:] = [SuffixAutomaton(self._depth), *automata[:1]]
        automata[0].begin()
        for token in output:
            automata[0].append(token)
        while self.num_tokens > 2 * self._half:
            self._automata.popitem(last=False)

    @property
    def num_tokens(self) -> int:
        return sum(a.num_tokens for automata in self._automata.values() for a in automata)
