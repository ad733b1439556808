"""Survival estimates: what they converge to, what they start from, what they remember."""

from __future__ import annotations

from random import Random

import pytest

from outrider.control.survival import LEAST_EVIDENCE, START, Prior, Survival, accepted


def watch(survival: Survival, alpha: float, budget: int, num_drafts: int, seed: int = 0) -> None:
    """Drafts of which every token holds with probability `alpha`."""
    random = Random(seed)
    for _ in range(num_drafts):
        length = 0
        while length < budget and random.random() < alpha:
            length += 1
        survival.observe([(budget, budget, list(range(length)), False)])


def curve(survival: Survival) -> list[float]:
    survival.prior.refresh()
    survival.refresh()
    return survival.curve


class Runs:
    """A text in which agreement comes in runs: the longer one is, the likelier it goes on."""

    def __init__(self, rates: list[float], seed: int = 0) -> None:
        self.rates = rates
        self.random = Random(seed)
        self.age = 0

    def draft(self, k: int) -> int:
        """How many of the next k hold."""
        for held in range(k):
            if self.random.random() >= self.rates[min(self.age, len(self.rates) - 1)]:
                self.age = 0
                return held
            self.age += 1
        self.age += 1  # the target's own token
        return k


RUNS = [0.3, 0.6, 0.8, 0.9]


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.9, 1.0])
def test_without_runs_a_draft_is_worth_its_survival(alpha: float) -> None:
    for in_run in (False, True):
        found = accepted([alpha] * 5, 8, in_run)
        assert found == pytest.approx(
            [sum(alpha**i for i in range(1, k + 1)) for k in range(9)], abs=1e-6
        )


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_what_drafts_of_each_length_are_worth_in_runs(k: int) -> None:
    runs = Runs(RUNS)
    mean = sum(runs.draft(k) for _ in range(40_000)) / 40_000
    assert accepted(RUNS, 16)[k] == pytest.approx(mean, rel=0.03)


def test_long_drafts_tell_what_short_ones_are_worth() -> None:
    """By place in the draft, the first would hold in three of ten, whatever follows."""
    survival, runs = Survival(Prior()), Runs(RUNS)
    for _ in range(2000):
        survival.observe([(12, 12, list(range(runs.draft(12))), False)])
    curve(survival)
    assert survival.totals[2] == pytest.approx(accepted(RUNS, 2)[2], rel=0.2)
    assert survival.totals[2] > 1.3 * (0.3 + 0.3 * 0.6)


def test_an_unknown_proposer_is_worth_trying() -> None:
    assert curve(Survival(Prior())) == pytest.approx([START**k for k in range(1, 17)])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.95])
def test_a_chain_converges_to_its_survival(alpha: float) -> None:
    survival = Survival(Prior())
    watch(survival, alpha, 4, 3000)
    found = curve(survival)
    assert found[:4] == pytest.approx([alpha**k for k in range(1, 5)], abs=0.12)
    assert found == sorted(found, reverse=True)


def test_positions_that_were_never_drafted_follow_the_last_that_was() -> None:
    survival = Survival(Prior())
    watch(survival, 0.9, 4, 2000)
    found = curve(survival)
    assert found[8] / found[7] == pytest.approx(found[3] / found[2], abs=0.1)


def test_a_new_request_starts_from_what_others_achieved() -> None:
    prior = Prior()
    watch(Survival(prior), 0.2, 4, 500)
    assert curve(Survival(prior))[0] == pytest.approx(0.2, abs=0.1)


def test_a_request_soon_differs_from_the_others() -> None:
    prior = Prior()
    watch(Survival(prior), 0.1, 4, 200)
    mine = Survival(prior)
    watch(mine, 1.0, 4, 20)
    assert curve(mine)[0] > 0.75
    assert curve(Survival(prior))[0] < 0.5


def test_the_estimate_follows_a_change() -> None:
    survival = Survival(Prior())
    watch(survival, 0.9, 4, 300)
    watch(survival, 0.05, 4, 60)
    assert curve(survival)[0] < 0.25


def test_a_draft_says_nothing_about_positions_behind_the_first_refusal() -> None:
    survival = Survival(Prior())
    survival.observe([(4, 4, [0], False)])
    assert survival._judged[:4] == [1.0, 1.0, 0.0, 0.0]
    assert survival._kept[:4] == [1.0, 0.0, 0.0, 0.0]


def test_old_evidence_fades_but_is_never_forgotten() -> None:
    survival = Survival(Prior())
    watch(survival, 0.0, 2, 100)
    for _ in range(50):
        survival.fade(0.5)
    assert survival._judged[0] / survival.unit == pytest.approx(LEAST_EVIDENCE)
    watch(survival, 1.0, 2, 8)
    assert curve(survival)[0] > 0.3


def test_a_tree_counts_its_nodes_best_first() -> None:
    """Node 2 holds most often: with one node only, a best-first drafter would have drafted it."""
    survival = Survival(Prior())
    random = Random(1)
    for _ in range(800):
        u = random.random()
        path = [2] if u < 0.6 else [0] if u < 0.8 else []
        survival.observe([(4, 3, path, True)])
    assert curve(survival)[:2] == pytest.approx([0.6, 0.2], abs=0.12)


def test_fill_is_the_share_of_the_budget_that_was_used() -> None:
    survival = Survival(Prior())
    for i in range(400):
        survival.observe([(4, 4 if i % 4 == 0 else 0, [], False)])
    assert survival.fill == pytest.approx(0.25, abs=0.05)
    assert Survival(survival.prior).fill == pytest.approx(0.35, abs=0.1)
