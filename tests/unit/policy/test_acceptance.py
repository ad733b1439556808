"""Acceptance estimates: what they converge to, what they start from, what they remember."""

from __future__ import annotations

from random import Random

import pytest

from outrider.policy.acceptance import PRIOR_WEIGHT, START, Acceptance, Prior, expected_accepted


def watch(
    acceptance: Acceptance, alpha: float, budget: int, num_drafts: int, seed: int = 0
) -> None:
    """Drafts of which every token holds with probability `alpha`."""
    random = Random(seed)
    for _ in range(num_drafts):
        length = 0
        while length < budget and random.random() < alpha:
            length += 1
        acceptance.observe([(budget, budget, list(range(length)), False)])


def curve(acceptance: Acceptance) -> list[float]:
    acceptance.refresh()
    return acceptance.curve


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
def test_without_runs_a_draft_is_worth_its_acceptance(alpha: float) -> None:
    for in_run in (False, True):
        found = expected_accepted([alpha] * 5, 8, in_run)
        assert found == pytest.approx(
            [sum(alpha**i for i in range(1, k + 1)) for k in range(9)], abs=1e-6
        )


@pytest.mark.parametrize("k", [1, 2, 4, 8, 16])
def test_what_drafts_of_each_length_are_worth_in_runs(k: int) -> None:
    runs = Runs(RUNS)
    mean = sum(runs.draft(k) for _ in range(40_000)) / 40_000
    assert expected_accepted(RUNS, 16)[k] == pytest.approx(mean, rel=0.03)


def test_long_drafts_tell_what_short_ones_are_worth() -> None:
    """By place in the draft, the first would hold in three of ten, whatever follows."""
    acceptance, runs = Acceptance(Prior()), Runs(RUNS)
    for _ in range(2000):
        acceptance.observe([(12, 12, list(range(runs.draft(12))), False)])
    curve(acceptance)
    assert acceptance.totals[2] == pytest.approx(expected_accepted(RUNS, 2)[2], rel=0.2)
    assert acceptance.totals[2] > 1.3 * (0.3 + 0.3 * 0.6)


def test_an_unknown_proposer_is_worth_trying() -> None:
    assert curve(Acceptance(Prior())) == pytest.approx([START**k for k in range(1, 17)])


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.8, 0.95])
def test_a_chain_converges_to_its_acceptance(alpha: float) -> None:
    acceptance = Acceptance(Prior())
    watch(acceptance, alpha, 4, 3000)
    found = curve(acceptance)
    assert found[:4] == pytest.approx([alpha**k for k in range(1, 5)], abs=0.12)
    assert found == sorted(found, reverse=True)


def test_positions_that_were_never_drafted_follow_the_last_that_was() -> None:
    acceptance = Acceptance(Prior())
    watch(acceptance, 0.9, 4, 2000)
    found = curve(acceptance)
    assert found[8] / found[7] == pytest.approx(found[3] / found[2], abs=0.1)


def test_a_new_request_starts_from_what_others_achieved() -> None:
    prior = Prior()
    watch(Acceptance(prior), 0.2, 4, 500)
    assert curve(Acceptance(prior))[0] == pytest.approx(0.2, abs=0.1)


def test_a_request_soon_differs_from_the_others() -> None:
    prior = Prior()
    watch(Acceptance(prior), 0.1, 4, 200)
    mine = Acceptance(prior)
    watch(mine, 1.0, 4, 20)
    assert curve(mine)[0] > 0.75
    assert curve(Acceptance(prior))[0] < 0.5


def test_the_estimate_follows_a_change() -> None:
    acceptance = Acceptance(Prior())
    watch(acceptance, 0.9, 4, 300)
    watch(acceptance, 0.05, 4, 60)
    assert curve(acceptance)[0] < 0.3


def test_a_draft_says_nothing_about_positions_behind_the_first_refusal() -> None:
    acceptance = Acceptance(Prior())
    acceptance.observe([(4, 4, [0], False)])
    assert acceptance._judged[:4] == [1.0, 1.0, 0.0, 0.0]
    assert acceptance._accepted[:4] == [1.0, 0.0, 0.0, 0.0]


def test_old_evidence_fades_but_is_never_forgotten() -> None:
    acceptance = Acceptance(Prior())
    watch(acceptance, 0.0, 2, 100)
    for _ in range(50):
        acceptance.fade(0.5)
    assert acceptance._judged[0] / acceptance.unit == pytest.approx(PRIOR_WEIGHT)
    watch(acceptance, 1.0, 2, 8)
    assert curve(acceptance)[0] > 0.3


def test_a_tree_counts_its_nodes_best_first() -> None:
    """Node 2 holds most often: with one node only, a best-first drafter would have drafted it."""
    acceptance = Acceptance(Prior())
    random = Random(1)
    for _ in range(800):
        u = random.random()
        path = [2] if u < 0.6 else [0] if u < 0.8 else []
        acceptance.observe([(4, 3, path, True)])
    assert curve(acceptance)[:2] == pytest.approx([0.6, 0.2], abs=0.12)


def test_fill_is_the_share_of_the_budget_that_was_used() -> None:
    acceptance = Acceptance(Prior())
    for i in range(400):
        acceptance.observe([(4, 4 if i % 4 == 0 else 0, [], False)])
    assert acceptance.fill == pytest.approx(0.25, abs=0.05)
    assert Acceptance(acceptance.prior).fill == pytest.approx(0.35, abs=0.1)
