"""The law test on the real rules, and on every known mistake."""

from __future__ import annotations

import pytest

from outrider.contracts import Draw, Proposal, Verifier
from outrider.prove.biased import BIASED
from outrider.prove.cases import experiments
from outrider.prove.output_distribution import (
    HORIZON,
    ExperimentSampler,
    RuleSampler,
    View,
    examine_output,
    in_floats,
    joint_distribution,
)
from outrider.prove.toys import fixed, hashed
from outrider.verifiers import make_verifier

P, Q = hashed(7, 3), hashed(8, 3)
PAIRINGS = [
    ("coupled", Draw.COUPLED),
    ("coupled", Draw.DETERMINISTIC),
    ("coupled", Draw.WITHOUT_REPLACEMENT),
    ("token", Draw.SAMPLED),
    ("token", Draw.DETERMINISTIC),
    ("block", Draw.SAMPLED),
    ("tree", Draw.SAMPLED),
    ("tree", Draw.WITHOUT_REPLACEMENT),
    ("tree", Draw.DETERMINISTIC),
]


@pytest.mark.parametrize(("rule", "draw"), PAIRINGS)
def test_the_real_rules_pass(rule: str, draw: Draw) -> None:
    sampler = RuleSampler(P, Q, make_verifier(rule), draw)
    test = examine_output(joint_distribution(P, HORIZON), sampler, error=0.07)
    assert test.verdict.num_samples == test.plan.num_samples > 3000
    assert not test.verdict.rejected, test.verdict


class KeepsEverything:
    """The simplest wrong verifier: drafts are always right."""

    name = "gullible"
    draws = frozenset(Draw)
    trees = False

    def __init__(self) -> None:
        self._honest = make_verifier("token")

    def verify(self, views: object, proposals: list[Proposal], dists: object) -> object:
        verdicts = self._honest.verify(views, proposals, dists)  # type: ignore[arg-type]
        for verdict, proposal in zip(verdicts, proposals, strict=True):
            verdict.path[:] = range(len(proposal))
        return verdicts


def test_a_wrong_tensor_rule_is_flagged_early() -> None:
    rule: Verifier = KeepsEverything()  # type: ignore[assignment]
    test = examine_output(joint_distribution(P, HORIZON), RuleSampler(P, Q, rule, Draw.SAMPLED))
    assert test.verdict.rejected
    assert test.verdict.num_samples == test.plan.looks[0]


@pytest.mark.parametrize("name", BIASED)
def test_every_known_mistake_is_flagged(name: str) -> None:
    injection = BIASED[name]
    experiment = injection.build(in_floats(injection.target), in_floats(injection.draft))
    dist = joint_distribution(injection.target, experiment.horizon)
    test = examine_output(dist, ExperimentSampler(experiment))
    print(f"{name}: p = {test.verdict.p_value:.1g} after {test.verdict.num_samples}")
    assert test.verdict.rejected


@pytest.mark.parametrize("rule", ["token", "block"])
def test_right_rules_with_random_dice_pass(rule: str) -> None:
    """The same sampler, the same size of test: so it is the mistakes that are flagged."""
    title, experiment = list(experiments(rule, Draw.SAMPLED, False))[2]
    assert title.startswith("2 drafts")
    dist = joint_distribution(experiment.target, experiment.horizon)
    assert not examine_output(dist, ExperimentSampler(experiment), error=0.03).verdict.rejected


def test_joint_laws() -> None:
    dist = joint_distribution(fixed(3, 1), 2)
    assert dist == {(0, 0): 0.5625, (0, 1): 0.1875, (1, 0): 0.1875, (1, 1): 0.0625}
    assert sum(joint_distribution(P, 3).values()) == pytest.approx(1)


def test_drafts_have_the_law_they_claim() -> None:
    sampler = RuleSampler(P, Q, make_verifier("token"), Draw.SAMPLED)
    views = [View(i) for i in range(4000)]
    proposals = sampler.propose(views)
    for token in range(3):
        share = sum(p.tokens[0] == token for p in proposals) / len(proposals)
        assert share == pytest.approx(float(Q(())[token]), abs=0.03)
    again = sampler.propose(views)
    assert [p.tokens for p in again] == [p.tokens for p in proposals]


@pytest.mark.parametrize(
    ("rule", "draw"), [("coupled", Draw.COUPLED), ("block", Draw.SAMPLED), ("tree", Draw.SAMPLED)]
)
def test_the_enumerated_cases_are_exact(rule: str, draw: Draw) -> None:
    cases = list(experiments(rule, draw, rule == "tree", (P, Q)))
    assert len(cases) >= 25
    assert any("your models" in title for title, _ in cases)
    for title, experiment in cases:
        assert experiment.total_variation() == 0, title
