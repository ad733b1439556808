"""Tokens per cycle and cost per cycle, and from them speedup, break-even and the best K.

A cycle drafts K tokens and verifies them in one pass of the target; it emits the accepted ones and
one token more (correction or bonus), which every count here includes. Costs are in target steps:
`cost` is one draft step, `verify_cost(K)` the pass over K + 1 tokens (1 where it is free).

    E[tokens] = 1 + sum_{k<=K} S_k        S_k: probability that the first k drafts are accepted
              = (1 - alpha^{K+1}) / (1 - alpha)   if each is accepted with probability alpha
    speedup   = E[tokens] / (K cost + verify_cost(K))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from outrider.errors import ConfigError
from outrider.policy.measured import best_k
from outrider.theory._checks import check_count, check_not_negative, check_probability

VerifyCost = Callable[[int], float]


def free(num_draft_tokens: int) -> float:
    """Verification costs one step for every K: the memory-bound limit."""
    return 1.0


def linear(extra: float) -> VerifyCost:
    """Every drafted token adds `extra` target steps to the pass."""
    check_not_negative("verify cost", extra)
    return lambda num_draft_tokens: 1.0 + extra * num_draft_tokens


def expected_tokens(alpha: float, num_draft_tokens: int) -> float:
    """Per cycle, each draft accepted independently with probability `alpha`."""
    check_probability("alpha", alpha)
    check_count("num_draft_tokens", num_draft_tokens)
    if alpha == 1.0:
        return num_draft_tokens + 1.0
    return (1.0 - alpha ** (num_draft_tokens + 1)) / (1.0 - alpha)


def survival_curve(conditional: Sequence[float]) -> list[float]:
    """S_1..S_K from the acceptance of each position given that the earlier ones were accepted."""
    for value in conditional:
        check_probability("every acceptance", value)
    return list(accumulate(conditional, lambda a, b: a * b))


def expected_tokens_from_survival(survival: Sequence[float]) -> float:
    """Per cycle, from a measured survival curve S_1..S_K (falling, within [0, 1])."""
    before = 1.0
    for value in survival:
        check_probability("every survival", value)
        if value > before + 1e-9:
            raise ConfigError("a survival curve falls: pass S_1 >= S_2 >= ... (not conditional)")
        before = value
    return 1.0 + sum(survival)


def expected_tokens_of_tree(parents: Sequence[int], acceptance: Sequence[float]) -> float:
    """Per cycle of a tree: one plus, for every node, the probability that its path is accepted.

    `parents[i] < i` (-1: the root); `acceptance[i]`: probability that node i is accepted given its
    parent, so the values of siblings add up to at most 1.
    """
    if len(parents) != len(acceptance):
        raise ConfigError("parents and acceptance must have one length")
    reach: list[float] = []
    for node, (parent, value) in enumerate(zip(parents, acceptance, strict=True)):
        check_probability("every acceptance", value)
        if not -1 <= parent < node:
            raise ConfigError(f"node {node} must come after its parent, not have parent {parent}")
        reach.append(value * (reach[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reach)


def cycle_cost(num_draft_tokens: int, cost: float, verify_cost: VerifyCost = free) -> float:
    """Of one cycle, in target steps. K = 0 is plain decoding: one step."""
    check_count("num_draft_tokens", num_draft_tokens)
    check_not_negative("cost", cost)
    return num_draft_tokens * cost + verify_cost(num_draft_tokens)


def speedup(
    alpha: float, num_draft_tokens: int, cost: float, verify_cost: VerifyCost = free
) -> float:
    """Over plain decoding; below 1 is slower."""
    tokens = expected_tokens(alpha, num_draft_tokens)
    spent = cycle_cost(num_draft_tokens, cost, verify_cost)
    if spent <= 0:
        raise ConfigError("a cycle must cost something: verify_cost(K) must be above 0")
    return tokens / spent


def break_even_alpha(
    num_draft_tokens: int, cost: float, verify_cost: VerifyCost = free
) -> float | None:
    """The alpha at which the speedup is 1; None if alpha = 1 does not reach it.

    At K = 1 with free verification it is `cost` itself. K = 0 drafts nothing: None.
    """
    spent = cycle_cost(num_draft_tokens, cost, verify_cost)
    if num_draft_tokens == 0 or spent > num_draft_tokens + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if expected_tokens(middle, num_draft_tokens) < spent:
            low = middle
        else:
            high = middle
    return high


def best_num_draft_tokens(
    alpha: float, cost: float, verify_cost: VerifyCost = free, *, most: int = 64
) -> int:
    """The K in 0..most with the largest speedup, the smallest of equals."""
    return best_k(lambda k: speedup(alpha, k, cost, verify_cost), most)


def worth_extending(next_survival: float, tokens: float, extra_cost: float, spent: float) -> bool:
    """Whether one more draft pays: S_{K+1} / E(K) > extra cost / cost(K)."""
    check_probability("next survival", next_survival)
    return next_survival * spent > extra_cost * tokens


def bonus_share(alpha: float, num_draft_tokens: int) -> float:
    """The share of all tokens that is the bonus after a full accept."""
    return alpha**num_draft_tokens / expected_tokens(alpha, num_draft_tokens)


def num_cycles(num_tokens: int, num_accepted: float, *, extra_token: bool = True) -> int:
    """Target passes for `num_tokens`, with `num_accepted` drafts accepted per cycle on average."""
    check_count("num_tokens", num_tokens)
    check_not_negative("num_accepted", num_accepted)
    per_cycle = num_accepted + (1 if extra_token else 0)
    if per_cycle == 0:
        raise ConfigError("without the extra token and without accepted drafts nothing is emitted")
    return math.ceil(num_tokens / per_cycle)


def row_of_draft(prompt_length: int, index: int) -> int:
    """The logits row (of prompt and drafts in one pass) that predicts draft `index`, from 0."""
    check_count("prompt_length", prompt_length)
    check_count("index", index)
    if prompt_length == 0:
        raise ConfigError("an empty prompt has no last token to predict from")
    return prompt_length + index - 1
