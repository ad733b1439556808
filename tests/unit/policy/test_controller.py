"""The controller in the simulator: near the best K, off when it should be, on again when it may."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from time import perf_counter
from typing import Any, cast

import pytest

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.events import StepTiming
from outrider.policy.controller import AdaptivePolicy
from outrider.policy.costs import Costs, CostTable, interpolate
from outrider.sampling import SamplingParams

from .simulator import (
    FREE_DRAFTS,
    GPU,
    LIBRARY,
    MIXTURE,
    NATIVE,
    Acceptance,
    Machine,
    View,
    best_fixed,
    fixed,
    measured,
    run,
)

MACHINES = {"native": NATIVE, "library": LIBRARY, "gpu": GPU, "free drafts": FREE_DRAFTS}
each_machine = pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)


def constant(alpha: float) -> Acceptance:
    return lambda step, sequence: alpha


def controller(machine: Machine) -> AdaptivePolicy:
    return AdaptivePolicy(measured(machine))


def scaled(table: CostTable, factor: Callable[[int], float]) -> CostTable:
    rows = {
        1 << batch: [factor(n) * cell for n, cell in enumerate(table.row(batch, 64))]
        for batch in (0, 2, 4)
    }
    return CostTable(rows, measured=True)


def average_rate(machine: Machine, acceptance: Acceptance, **options: Any) -> float:
    """Over a few runs: whether one starts with three refusals is luck."""
    runs = [run(machine, acceptance, controller(machine), seed=s, **options) for s in range(3)]
    return mean(trace.rate() for trace in runs)


@each_machine
@pytest.mark.parametrize("alpha", [0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
def test_within_three_percent_of_the_best_fixed_k(machine: Machine, alpha: float) -> None:
    best, rate = best_fixed(machine, constant(alpha), num_steps=2)
    reached = average_rate(machine, constant(alpha), num_steps=1200)
    print(f"best K = {best}: {reached / rate:.3f} of it")
    # K = 16 is nearly as good as K = 2 there, and estimates of long drafts vary the most.
    two_optima = machine is LIBRARY and alpha == 0.9
    assert reached >= (0.96 if two_optima else 0.97) * rate


@each_machine
@pytest.mark.parametrize("alpha", [0.6, 0.85])
def test_what_the_engine_adds_to_measured_calls_is_learnt(machine: Machine, alpha: float) -> None:
    """Taken for a factor, a constant would make every further draft look too dear."""
    engine = replace(machine, around_draft=0.12, around_verify=0.15)
    best, rate = best_fixed(engine, constant(alpha), num_steps=2)
    runs = [run(engine, constant(alpha), controller(machine), num_steps=1000, seed=s)
            for s in range(2)]  # fmt: skip
    reached = mean(trace.rate(50) for trace in runs)
    print(f"best K = {best}: {reached / rate:.3f} of it")
    assert reached >= 0.97 * rate


@each_machine
@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_prices_from_a_busy_moment_are_found_out(machine: Machine, alpha: float) -> None:
    costs = measured(machine)
    wrong = Costs(
        scaled(costs.verify, lambda n: 2.5 if n > 1 else 1.0),
        {name: scaled(table, lambda n: 4.0) for name, table in costs.drafts.items()},
    )
    _, rate = best_fixed(machine, constant(alpha), num_steps=2)
    trace = run(machine, constant(alpha), AdaptivePolicy(wrong), num_steps=800)
    assert trace.rate(400) >= 0.8 * rate


@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_a_measurement_beside_other_load_is_found_out_by_the_first_steps(alpha: float) -> None:
    """Waiting for a processor took most of it, so that further tokens looked free."""
    machine = Machine(interpolate({1: 1.0, 5: 1.6, 9: 2.25, 17: 3.6, 33: 6.5, 600: 120.0}))
    _, rate = best_fixed(machine, constant(alpha), num_steps=2)
    row = interpolate({0: 11.9, 1: 11.9, 8: 12.5, 16: 17.0, 64: 41.0})
    runs = [
        run(machine, constant(alpha), AdaptivePolicy(Costs(CostTable({1: row}, measured=True))),
            num_steps=400, ahead=16, seed=seed)
        for seed in range(3)
    ]  # fmt: skip
    reached = mean(trace.rate(100) for trace in runs)
    print(f"{reached / rate:.3f} of the best fixed K")
    assert reached >= 0.88 * rate


@each_machine
@pytest.mark.parametrize("batch", [1, 8])
def test_a_junk_drafter_costs_at_most_three_percent(machine: Machine, batch: int) -> None:
    junk = constant(0.01)
    options = {"num_steps": 800, "batch": lambda step: batch, "length": 200}
    plain = fixed(machine, junk, 0, **options).rate()
    trace = run(machine, junk, controller(machine), **options)  # type: ignore[arg-type]
    print(f"{trace.rate() / plain:.3f} of plain")
    assert trace.rate() >= 0.97 * plain


@each_machine
def test_a_drafter_that_was_never_right_before_costs_next_to_nothing(machine: Machine) -> None:
    options: dict[str, Any] = {"num_steps": 288, "length": 96, "ahead": 16}
    plain = fixed(machine, constant(0.0), 0, **options).rate()
    policy = controller(machine)
    policy.costs.refused["simulated"] = 40
    trace = run(machine, constant(0.0), policy, **options)
    print(f"{trace.rate() / plain:.3f} of plain")
    assert trace.rate() >= 0.99 * plain


def test_a_drafter_that_was_never_right_before_is_tried_again() -> None:
    policy = controller(NATIVE)
    policy.costs.refused["simulated"] = 40
    _, rate = best_fixed(NATIVE, constant(0.8), num_steps=2)
    trace = run(NATIVE, constant(0.8), policy, num_steps=4000, ahead=16)
    print(f"{trace.rate(2500) / rate:.3f} of the best fixed K")
    assert trace.rate(2500) >= 0.95 * rate


@each_machine
def test_off_when_drafts_collapse_and_on_again_when_they_recover(machine: Machine) -> None:
    def collapsing(step: int, sequence: int) -> float:
        return 0.02 if 300 <= step < 900 else 0.8

    runs = [run(machine, collapsing, controller(machine), num_steps=1500, seed=s) for s in range(4)]
    plain = fixed(machine, constant(0.0), 0, num_steps=2).rate()
    _, good = best_fixed(machine, constant(0.8), num_steps=2)
    before = mean(trace.rate(50, 300) for trace in runs) / good
    collapsed = mean(trace.rate(400, 900) for trace in runs) / plain
    after = mean(trace.rate(1000) for trace in runs) / good
    print(f"before {before:.3f} of the best, collapsed {collapsed:.3f} of plain, after {after:.3f}")
    assert before >= 0.93
    assert collapsed >= 0.96
    assert after >= 0.95


@each_machine
def test_drifting_acceptance_is_followed(machine: Machine) -> None:
    """No single K is right throughout, so the controller beats all of them."""

    def drifting(step: int, sequence: int) -> float:
        return 0.5 + 0.4 * math.sin(step / 150)

    _, rate = best_fixed(machine, drifting, num_steps=950)
    trace = run(machine, drifting, controller(machine), num_steps=950)
    print(f"{trace.rate() / rate:.3f} of the best fixed K")
    assert trace.rate() >= rate


@each_machine
def test_mixed_requests_are_told_apart(machine: Machine) -> None:
    def mixed(step: int, sequence: int) -> float:
        return 0.85 if sequence % 2 else 0.05

    options = {"num_steps": 1500, "length": 150}
    _, rate = best_fixed(machine, mixed, **options)
    reached = average_rate(machine, mixed, **options)
    print(f"{reached / rate:.3f} of the best fixed K")
    assert reached >= rate


@each_machine
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_never_slower_than_plain_as_the_batch_grows(machine: Machine, alpha: float) -> None:
    ctrl = controller(machine)
    for batch in (1, 2, 4, 8, 16, 32):
        options = {"num_steps": 150, "batch": lambda step, batch=batch: batch, "length": 300}
        plain = fixed(machine, constant(alpha), 0, **options).rate()
        trace = run(machine, constant(alpha), ctrl, **options)  # type: ignore[arg-type]
        print(f"batch {batch}: {trace.rate() / plain:.3f} of plain")
        assert trace.rate() >= 0.98 * plain


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_a_mixture_of_experts_is_never_slower_than_plain(alpha: float) -> None:
    """Its drafts are expensive in a small batch and nearly free in a large one."""
    ctrl = controller(MIXTURE)
    for batch in (1, 2, 4, 8, 16, 32):
        options = {"num_steps": 300, "batch": lambda step, batch=batch: batch, "length": 300}
        plain = fixed(MIXTURE, constant(alpha), 0, **options).rate()
        trace = run(MIXTURE, constant(alpha), ctrl, **options)  # type: ignore[arg-type]
        print(f"batch {batch}: {trace.rate() / plain:.3f} of plain")
        assert trace.rate() >= 0.98 * plain


def test_prices_of_a_dense_model_lose_on_a_mixture_of_experts() -> None:
    """What they say to draft there is slower than plain decoding; measured ones say not to."""
    acceptance = constant(0.5)
    k, _ = best_fixed(NATIVE, acceptance, num_steps=2)
    plain = fixed(MIXTURE, acceptance, 0, num_steps=2).rate()
    assert k > 0
    assert fixed(MIXTURE, acceptance, k, num_steps=2).rate() < 0.9 * plain
    runs = [run(MIXTURE, acceptance, controller(NATIVE), num_steps=1000, seed=s) for s in range(3)]
    reached = mean(trace.rate(200) for trace in runs) / plain
    print(f"from a dense model's prices: {reached:.3f} of plain")
    assert reached >= 0.98


@each_machine
@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.8])
def test_trees(machine: Machine, alpha: float) -> None:
    _, rate = best_fixed(machine, constant(alpha), num_steps=2, tree=True)
    reached = average_rate(machine, constant(alpha), num_steps=600, tree=True)
    print(f"{reached / rate:.3f} of the best fixed number of nodes")
    assert reached >= 0.93 * rate


CALLS = {"ahead": 16, "length": 200}


def calling(machine: Machine) -> Machine:
    """Computes several steps in one call, whose beginning takes a third of a plain pass."""
    return replace(machine, begin=0.35)


@each_machine
@pytest.mark.parametrize("batch", [1, 8])
def test_a_junk_drafter_does_not_cut_calls_short(machine: Machine, batch: int) -> None:
    options = {"num_steps": 1200, "batch": lambda step: batch, **CALLS}
    plain = fixed(calling(machine), constant(0.01), 0, **options).rate(400)
    trace = run(calling(machine), constant(0.01), controller(machine), **options)  # type: ignore[arg-type]
    print(f"{trace.rate(400) / plain:.3f} of plain")
    assert trace.rate(400) >= 0.97 * plain


@each_machine
@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_near_the_best_fixed_k_in_calls(machine: Machine, alpha: float) -> None:
    _, rate = best_fixed(calling(machine), constant(alpha), num_steps=400, **CALLS)
    reached = average_rate(calling(machine), constant(alpha), num_steps=1200, **CALLS)
    print(f"{reached / rate:.3f} of it")
    assert reached >= 0.96 * rate


@each_machine
def test_where_prices_are_far_too_low_the_clock_stops_drafts(machine: Machine) -> None:
    costs = measured(machine)
    wrong = Costs(CostTable({1: [costs.verify.seconds(0, 1)] * 65}, measured=True), costs.drafts)
    options = {"num_steps": 600, "batch": lambda step: 64, "ahead": 16}
    plain = fixed(machine, constant(0.2), 0, **options).rate()
    trace = run(machine, constant(0.2), AdaptivePolicy(wrong), **options)  # type: ignore[arg-type]
    print(f"{trace.rate(50) / plain:.3f} of plain once a few calls were clocked")
    assert trace.rate(50) >= 0.95 * plain


@pytest.mark.parametrize("num_slow", [8, 16, 24])
def test_drafts_that_pay_survive_a_slow_moment_of_the_machine(num_slow: int) -> None:
    def slowness(step: int) -> float:
        return 4.0 if 304 <= step < 304 + num_slow else 1.0

    options: dict[str, Any] = {"batch": lambda step: 4, "ahead": 16, "num_steps": 1000}
    trace = run(NATIVE, constant(0.8), controller(NATIVE), slowness=slowness, **options)
    on = mean(max(budgets) > 0 for budgets in trace.budgets[304:])
    print(f"on in {on:.3f} of the steps from then on")
    assert on > 0.85


def test_plain_decoding_is_looked_at_again_even_where_drafts_win_by_far() -> None:
    """It may have been seen in a slow moment only."""
    trace = run(GPU, constant(0.9), controller(GPU), ahead=16, num_steps=6000)
    off = [budgets == [0] for budgets in trace.budgets[100:]]
    assert any(off)
    assert mean(off) < 0.01


def test_a_proposer_that_seldom_finds_anything_stays_on_when_it_is_cheap() -> None:
    options = {"num_steps": 1000, "fill": 0.1}
    trace = run(FREE_DRAFTS, constant(0.8), controller(FREE_DRAFTS), **options)  # type: ignore[arg-type]
    asked = sum(budgets[0] > 0 for budgets in trace.budgets)
    assert asked > 900


def test_without_a_measurement_the_first_steps_teach_the_costs() -> None:
    for machine in (NATIVE, GPU):
        _, rate = best_fixed(machine, constant(0.8), num_steps=2)
        trace = run(machine, constant(0.8), AdaptivePolicy(), num_steps=1000)
        assert trace.rate() >= 0.9 * rate


# --- the contract -----------------------------------------------------------------------------


def budget(ctrl: AdaptivePolicy, views: list[View], limits: list[int], tokens: int) -> list[int]:
    return ctrl.decide(cast("list[ControlledView]", views), limits, tokens).budgets


def test_requests_with_a_k_of_their_own_are_left_alone() -> None:
    ctrl = controller(NATIVE)
    views = [View(0, adaptive=False), View(1), View(2, adaptive=False)]
    assert budget(ctrl, views, [3, 16, 0], 3)[::2] == [3, 0]
    assert budget(ctrl, views[:1], [7], 1) == [7]
    timing = StepTiming(0.1, 1.0, 0.0, 1, 8)
    ctrl.observe(
        cast("list[ControlledView]", views[:1]), [Proposal([1] * 7)], [Verdict([], 0)], timing
    )


def test_a_recommended_number_holds_until_drafts_are_judged() -> None:
    policy = controller(NATIVE)
    policy.costs.first["simulated"] = 3
    views = cast("list[ControlledView]", [View(1), View(2)])
    assert policy.decide(views, [16, 2], 2).budgets == [3, 2]
    trace = run(NATIVE, constant(0.97), policy, num_steps=200)
    assert mean(k for (k,) in trace.budgets[100:]) > 5


def test_limits_are_respected() -> None:
    ctrl = controller(GPU)
    run(GPU, constant(0.97), ctrl, num_steps=100)
    view = View(10**6)
    assert budget(ctrl, [view], [16], 1)[0] > 3
    assert budget(ctrl, [view], [3], 1) == [3]
    assert budget(ctrl, [view], [0], 1) == [0]


def test_what_others_prefill_does_not_change_the_choice_where_tokens_stay_cheap() -> None:
    ctrl = controller(GPU)
    run(GPU, constant(0.8), ctrl, num_steps=200)
    alone = budget(ctrl, [View(10**6)], [16], 1)[0]
    beside = budget(ctrl, [View(10**6 + 1)], [16], 200)[0]
    assert abs(alone - beside) <= 2


def test_a_released_sequence_is_forgotten() -> None:
    ctrl = controller(NATIVE)
    run(NATIVE, constant(0.8), ctrl, num_steps=301, length=10**6)
    assert len(ctrl._tracks) == 1
    ctrl.release(max(ctrl._tracks))
    ctrl.release(12345)  # unknown ids are fine
    assert not ctrl._tracks


def test_each_proposer_is_measured_once_when_first_used() -> None:
    seen: list[str] = []

    def measure(costs: Costs, proposer: str) -> None:
        seen.append(proposer)

    ctrl = AdaptivePolicy(measured(NATIVE), measure)
    ctrl.prepare("ngram")
    for view in (View(0, proposer="ngram"), View(1, proposer="draft-model"), View(2)):
        budget(ctrl, [view], [4], 1)
    budget(ctrl, [View(3, proposer="draft-model")], [4], 1)
    assert seen == ["ngram", "draft-model", "simulated"]


def test_a_budget_depends_on_finished_steps_only() -> None:
    """The ratio rules' condition: two runs with the same past choose the same budgets."""
    first = run(NATIVE, constant(0.7), controller(NATIVE), num_steps=300, seed=5)
    again = run(NATIVE, constant(0.7), controller(NATIVE), num_steps=300, seed=5)
    assert first.budgets == again.budgets


