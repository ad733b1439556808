"""Acceptance, speedup, break-even and memory, as formulas, without torch."""

from outrider.theory.acceptance import (
    coupled_acceptance,
    greedy_acceptance,
    ratio_acceptance,
    total_variation,
)
from outrider.theory.claims import Claim, claims
from outrider.theory.memory import Footprint, Overhead, kv_bytes_per_token, memory_overhead
from outrider.theory.speedup import (
    VerifyCost,
    best_num_draft_tokens,
    bonus_share,
    break_even_alpha,
    cycle_cost,
    expected_tokens,
    expected_tokens_from_survival,
    expected_tokens_of_tree,
    free,
    linear,
    num_cycles,
    row_of_draft,
    speedup,
    survival_curve,
    worth_extending,
)

__all__ = [
    "Claim",
    "Footprint",
    "Overhead",
    "VerifyCost",
    "best_num_draft_tokens",
    "bonus_share",
    "break_even_alpha",
    "claims",
    "coupled_acceptance",
    "cycle_cost",
    "expected_tokens",
    "expected_tokens_from_survival",
    "expected_tokens_of_tree",
    "free",
    "greedy_acceptance",
    "kv_bytes_per_token",
    "linear",
    "memory_overhead",
    "num_cycles",
    "ratio_acceptance",
    "row_of_draft",
    "speedup",
    "survival_curve",
    "total_variation",
    "worth_extending",
]
