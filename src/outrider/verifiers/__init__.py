"""Acceptance rules by name, and the check that a proposer and a rule are exact together."""

from __future__ import annotations

from importlib import import_module

from outrider.contracts import Draw, Verifier
from outrider.errors import LossyPairing, UnknownName

__all__ = ["VERIFIERS", "exact_pairing", "make_verifier"]

VERIFIERS = {  # imported on first use
    "coupled": "outrider.verifiers.coupled:CoupledVerifier",
    "token": "outrider.verifiers.token:TokenVerifier",
    "block": "outrider.verifiers.block:BlockVerifier",
    "tree": "outrider.verifiers.tree:TreeVerifier",
}

# Best acceptance first. Independent samples are exact under sample-match too, but agree with the
# target less often than any other draft.
_COUPLED_FIRST = (Draw.COUPLED, Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT, Draw.SAMPLED)
_SAMPLED_FIRST = (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT, Draw.DETERMINISTIC)


def make_verifier(name: str) -> Verifier:
    """Raises UnknownName with a suggestion."""
    if name not in VERIFIERS:
        raise UnknownName("verifier", name, VERIFIERS)
    module, _, attribute = VERIFIERS[name].partition(":")
    verifier: Verifier = getattr(import_module(module), attribute)()
    return verifier


def exact_pairing(
    proposer_draws: frozenset[Draw], proposer_trees: bool, verifier: Verifier
) -> Draw:
    """How the proposer must draw under this verifier; raises LossyPairing if no way is exact."""
    if proposer_trees and not verifier.trees:
        raise LossyPairing(
            f"this proposer drafts trees and the {verifier.name} rule judges chains only; "
            "use verifier 'tree' or 'coupled'"
        )
    order = _COUPLED_FIRST if Draw.COUPLED in verifier.draws else _SAMPLED_FIRST
    for draw in order:
        if draw in proposer_draws and draw in verifier.draws:
            return draw
    offered = ", ".join(sorted(draw.value for draw in proposer_draws)) or "no"
    raise LossyPairing(
        f"this proposer offers {offered} drafts only, for which the {verifier.name} rule is not "
        "exact; use verifier 'coupled'"
    )
