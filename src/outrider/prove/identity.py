"""Same seed, same tokens: comparing two decodings and explaining any difference.

Two passes of different width add floating-point numbers in a different order, so two correct
runs can differ where the two best tokens are nearly tied. `explain` recomputes the first
difference and measures the margin: a margin near zero is a near-tie, anything else is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.contracts import Proposal
from outrider.engine.engine import Engine
from outrider.engine.request import Request, Sequence
from outrider.layout import Slice, pack
from outrider.sampling import RowDistributions

NEAR_TIE = 1e-4


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two outputs differ."""

    position: int  # index into the output
    tokens: tuple[int | None, int | None]  # None: that output had ended
    margin: float  # score of the best token minus the runner-up's, noise included

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def explain(
    engine: Engine, request: Request, sample_index: int, first: list[int], second: list[int]
) -> Divergence | None:
    """None if the outputs are equal; else the first difference and its margin.

    The engine must be idle. Runs one forward over the common prefix.
    """
    if first == second:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
    sequence = engine.make_sequence(request, sample_index)
    sequence.tokens += first[:position]
    pair = tuple(tokens[position] if position < len(tokens) else None for tokens in (first, second))
    return Divergence(position, (pair[0], pair[1]), _margin(engine, sequence))


def _margin(engine: Engine, sequence: Sequence) -> float:
    engine.kv.reserve(sequence.id, len(sequence.tokens))
    try:
        table = engine.kv.table(sequence.id)
        output = engine.target.forward(pack([Slice(sequence.tokens, 0, table, Proposal())]))
    finally:
        engine.kv.free(sequence.id)
    dists = RowDistributions(
        output.logits_RV,
        [sequence],
        [Proposal()],
        [sequence.edits],
        num_tokens=engine.target.spec.num_tokens,
    )
    return dists.margin(0)
