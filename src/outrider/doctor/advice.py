"""From curves to advice: the best proposer and K for every batch size, and when to leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.doctor.curves import Curves
from outrider.model.capabilities import PrefersThinPasses
from outrider.theory import break_even_alpha

BATCHES = (1, 2, 4, 8, 16, 32)
WORTHWHILE = 1.03  # the least speedup that is advised: the noise of its prediction


@dataclass(frozen=True, slots=True)
class Advice:
    """For one batch size. `proposer` None: decode plainly."""

    batch: int
    proposer: str | None
    num_draft_tokens: int
    predicted_speedup: float
    break_even: float | None  # acceptance per draft at which drafting starts to pay; None: never

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(curves: Curves) -> list[Advice]:
    """For batches up to twice as large as what was measured."""
    most = 2 * max(curves.passes)
    return [_advise(curves, batch) for batch in BATCHES if batch <= most]


def buckets(advice: Sequence[Advice], target: PrefersThinPasses) -> list[tuple[int, int]]:
    """Steps (sequences, drafts) worth preparing: plain ones, those advised and their neighbours."""
    found = []
    for entry in advice:
        k, most = entry.num_draft_tokens, target.most_drafts(entry.batch)
        near = range(max(1, k - 1), min(k + 1, most) + 1) if k else ()
        found += [(entry.batch, n) for n in (0, *near)]
    return found


def _advise(curves: Curves, batch: int) -> Advice:
    ks = {name: curves.best_k(name, batch) for name in curves.worth}
    best, name, k = max(
        ((curves.speedup(name, batch, k), name, k) for name, k in ks.items()),
        key=lambda choice: (choice[0], -choice[2]),
    )
    if best < WORTHWHILE:
        return Advice(batch, None, 0, 1.0, break_even(curves, name, batch))
    return Advice(batch, name, k, best, break_even(curves, name, batch))


def break_even(curves: Curves, proposer: str, batch: int) -> float | None:
    """The least acceptance at which some K pays for a proposer that costs what this one does."""
    plain_s = curves.plain_s(batch)
    found = [
        break_even_alpha(k, 0.0, lambda n: curves.step_s(proposer, batch, n) / plain_s)
        for k in range(1, curves.most_drafts(batch) + 1)
    ]
    return min((alpha for alpha in found if alpha is not None), default=None)


def conclusion(advice: list[Advice]) -> str:
    """One or two plain sentences."""
    helped = [a for a in advice if a.proposer is not None]
    if not helped:
        return (
            "Speculation will not help on these prompts: no proposer pays at any batch size. "
            "Decode plainly (--num-draft-tokens 0)."
        )
    first = helped[0]
    text = (
        f"Use {first.proposer} with K = {first.num_draft_tokens} for a batch of {first.batch}: "
        f"{first.predicted_speedup:.2f} x plain decoding is expected."
    )
    off = [a.batch for a in advice if a.proposer is None]
    if off:
        text += f" At batch {', '.join(map(str, off))} it will not help."
    return text + " --num-draft-tokens auto makes this choice at every step."
