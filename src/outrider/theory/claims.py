"""Common wrong claims about speculative decoding, the truth, and the numbers that show it.

The public functions of this package compute every number.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.theory.acceptance import (
    greedy_acceptance,
    ratio_acceptance,
    replaced_from_p,
    total_variation,
)
from outrider.theory.speedup import (
    best_num_draft_tokens,
    bonus_share,
    break_even_alpha,
    cycle_cost,
    expected_tokens,
    num_cycles,
    row_of_draft,
    speedup,
)


@dataclass(frozen=True, slots=True)
class Claim:
    claim: str
    truth: str
    numbers: dict[str, float]  # what -> our number


def claims() -> list[Claim]:
    """The table of `outrider theory --claims`."""
    return _about_tokens() + _about_costs()


def _about_tokens() -> list[Claim]:
    p, q = (0.5, 0.5), (0.9, 0.1)
    biased = replaced_from_p(p, q)
    return [
        Claim(
            "After a refusal, sample the replacement from p.",
            "Wrong. It must come from norm(max(0, p - q)): with p = (.5, .5) and q = (.9, .1) "
            "the output would be (.7, .3).",
            {
                "output of token 1": biased[0],
                "output of token 2": biased[1],
                "total variation": total_variation(biased, p),
            },
        ),
        Claim(
            "K = 4 at alpha = .7 gives about 2.4 tokens per call.",
            "The formula gives more.",
            {"tokens": expected_tokens(0.7, 4)},
        ),
        Claim(
            "alpha = .4 gives about 1.5 tokens per cycle.",
            "It depends on K, and has a limit.",
            {f"K={k}": expected_tokens(0.4, k) for k in (1, 2, 4)}
            | {"limit": expected_tokens(0.4, 1000)},
        ),
        Claim(
            "The draft must be sampled; it cannot be greedy.",
            "It can: its q is one-hot, and the output stays exact. Only acceptance falls, for "
            "p = (.5, .5) and q = (.9, .1) like this.",
            {"sampled draft": ratio_acceptance(p, q), "greedy draft": greedy_acceptance(p, q)},
        ),
        Claim(
            "All K accepted: go on with the next draft.",
            "Exact but wasteful: the pass has already computed one more token. Its share of all "
            "tokens:",
            {"alpha=.7, K=4": bonus_share(0.7, 4), "alpha=.9, K=4": bonus_share(0.9, 4)},
        ),
    ]


def _about_costs() -> list[Claim]:
    cycle = cycle_cost(4, 1 / 6)
    return [
        Claim(
            "Below alpha = .3 it gets slower.",
            "Break-even depends on cost and K; at K = 1 it is the draft's cost itself.",
            {"K=1, c=0.1": _break_even(1, 0.1)}
            | {f"K=4, c={c:g}": _break_even(4, c) for c in (0.05, 0.1, 0.2)},
        ),
        Claim(
            "alpha of at least .6 is needed.",
            "Wrong for cheap drafts. Speedup at alpha = .4 with the best K:",
            {f"c={c:g}": speedup(0.4, best_num_draft_tokens(0.4, c), c) for c in (0.01, 0.05, 0.1)},
        ),
        Claim(
            "3 of K = 4 accepted, a draft 6 times cheaper: 12 tokens cost 6.7 steps instead of 12.",
            "That forgets the extra token: 4 tokens a cycle.",
            {
                "cost per cycle": cycle,
                "steps": num_cycles(12, 3) * cycle,
                "without the extra token": num_cycles(12, 3, extra_token=False) * cycle,
            },
        ),
        Claim(
            "5 drafts, 2.5 accepted on average: 20 tokens take 8 passes.",
            "Only if the extra token is forgotten.",
            {
                "passes": num_cycles(20, 2.5),
                "without the extra token": num_cycles(20, 2.5, extra_token=False),
            },
        ),
        Claim(
            "Draft i is judged by the logits at row prompt_length + i.",
            "One row earlier: a row predicts the next token. For a prompt of 5 tokens:",
            {"row of draft 0": row_of_draft(5, 0), "row of draft 1": row_of_draft(5, 1)},
        ),
    ]


def _break_even(num_draft_tokens: int, cost: float) -> float:
    alpha = break_even_alpha(num_draft_tokens, cost)
    assert alpha is not None, "these drafts are cheap enough to pay at alpha = 1"
    return alpha
