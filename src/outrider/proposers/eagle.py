"""EAGLE-1 and EAGLE-2 (Li et al. 2024): a decoder layer goes on from the target's last state.

EAGLE-2 grows its trees by the draft's own probabilities, as we do for every head that can draft
trees; the weights are those of EAGLE-1.
"""

from __future__ import annotations

from outrider.proposers.eagle3 import Eagle3Proposer


class EagleProposer(Eagle3Proposer):
    """Drafts like EAGLE-3, from other features: the head itself knows the difference."""

    name = "eagle"
    kind = "eagle"
