"""Every formula, and every number of the table of claims."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import theory
from outrider.errors import ConfigError

P, Q = (0.5, 0.5), (0.9, 0.1)


@st.composite
def law_pairs(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    size = draw(st.integers(2, 6))
    weights = st.lists(st.integers(0, 20), min_size=size, max_size=size).filter(any)
    p, q = draw(weights), draw(weights)
    return [x / sum(p) for x in p], [x / sum(q) for x in q]


def coupled_by_definition(p: list[float], q: list[float]) -> float:
    return sum(
        1 / sum(max(a / p[v], b / q[v]) for a, b in zip(p, q, strict=True))
        for v in range(len(p))
        if p[v] and q[v]
    )


@given(law_pairs())
def test_acceptance(pair: tuple[list[float], list[float]]) -> None:
    p, q = pair
    ratio, coupled = theory.ratio_acceptance(p, q), theory.coupled_acceptance(p, q)
    assert ratio == pytest.approx(1 - theory.total_variation(p, q))
    assert coupled == pytest.approx(coupled_by_definition(p, q))
    assert ratio / (2 - ratio) - 1e-9 <= coupled <= ratio + 1e-9
    assert theory.coupled_acceptance(p, p) == pytest.approx(1)


def test_coupled_acceptance_is_what_shared_noise_does() -> None:
    p, q = [0.1, 0.5, 0.15, 0.25], [0.4, 0.3, 0.3, 0.0]
    noise = np.random.default_rng(0).gumbel(size=(400_000, 4))
    with np.errstate(divide="ignore"):
        same = (np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)
    assert theory.coupled_acceptance(p, q) == pytest.approx(same.mean(), abs=0.004)


def test_greedy_drafts_are_accepted_with_the_targets_probability() -> None:
    assert theory.greedy_acceptance((0.2, 0.3, 0.5), (0.1, 0.6, 0.3)) == 0.3


def test_expected_tokens() -> None:
    assert theory.expected_tokens(0.7, 0) == 1
    assert theory.expected_tokens(1.0, 4) == 5
    assert theory.expected_tokens(0.0, 4) == 1
    for alpha in (0.2, 0.7, 0.95):
        curve = theory.survival_curve([alpha] * 5)
        assert theory.expected_tokens_from_survival(curve) == pytest.approx(
            theory.expected_tokens(alpha, 5)
        )


def test_a_tree_of_one_chain_is_a_chain_and_siblings_add_up() -> None:
    chain = theory.expected_tokens_of_tree([-1, 0, 1], [0.6] * 3)
    assert chain == pytest.approx(theory.expected_tokens(0.6, 3))
    tree = theory.expected_tokens_of_tree([-1, -1, 0, 1], [0.6, 0.2, 0.5, 0.5])
    assert tree == pytest.approx(1 + 0.8 + 0.4)


@given(
    st.integers(1, 12),
    st.floats(0, 1, allow_nan=False),
    st.floats(0, 0.3, allow_nan=False),
)
def test_break_even_is_where_speedup_is_one(k: int, cost: float, extra: float) -> None:
    verify = theory.linear(extra)
    alpha = theory.break_even_alpha(k, cost, verify)
    if alpha is None:
        assert theory.speedup(1.0, k, cost, verify) < 1
    else:
        assert theory.speedup(alpha, k, cost, verify) == pytest.approx(1, abs=1e-6)


@given(st.floats(0, 0.97), st.floats(0.005, 1), st.floats(0, 0.2))
def test_the_rule_for_extending_finds_the_best_length(
    alpha: float, cost: float, extra: float
) -> None:
    """With linear costs the speedup has one peak, and climbing it step by step gets there."""
    verify = theory.linear(extra)
    k = 0
    while theory.worth_extending(
        alpha ** (k + 1),
        theory.expected_tokens(alpha, k),
        cost + extra,
        theory.cycle_cost(k, cost, verify),
    ):
        k += 1
    best = theory.best_num_draft_tokens(alpha, cost, verify, most=k + 20)
    assert theory.speedup(alpha, k, cost, verify) == pytest.approx(
        theory.speedup(alpha, best, cost, verify)
    )


def test_memory_of_the_second_model() -> None:
    per_token = theory.kv_bytes_per_token(32, 8, 128)
    assert per_token == 131_072
    target = theory.Footprint(num_parameters=8e9, kv_bytes_per_token=per_token)
    drafter = theory.Footprint(num_parameters=1e9, kv_bytes_per_token=32_768)
    overhead = theory.memory_overhead(target, drafter, 10_000)
    assert overhead.weight_bytes == 2e9
    assert overhead.kv_bytes == 327_680_000
    assert overhead.fraction == pytest.approx((2e9 + 0.32768e9) / (16e9 + 1.31072e9))


# (claim, what, our number, to how many digits it is quoted)
QUOTED = [
    (0, "output of token 1", 0.7, 2),
    (0, "output of token 2", 0.3, 2),
    (0, "total variation", 0.20, 2),
    (1, "tokens", 2.773, 3),
    (2, "K=1", 1.40, 2),
    (2, "K=2", 1.56, 2),
    (2, "K=4", 1.65, 2),
    (2, "limit", 1.667, 3),
    (3, "sampled draft", 0.6, 2),
    (3, "greedy draft", 0.5, 2),
    (4, "alpha=.7, K=4", 0.087, 3),
    (4, "alpha=.9, K=4", 0.16, 2),
    (5, "K=1, c=0.1", 0.1, 3),
    (5, "K=4, c=0.05", 0.167, 3),
    (5, "K=4, c=0.1", 0.287, 3),
    (5, "K=4, c=0.2", 0.455, 3),
    (6, "c=0.01", 1.59, 2),
    (6, "c=0.05", 1.42, 2),
    (6, "c=0.1", 1.30, 2),
    (7, "cost per cycle", 1.667, 3),
    (7, "steps", 5.0, 2),
    (7, "without the extra token", 6.7, 1),
    (8, "passes", 6, 0),
    (8, "without the extra token", 8, 0),
    (9, "row of draft 0", 4, 0),
    (9, "row of draft 1", 5, 0),
]


@pytest.mark.parametrize(("index", "what", "number", "digits"), QUOTED)
def test_claims(index: int, what: str, number: float, digits: int) -> None:
    assert round(theory.claims()[index].numbers[what], digits) == number


def test_every_claimed_number_is_checked() -> None:
    listed = [(i, what) for i, claim in enumerate(theory.claims()) for what in claim.numbers]
    assert listed == [(i, what) for i, what, _, _ in QUOTED]


def test_break_even_at_one_draft_is_its_cost() -> None:
    for cost in (0.01, 0.2, 0.9):
        assert theory.break_even_alpha(1, cost) == pytest.approx(cost)
    assert theory.break_even_alpha(0, 0.1) is None
    assert theory.break_even_alpha(2, 1.5) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens(1.01, 4),
        lambda: theory.expected_tokens(-0.1, 4),
        lambda: theory.expected_tokens(math.nan, 4),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.speedup(0.5, 4, -0.1),
        lambda: theory.speedup(0.5, 4, math.inf),
        lambda: theory.linear(math.nan),
        lambda: theory.ratio_acceptance((0.5, 0.5), (0.5, 0.4)),
        lambda: theory.ratio_acceptance((0.5, 0.5), (1.5, -0.5)),
        lambda: theory.ratio_acceptance((1.0,), (0.5, 0.5)),
        lambda: theory.expected_tokens_from_survival([0.5, 0.6]),
        lambda: theory.survival_curve([1.2]),
        lambda: theory.expected_tokens_of_tree([0], [0.5]),
        lambda: theory.expected_tokens_of_tree([-1], []),
        lambda: theory.num_cycles(20, 0, extra_token=False),
        lambda: theory.row_of_draft(0, 0),
        lambda: theory.worth_extending(math.nan, 2.0, 0.1, 1.0),
        lambda: theory.memory_overhead(
            theory.Footprint(num_parameters=0), theory.Footprint(num_parameters=1), 1
        ),
    ],
)
def test_nonsense_is_refused_in_one_line(call: object) -> None:
    with pytest.raises(ConfigError) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_needs_no_torch() -> None:
    check = "import sys, outrider.theory, outrider.cli.theory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
