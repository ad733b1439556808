"""A batch that drafts nothing goes on so while sequences come and go: deciding anew for each of
them would cost more than drafts ever save there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.control import adaptive
from outrider.control.adaptive import MOST_RESTED, MOST_STEPS, AdaptiveController
from outrider.control.allocation import Step
from outrider.events import StepTiming

from .simulator import GPU, NATIVE, Machine, View, fixed, measured, run


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every allocation that was looked for."""
    found: list[Step] = []

    class Counted(Step):
        def __init__(self, *args: Any, **options: Any) -> None:
            found.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(adaptive, "Step", Counted)
    return found


def one_step(
    controller: AdaptiveController, views: Sequence[View], num_prompt: int = 0
) -> list[int]:
    """With a decision of its own, which is returned."""
    seen, num = cast("list[ControlledView]", views), len(views)
    decision = controller.decide(seen, [16] * num, num + num_prompt)
    took = StepTiming(0.0, NATIVE.verify_s(num + num_prompt), 0.02, num, num + num_prompt)
    for _ in range(decision.valid_steps):
        controller.observe(seen, [Proposal()] * num, [Verdict([], 0)] * num, took)
    return decision.budgets


def resting(num: int = 24) -> tuple[AdaptiveController, list[View]]:
    """A controller that has found out that nothing pays, and the batch it knows."""
    controller = AdaptiveController(measured(NATIVE))
    num_steps = 600
    run(NATIVE, lambda step, sequence: 0.0, controller, num_steps=num_steps, batch=lambda _: num)
    views = [View(1000 + i) for i in range(num)]
    for _ in range(4 * MOST_RESTED // MOST_STEPS):
        one_step(controller, views)
        if controller._now.missing is not None and controller._now.num_rested == 0:
            return controller, views
    raise AssertionError("it never rests")


def test_who_comes_and_goes_is_no_reason_to_decide_anew(decisions: list[Step]) -> None:
    controller, views = resting()
    decisions.clear()
    for i in range(MOST_RESTED // MOST_STEPS - 2):
        with_prompt = [*views, View(2000 + i)]
        assert not any(one_step(controller, with_prompt, num_prompt=30))
        views = with_prompt[1:]
        assert not any(one_step(controller, views))
    assert not decisions
    for _ in range(3):  # but it does not stand for ever
        one_step(controller, views)
    assert len(decisions) == 1


def test_steps_of_a_changing_batch_are_learnt_from() -> None:
    """It rests, but the price of a plain step and what is saved for a probe go on."""
    controller, views = resting()
    (source,) = controller._sources.values()
    purse = source.purses[5]
    before = controller.costs.verify.seconds(0, len(views), 5)
    for i in range(4):
        views = [*views[1:], View(3000 + i)]
        seen, num = cast("list[ControlledView]", views), len(views)
        controller.decide(seen, [16] * num, num)
        took = StepTiming(0.0, 0.9 * before, 0.0, num, num)
        controller.observe(seen, [Proposal()] * num, [Verdict([], 0)] * num, took)
    controller._learn()
    assert source.purses[5] > purse
    assert controller.costs.verify.seconds(0, len(views), 5) < before


@pytest.mark.parametrize("unlike", ["proposer", "temperature", "batch"])
def test_another_kind_of_newcomer_ends_the_rest(unlike: str, decisions: list[Step]) -> None:
    controller, views = resting()
    decisions.clear()
    newcomer = View(4000)
    if unlike == "proposer":
        newcomer.proposer = "another"
    elif unlike == "temperature":
        newcomer.params = replace(newcomer.params, temperature=1.0)
    else:
        views = views[: len(views) // 2]
    one_step(controller, [*views[1:], newcomer])
    assert len(decisions) == 1


def test_a_newcomer_among_few_is_asked_at_once(decisions: list[Step]) -> None:
    """The others may be off for what their own texts are like."""
    controller, views = resting(3)
    decisions.clear()
    one_step(controller, [*views, View(5000)])
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
    trace = run(machine, recovering, AdaptiveController(measured(machine)), **options)
    plain = fixed(machine, recovering, 0, **options)
    assert trace.rate(200, 1000) > 0.97 * plain.rate(200, 1000)
    good = max(fixed(machine, recovering, k, **options).rate(2000) for k in range(1, 6))
    gained = trace.rate(2000) / plain.rate(2000) - 1.0
    print(f"{gained:.2f} of {good / plain.rate(2000) - 1.0:.2f}")
    assert gained > 0.4 * (good / plain.rate(2000) - 1.0)
