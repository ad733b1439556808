"""The chi-squared test against scipy, and its promises against simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from outrider.prove import power
from outrider.prove.power import examine, needed, plan, power_at, tail


@pytest.mark.parametrize("freedom", [1, 2, 8, 26, 80])
def test_the_same_numbers_as_scipy(freedom: int) -> None:
    for x in (0.1, 1.0, 10.0, 60.0, 200.0):
        assert tail(x, freedom) == pytest.approx(stats.chi2.sf(x, freedom), rel=1e-9)
    for level in (1e-2, 1e-3, 1e-5):
        critical = stats.chi2.isf(level, freedom)
        for noncentrality in (0.5, 20.0, 100.0):
            expected = stats.ncx2.sf(critical, freedom, noncentrality)
            assert power_at(freedom, level, noncentrality) == pytest.approx(expected, rel=1e-5)
        assert power_at(freedom, level, needed(freedom, level, 0.99)) == pytest.approx(0.99)


def test_sample_sizes() -> None:
    """Of the order 1 / error^2, and slowly growing with the number of outcomes."""
    uniform = dict.fromkeys(range(27), 1 / 27)
    assert plan(uniform).num_samples == pytest.approx(174_500, rel=0.01)
    assert plan(uniform, error=0.1).num_samples == pytest.approx(1_745, rel=0.02)
    assert plan({0: 0.5, 1: 0.5}).num_samples < plan(uniform).num_samples
    assert plan(uniform).looks[-1] == plan(uniform).num_samples


def test_rare_outcomes_are_merged_and_paid_for() -> None:
    dist = dict.fromkeys(range(9), 0.1) | {9 + i: 0.1 / 4000 for i in range(4)} | {99: 0.0999}
    found = plan(dist)
    assert found.num_cells == 11
    assert found.rest == pytest.approx(1e-4)
    assert found.num_samples > plan(dict.fromkeys(range(11), 1 / 11)).num_samples
    with pytest.raises(ValueError, match="rare"):
        plan(dict.fromkeys(range(10**4), 1e-06) | {-1: 0.99})


def distribution_of(cells: np.ndarray) -> dict[int, float]:
    return {i: float(p) for i, p in enumerate(cells)}


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)


def test_a_right_rule_is_hardly_ever_suspected(random: np.random.Generator) -> None:
    cells = random.dirichlet(np.full(27, 0.7))
    planned = plan(distribution_of(cells))
    suspected = 0
    for _ in range(300):
        counts = np.zeros(27, int)
        for size in np.diff([0, *planned.looks]):
            counts += random.multinomial(size, cells)
            suspected += examine(planned, distribution_of(cells), dict(enumerate(counts))).rejected
    assert suspected <= 3


@pytest.mark.parametrize("shape", ["spread", "one cell", "worst case"])
def test_an_error_of_one_percent_is_seen(random: np.random.Generator, shape: str) -> None:
    """The worst case is proportional to p on both sides: there Cauchy-Schwarz is an equality."""
    cells = random.dirichlet(np.full(27, 2.0))
    order = np.argsort(cells)[::-1]
    change = np.zeros(27)
    if shape == "one cell":
        change[order[0]], change[order[1]] = 0.01, -0.01
    elif shape == "spread":
        change[order[:13]], change[order[13:26]] = 0.01 / 13, -0.01 / 13
        change = np.maximum(change, -cells * 0.9)
        change[change > 0] *= -change[change < 0].sum() / change[change > 0].sum()
        change *= 0.01 / change[change > 0].sum()
    else:
        half = np.cumsum(cells[order]) <= 0.5
        up, down = order[half], order[~half]
        change[up] = 0.01 * cells[up] / cells[up].sum()
        change[down] = -0.01 * cells[down] / cells[down].sum()
    wrong = cells + change
    assert np.abs(change).sum() / 2 == pytest.approx(0.01)
    assert wrong.min() >= 0
    planned = plan(distribution_of(cells))
    seen = 0
    for _ in range(200):
        counts = random.multinomial(planned.num_samples, wrong)
        seen += examine(planned, distribution_of(cells), dict(enumerate(counts))).rejected
    assert seen >= 194  # 198 expected


def test_an_impossible_outcome_ends_it() -> None:
    planned = plan({0: 0.5, 1: 0.5})
    found = examine(planned, {0: 0.5, 1: 0.5, 2: 0.0}, {0: 5000, 1: 5000, 2: 1})
    assert (found.rejected, found.p_value) == (True, 0.0)


def test_the_looks_share_the_significance() -> None:
    assert plan({0: 0.5, 1: 0.5}).level * len(power.LOOKS) == pytest.approx(power.SIGNIFICANCE)
