"""A batch that drafts nothing goes on so while sequences come and go, without new decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any, cast

import pytest

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.events import StepTiming
from outrider.policy import VALID_STEPS, controller
from outrider.policy.allocation import StepModel
from outrider.policy.controller import AdaptivePolicy
from outrider.sampling import SamplingParams

from .simulator import GPU, NATIVE, Machine, View, fixed, measured, run


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[StepModel]:
    """Every allocation that was looked for."""
    found: list[StepModel] = []

    class Counted(StepModel):
        def __init__(self, *args: Any, **options: Any) -> None:
            found.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(controller, "StepModel", Counted)
    return found


CALL = 4  # steps that an executor runs in one call


def one_step(policy: AdaptivePolicy, views: Sequence[View], num_prompt: int = 0) -> list[int]:
    """With a decision of its own, which is returned."""
    seen, num = cast("list[ControlledView]", views), len(views)
    decision = policy.decide(seen, [16] * num, num + num_prompt)
    took = StepTiming(0.0, NATIVE.verify_s(num + num_prompt), 0.02, num, num + num_prompt)
    for _ in range(min(CALL, decision.valid_steps)):
        policy.observe(seen, [Proposal()] * num, [Verdict([], 0)] * num, took)
    return decision.budgets


def resting(decisions: list[StepModel], num: int = 24) -> tuple[AdaptivePolicy, list[View]]:
    """A policy that has found out that nothing pays and has just decided so, and its batch."""
    policy = AdaptivePolicy(measured(NATIVE))
    run(NATIVE, lambda step, sequence: 0.0, policy, num_steps=600, batch=lambda _: num)
    views = [View(1000 + i) for i in range(num)]
    for _ in range(4 * VALID_STEPS):
        before = len(decisions)
        if not any(one_step(policy, views)) and len(decisions) > before:
            return policy, views
    raise AssertionError("it never rests")


def test_newcomers_are_no_reason_to_decide_anew(decisions: list[StepModel]) -> None:
    policy, views = resting(decisions)
    decisions.clear()
    views = [*views[1:], View(2000)]
    assert not any(one_step(policy, views))
    assert not decisions
    for i in range(4 * VALID_STEPS):  # but it does not stand for ever
        views = [*views[1:], View(2100 + i)]
        one_step(policy, views)
    assert decisions


@pytest.mark.parametrize("unlike", ["proposer", "temperature", "batch"])
def test_another_kind_of_newcomer_ends_the_rest(unlike: str, decisions: list[StepModel]) -> None:
    policy, views = resting(decisions)
    decisions.clear()
    newcomer = View(4000)
    if unlike == "proposer":
        newcomer.proposer = "another"
    elif unlike == "temperature":
        newcomer.params = replace(newcomer.params, temperature=1.0)
    else:
        views = views[: len(views) // 2]
    one_step(policy, [*views[1:], newcomer])
    assert len(decisions) == 1


def test_newcomers_in_a_batch_that_drafts_draft_like_the_others(
    decisions: list[StepModel],
) -> None:
    policy, num = AdaptivePolicy(measured(NATIVE)), 6
    run(NATIVE, lambda step, sequence: 0.9, policy, num_steps=600, batch=lambda _: num)
    views = [View(1000 + i) for i in range(num)]
    seen = cast("list[ControlledView]", views)
    budgets: list[int] = []
    for i in range(8):
        before = len(decisions)
        budgets = policy.decide(seen, [16] * num, num).budgets
        if all(budgets) and len(decisions) > before:
            break
        seen = [*seen[1:], cast("ControlledView", View(2000 + i))]
    decisions.clear()
    seen = [*seen[1:], cast("ControlledView", View(3000))]
    carried = policy.decide(seen, [16] * num, num + 50)
    assert carried.budgets == [*budgets[1:], median_low(budgets)]
    assert min(carried.budgets) > 0
    assert not decisions
    policy.costs.read_s["simulated"] = 0.01
    short = View(3001, num_tokens=3001, num_prompt_tokens=3000)
    short.params = SamplingParams(max_tokens=8)  # its drafter would read for nothing
    seen = [*seen[1:], cast("ControlledView", short)]
    assert policy.decide(seen, [16] * num, num).budgets[-1] == 0
    assert not decisions


def test_a_newcomer_among_few_is_asked_at_once(decisions: list[StepModel]) -> None:
    """The others may be off for what their own texts are like."""
    policy = AdaptivePolicy(measured(NATIVE))
    run(NATIVE, lambda step, sequence: 0.0, policy, num_steps=600, batch=lambda _: 3)
    views = [View(1000 + i) for i in range(3)]
    one_step(policy, views)
    decisions.clear()
    one_step(policy, [*views, View(5000)])
    assert len(decisions) == 1


@pytest.mark.parametrize(("machine", "num"), [(NATIVE, 4), (GPU, 6)], ids=["native", "gpu"])
@pytest.mark.parametrize("length", [60, 10**9])
def test_a_batch_is_on_again_when_drafts_begin_to_pay(
    machine: Machine, num: int, length: int
) -> None:
    """Whether sequences come and go or stay. One alone would gain nothing on a GPU: it is all of
    them together that pay for a round of drafting."""

    def recovering(step: int, sequence: int) -> float:
        return 0.02 if step < 1000 else 0.9

    options: dict[str, Any] = {"num_steps": 3000, "batch": lambda step: num, "length": length}
    trace = run(machine, recovering, AdaptivePolicy(measured(machine)), **options)
    plain = fixed(machine, recovering, 0, **options)
    assert trace.rate(200, 1000) > 0.97 * plain.rate(200, 1000)
    good = max(fixed(machine, recovering, k, **options).rate(2000) for k in range(1, 6))
    gained = trace.rate(2000) / plain.rate(2000) - 1.0
    print(f"{gained:.2f} of {good / plain.rate(2000) - 1.0:.2f}")
    assert gained > 0.4 * (good / plain.rate(2000) - 1.0)
