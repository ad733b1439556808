"""How often a draft is accepted, given the distributions p of the target and q of the draft.

    ratio rules            sum_v min(p_v, q_v)  =  1 - TV(p, q)
    coupled sample-match   sum_v 1 / sum_w max(p_w/p_v, q_w/q_v)
    greedy draft           p(argmax q)

The second line: with Gumbel noise g = -log E and E exponential, argmax(log p + g) = argmin(E/p).
Target and draft both choose v iff E_w >= E_v max(p_w/p_v, q_w/q_v) for every w; integrate over E_v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from outrider.errors import ConfigError
from outrider.theory._checks import check_not_negative

Distribution = Sequence[float]


def total_variation(p: Distribution, q: Distribution) -> float:
    """Half the L1 distance."""
    _check(p, q)
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def ratio_acceptance(p: Distribution, q: Distribution) -> float:
    """Of the token rule, for a token drawn from q."""
    _check(p, q)
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def coupled_acceptance(p: Distribution, q: Distribution) -> float:
    """Of sample-match, for a draft drawn with the target's own Gumbel noise. O(V log V).

    With a = `ratio_acceptance` it lies between a / (2 - a) and a.
    """
    _check(p, q)
    # Sorted by p_w/q_w, the maximum is q_w/q_v before v and p_w/p_v from v on.
    order = sorted(
        ((a, b) for a, b in zip(p, q, strict=True) if a or b),
        key=lambda ab: ab[0] / ab[1] if ab[1] else math.inf,
    )
    q_before = [0.0, *accumulate(b for _, b in order)]
    p_from = [*accumulate(a for a, _ in reversed(order))][::-1]
    return sum(1.0 / (p_from[i] / a + q_before[i] / b) for i, (a, b) in enumerate(order) if a and b)


def greedy_acceptance(p: Distribution, q: Distribution) -> float:
    """Of any exact rule, for the draft argmax q: q is one-hot, and p decides alone."""
    _check(p, q)
    return p[max(range(len(q)), key=lambda v: q[v])]


def replaced_from_p(p: Distribution, q: Distribution) -> list[float]:
    """What comes out when the replacement is (wrongly) drawn from p: min(p, q) + (1 - alpha) p."""
    refused = 1.0 - ratio_acceptance(p, q)
    return [min(a, b) + refused * a for a, b in zip(p, q, strict=True)]


def _check(p: Distribution, q: Distribution) -> None:
    if len(p) != len(q):
        raise ConfigError(f"p and q must have one length, not {len(p)} and {len(q)}")
    for name, dist in (("p", p), ("q", q)):
        for value in dist:
            check_not_negative(f"every probability of {name}", value)
        if not math.isclose(sum(dist), 1.0, abs_tol=1e-4):
            raise ConfigError(f"{name} must sum to 1, not {sum(dist):g}")
