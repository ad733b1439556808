"""Seconds of whole steps as they were measured, and the K that pays by them.

`outrider doctor` measures these points; `doctor` and `plan` price with them. The live controller
uses `policy.costs` instead: its tables also learn from every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from outrider.policy.costs import between

Points = Mapping[int, float]  # a count -> seconds


@dataclass(slots=True)
class StepCosts:
    """By batch size, because each sequence reads its own context; linear between the points."""

    passes: Mapping[int, Points]  # sequences -> tokens of the pass -> seconds
    overhead: Points  # sequences -> seconds outside of pass and draft
    draft: Mapping[str, Mapping[int, Points]]  # proposer -> sequences -> K -> seconds
    reading: Mapping[str, Points] = field(default_factory=dict)  # proposer -> prompt tokens -> ...

    def pass_s(self, num_sequences: int, width: float) -> float:
        """A pass with `width` tokens of each sequence."""
        if len(self.passes) == 1:  # only the number of tokens is known to matter
            return between(next(iter(self.passes.values())), num_sequences * width)
        by_batch = {n: between(found, n * width) for n, found in self.passes.items()}
        return between(by_batch, num_sequences)

    def plain_s(self, num_sequences: int) -> float:
        """A step without drafts."""
        return self.pass_s(num_sequences, 1) + self.overhead_s(num_sequences)

    def overhead_s(self, num_sequences: int) -> float:
        return between(self.overhead, num_sequences)

    def draft_s(self, proposer: str, num_sequences: int, num_drafts: int) -> float:
        """Drafting `num_drafts` tokens for each sequence."""
        by_batch = {
            size: between({0: 0.0, **found}, num_drafts)
            for size, found in self.draft[proposer].items()
        }
        return between(by_batch, num_sequences) if by_batch else 0.0

    def read_s(self, proposer: str, num_tokens: int) -> float:
        """The proposer's own reading of a prompt, before its first draft."""
        found = self.reading.get(proposer)
        return between({0: 0.0, **found}, num_tokens) if found else 0.0


def best_k(rate: Callable[[int], float], most: int) -> int:
    """The K of 0..most with the highest rate, the smallest of equals; 0 is plain decoding."""
    return max(range(most + 1), key=lambda k: (rate(k), -k))