def test_a_step_of_one_sequence_takes_microseconds() -> None:
    ctrl = controller(NATIVE)
    views = cast("list[ControlledView]", [View(0)])
    proposals, verdicts = [Proposal([0] * 4)], [Verdict([0, 1], 0)]
    timing = StepTiming(0.4, 1.1, 0.02, 1, 5)
    fastest = math.inf
    for _ in range(20):
        started = perf_counter()
        for _ in range(20):
            ctrl.decide(views, [16], 1)
            ctrl.observe(views, proposals, verdicts, timing)
        fastest = min(fastest, (perf_counter() - started) / 20)
    print(f"{fastest * 1e6:.1f} µs")
    assert fastest < 400e-6  # about 15 on a quiet machine


def test_a_probe_beside_as_many_drafts_as_are_looked_at() -> None:
    """Seven sequences that are always right leave no room in the row of passes for the eighth."""
    cheap = replace(FREE_DRAFTS, verify=[1 + 0.005 * n for n in range(200)])

    def acceptance(step: int, sequence: int) -> float:
        return 0.0 if sequence == 7 else 1.0

    trace = run(cheap, acceptance, controller(cheap), batch=lambda step: 8, num_steps=400)
    assert max(map(sum, trace.budgets)) >= 64
    assert min(budgets[7] for budgets in trace.budgets) == 0


