"""Acceptance rules, by name, and the check that a proposer and a rule are exact together."""

from __future__ import annotations

from collections.abc import Callable

from outrider.contracts import Draw, Verifier
from outrider.errors import LossyPairing, UnknownName
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.tree import TreeVerifier

__all__ = ["VERIFIERS", "exact_pairing", "make_verifier"]

VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "coupled": CoupledVerifier,
    "token": TokenVerifier,
    "block": BlockVerifier,
    "tree": TreeVerifier,
}

# Best acceptance first. Independent samples are exact under sample-match too, but agree with the
# target less often than any other draft.
_COUPLED_FIRST = (Draw.COUPLED, Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT, Draw.SAMPLED)
_SAMPLED_FIRST = (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT, Draw.DETERMINISTIC)


def make_verifier(name: str) -> Verifier:
    """Raises UnknownName with a suggestion."""
    try:
        return VERIFIERS[name]()
    except KeyError:
        raise UnknownName("verifier", name, VERIFIERS) from None


def exact_pairing(
    proposer_draws: frozenset[Draw], proposer_trees: bool, verifier: Verifier
) -> Draw:
    """The law the proposer must draw from under this verifier; LossyPairing when none is exact."""
    if proposer_trees and not verifier.trees:
        raise LossyPairing(
            f"this proposer drafts trees and the {verifier.name} rule judges chains only; "
            "use verifier 'tree' or 'coupled'"
        )
    order = _COUPLED_FIRST if Draw.COUPLED in verifier.draws else _SAMPLED_FIRST
    for draw in order:
        if draw in proposer_draws and draw in verifier.draws:
            return draw
    offered = ", ".join(sorted(draw.value for draw in proposer_draws)) or "no law"
    raise LossyPairing(
        f"this proposer offers {offered} drafts only, for which the {verifier.name} rule is not "
        "exact; use verifier 'coupled'"
    )
