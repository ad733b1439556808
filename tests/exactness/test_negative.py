"""The harness must flag every known mistake: total variation above zero, in the known range."""

from __future__ import annotations

from fractions import Fraction

import pytest

from outrider.prove.biased import BIASED
from outrider.prove.drafters import chain, drafter
from outrider.prove.enumerate import Experiment
from outrider.prove.reference import block, coupled, token
from outrider.prove.toys import hashed


@pytest.mark.parametrize("name", BIASED)
def test_mistakes_are_flagged(name: str) -> None:
    injection = BIASED[name]
    distance = injection.experiment().total_variation()
    print(f"{name}: total variation {float(distance):.4f} ({injection.what})")
    assert distance > 0
    assert injection.low <= float(distance) <= injection.high


@pytest.mark.parametrize("name", BIASED)
def test_mistakes_are_flagged_on_other_models_too(name: str) -> None:
    """Not a property of one toy: over a few arbitrary pairs the mistake shows on most."""
    injection = BIASED[name]
    size = len(injection.target(()))
    seen = [
        injection.build(hashed(seed, size), hashed(seed + 60, size)).total_variation() > 0
        for seed in range(200, 206)
    ]
    assert sum(seen) >= 2


def test_the_two_token_counterexample() -> None:
    dist = BIASED["replace-from-p"].experiment().output_distribution()
    assert dist == {(0,): Fraction(7, 10), (1,): Fraction(3, 10)}


def test_reused_noise_harms_only_rules_that_look_past_the_refusal() -> None:
    """The token rule never consults noise behind its refusal; sample-match is a function of it."""
    everything = frozenset({"draft", "accept"})
    for rule in (token, coupled):
        for seed in range(4):
            experiment = Experiment(
                target=hashed(seed, 2),
                drafter=drafter(hashed(seed + 100, 2), chain(2)),
                rule=rule,
                horizon=4,
                num_steps=2,
                reused=everything,
            )
            assert experiment.total_variation() == 0
    experiment = Experiment(
        target=hashed(4, 2),
        drafter=drafter(hashed(104, 2), chain(2)),
        rule=block,
        horizon=4,
        num_steps=2,
        reused=everything,
    )
    assert experiment.total_variation() > 0