@pytest.mark.parametrize(("num_left", "drafts"), [(20, False), (1 << 20, True)])
def test_a_long_text_is_not_read_for_a_short_answer(num_left: int, drafts: bool) -> None:
    """Nobody has read yet, so that what reading takes is not known."""
    adaptive = controller(NATIVE)
    view = View(0, num_tokens=301, num_prompt_tokens=300)
    view.params = SamplingParams(max_tokens=num_left)
    # Somebody else's prompt is in the pass, so that nothing is tried.
    budgets = budget(adaptive, [view], [8], 5)
    assert any(budgets) == drafts


def test_a_lookup_in_the_pass_over_the_prompt_says_nothing_about_drafting() -> None:
    adaptive = controller(NATIVE)
    view = View(0, num_tokens=100, num_prompt_tokens=100)
    views = cast("list[ControlledView]", [view])
    before = adaptive.costs.draft_s("simulated", 0, 4)
    for _ in range(40):
        view.id, view.num_tokens = view.id + 1, 100
        (k,) = adaptive.decide(views, [4], 1).budgets
        view.num_tokens += 1
        adaptive.observe(
            views, [Proposal([1] * k)], [Verdict([], 0)], StepTiming(1e-9, 1.0, 0, 1, 1 + k)
        )
    assert adaptive.costs.draft_s("simulated", 0, 4) == pytest.approx(before, rel=0.2)
