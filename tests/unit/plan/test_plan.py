"""Capacity planning: costs, the simulated replica against queueing theory, fleets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cli.app import app
from outrider.cli.errors import run
from outrider.errors import ConfigError
from outrider.plan.costs import (
    Curves,
    Hardware,
    ModelSize,
    Roofline,
    best_k,
    break_even_batch,
)
from outrider.plan.fleet import Goal, Replica, plan
from outrider.plan.simulate import Arrival, Load, percentile, simulate
from outrider.policy.measured import StepCosts
from outrider.theory import expected_tokens

HARDWARE = Hardware(bandwidth=1e12, flops=1e14, memory=8e10, efficiency=1.0, overhead_s=0.0)
TARGET = ModelSize(num_parameters=1e9, kv_bytes_per_token=1e5)
DRAFT = ModelSize(num_parameters=1e8)


@dataclass(frozen=True)
class Constant:
    """A pass costs the same whatever is in it; drafting is free."""

    seconds: float = 0.01

    def pass_s(self, num_tokens: int, context: float, num_sequences: int) -> float:
        return self.seconds

    def draft_s(self, num_sequences: int, num_draft_tokens: int) -> float:
        return 0.0

    def read_s(self, num_tokens: int) -> float:
        return 0.0


def test_a_pass_is_bound_by_reading_then_by_computing() -> None:
    costs = Roofline(hardware=HARDWARE, target=TARGET)
    assert costs.pass_s(1, 0, 1) == pytest.approx(2e9 / 1e12)
    assert costs.pass_s(1000, 0, 1) == pytest.approx(2 * 1e9 * 1000 / 1e14)
    assert costs.pass_s(1, 10_000, 1) == pytest.approx((2e9 + 1e9) / 1e12)
    two = Roofline(hardware=HARDWARE, target=TARGET, degree=2)
    assert costs.pass_s(1, 0, 1) / 2 < two.pass_s(1, 0, 1) < costs.pass_s(1, 0, 1) / 2 + 0.01


def test_speculation_pays_until_computing_costs_more_than_reading() -> None:
    costs = Roofline(hardware=HARDWARE, target=TARGET, draft=DRAFT)
    assert best_k(costs, 0.8, 1, 0) > 0
    assert best_k(costs, 0.8, 512, 0) == 0
    assert best_k(costs, 0.01, 1, 0) == 0
    even = break_even_batch(costs, 0.8, 0, 512)
    assert even is not None
    assert best_k(costs, 0.8, even - 1, 0) > 0


def test_what_does_not_fit_has_no_capacity() -> None:
    small = Hardware(bandwidth=1e12, flops=1e14, memory=1e9)
    assert Roofline(hardware=small, target=TARGET).capacity() < 0
    assert Roofline(hardware=HARDWARE, target=TARGET).capacity() == pytest.approx(7e10 / 1e5)


def test_curves_are_read_and_interpolated() -> None:
    record = {
        "verify_s": {"1": 0.001, "9": 0.003},
        "overhead_s": {"1": 0.0001},
        "draft_s": {"draft-model": {"1": {"1": 0.0002, "4": 0.0008}}},
    }
    curves = Curves.read(record, "draft-model")
    assert curves.pass_s(5, 0, 1) == pytest.approx(0.0021)
    assert curves.draft_s(3, 2) == pytest.approx(0.0004)
    with pytest.raises(ConfigError, match="doctor"):
        Curves.read(record, "ngram")


def test_the_drafter_s_reading_of_a_prompt_is_priced() -> None:
    record = {
        "verify_s": {"1": 0.001, "9": 0.003},
        "overhead_s": {"1": 0.0001},
        "draft_s": {"draft-model": {"1": {"1": 0.0002, "4": 0.0008}}},
        "reading_s": {"draft-model": {"100": 0.05}, "ngram": {"100": 0.0}},
    }
    curves = Curves.read(record, "draft-model")
    assert curves.read_s(50) == pytest.approx(0.025)
    load = Load(rate=0.01, prompt_tokens=200, output_tokens=20)
    reading_s = load.reading_s(curves)
    assert best_k(curves, 0.8, 1, 210) > 0
    assert best_k(curves, 0.8, 1, 210, reading_s) == 0  # 20 tokens do not pay for it


def test_a_pass_of_many_sequences_costs_what_the_doctor_measured_for_that_batch() -> None:
    """Each of them reads its own context."""
    record = {
        "verify_s": {"1": 0.001, "8": 0.002},
        "passes_s": {"1": {"1": 0.001, "8": 0.002}, "4": {"4": 0.003, "8": 0.004}},
        "overhead_s": {"1": 0.0},
        "draft_s": {"draft-model": {"1": {"1": 0.0002}}},
    }
    curves = Curves.read(record, "draft-model")
    assert curves.pass_s(8, 0, 1) == pytest.approx(0.002)
    assert curves.pass_s(8, 0, 4) == pytest.approx(0.004)
    assert 0.001 < curves.pass_s(2, 0, 2) < 0.003


def test_an_idle_replica_needs_a_pass_per_token() -> None:
    load = Load(rate=0.01, prompt_tokens=10, output_tokens=50)
    found = simulate(Constant(), load, num_requests=50)
    assert percentile(found.ttft_s, 0.5) == pytest.approx(0.01)
    assert percentile(found.tpot_s, 0.5) == pytest.approx(0.01)
    assert found.is_stable


def test_acceptance_speeds_up_by_what_theory_says() -> None:
    load = Load(rate=0.01, prompt_tokens=10, output_tokens=400)
    found = simulate(Constant(), load, alpha=0.7, num_requests=60)
    mean = sum(found.tpot_s) / len(found.tpot_s)
    assert mean == pytest.approx(0.01 / expected_tokens(0.7, 8), rel=0.05)


def test_littles_law_holds() -> None:
    load = Load(rate=20, prompt_tokens=10, output_tokens=40)
    found = simulate(Constant(), load, num_requests=2000)
    stay = sum(found.ttft_s) / len(found.ttft_s) + 0.01 * 40
    assert found.mean_batch * found.utilisation == pytest.approx(20 * stay, rel=0.1)
    assert found.tokens_per_s == pytest.approx(800, rel=0.1)


def test_too_much_is_noticed() -> None:
    load = Load(rate=100, prompt_tokens=10, output_tokens=100)
    assert not simulate(Constant(), load, max_sequences=4, num_requests=300).is_stable


def test_a_trace_and_a_number_of_drafts_are_followed() -> None:
    load = Load(rate=1, prompt_tokens=8, output_tokens=4)
    trace = [Arrival(0.0, 8, 5), Arrival(10.0, 8, 1)]
    found = simulate(Constant(), load, alpha=1.0, num_draft_tokens=3, trace=trace, warm_up=0.0)
    # The prompt's pass gives one token, the next pass three drafts and the target's own.
    assert (found.num_requests, found.num_tokens) == (2, 6)
    assert found.ttft_s == pytest.approx([0.01, 0.01])
    assert found.tpot_s == pytest.approx([0.01 / 4])
    assert found.duration_s == pytest.approx(10.01)


def test_acceptance_may_change_along_an_output() -> None:
    load = Load(rate=1, prompt_tokens=8, output_tokens=9)
    trace = [Arrival(0.0, 8, 9)]
    found = simulate(
        Constant(),
        load,
        alpha=0.5,
        alpha_from={0: 0.0, 5: 1.0},
        num_draft_tokens=3,
        trace=trace,
        warm_up=0.0,
    )
    # The prompt's pass and four more give a token each, the next one gives four.
    assert found.duration_s == pytest.approx(0.06)


@dataclass(frozen=True)
class PerToken(Constant):
    """A pass costs what its tokens do."""

    def pass_s(self, num_tokens: int, context: float, num_sequences: int) -> float:
        return num_tokens / 100


def test_the_last_token_is_never_a_draft() -> None:
    load = Load(rate=1, prompt_tokens=1, output_tokens=3)
    trace = [Arrival(0.0, 1, 3)]
    found = simulate(PerToken(), load, alpha=1.0, num_draft_tokens=3, trace=trace, warm_up=0.0)
    assert found.duration_s == pytest.approx(0.01 + 0.02)


@dataclass(frozen=True)
class Reading(Constant):
    """As above, but the drafter reads prompts."""

    def read_s(self, num_tokens: int) -> float:
        return num_tokens / 100


def test_a_drafter_reads_prompts_after_the_first_token() -> None:
    load = Load(rate=1, prompt_tokens=8, output_tokens=4)
    trace = [Arrival(0.0, 8, 5)]
    found = simulate(Reading(), load, alpha=1.0, num_draft_tokens=3, trace=trace, warm_up=0.0)
    assert found.ttft_s == pytest.approx([0.01])
    assert found.duration_s == pytest.approx(0.02 + 0.08)
    plain = simulate(Reading(), load, alpha=1.0, num_draft_tokens=0, trace=trace, warm_up=0.0)
    assert plain.duration_s == pytest.approx(0.05)


def test_drafts_that_do_not_pay_for_their_reading_are_left() -> None:
    assert best_k(Reading(), 0.8, 1, 0) > 0
    many = Load(rate=1, prompt_tokens=100, output_tokens=4)
    assert best_k(Reading(), 0.8, 1, 0, many.reading_s(Reading())) == 0


def test_steps_of_many_sequences_cost_their_overhead() -> None:
    measured = StepCosts({1: {1: 0.001, 9: 0.003}}, {1: 0.0, 4: 0.0003}, {})
    curves = Curves(measured, "draft-model")
    assert curves.pass_s(5, 0, 4) == pytest.approx(0.0023)
    assert curves.pass_s(5, 0, 2) == pytest.approx(0.0021)


def test_a_request_travels_before_it_is_admitted() -> None:
    load = Load(rate=1, prompt_tokens=8, output_tokens=4)
    trace = [Arrival(1.0, 8, 1)]
    found = simulate(Constant(), load, trace=trace, warm_up=0.0, latency_s=0.02)
    assert found.ttft_s == pytest.approx([0.03])


def test_memory_limits_the_batch() -> None:
    load = Load(rate=20, prompt_tokens=10, output_tokens=40)
    found = simulate(Constant(), load, capacity=100, num_requests=100)
    assert found.mean_batch < 4


def test_ten_thousand_requests_a_second_scale_in_proportion() -> None:
    replica = Replica(costs=Roofline(hardware=HARDWARE, target=TARGET, draft=DRAFT))

    def fleet(rate: float, alpha: float) -> int:
        load = Load(rate=rate, prompt_tokens=40, output_tokens=10)
        return plan(
            lambda degree: replica if degree == 1 else None,
            load,
            Goal(ttft_s=0.1, tpot_s=0.02),
            alpha=alpha,
            num_requests=100,
        ).num_replicas

    small, large = fleet(2000, 0.0), fleet(10_000, 0.0)
    assert large == pytest.approx(5 * small, rel=0.4)
    assert fleet(10_000, 0.8) <= large


def test_a_goal_that_no_fleet_keeps_is_refused() -> None:
    load = Load(rate=1, prompt_tokens=10, output_tokens=40)
    with pytest.raises(ConfigError, match="no fleet"):
        plan(
            lambda degree: Replica(costs=Constant()),
            load,
            Goal(tpot_s=0.001),
            alpha=0.0,
            num_requests=50,
        )


@pytest.mark.parametrize(
    "args",
    [
        ("--rate", "0"),
        ("--rate", "nan"),
        ("--rate", "inf"),
        ("--parameters", "0"),
        ("--draft-parameters", "-1"),
        ("--max-num-seqs", "0"),
        ("--price", "-1"),
    ],
)
def test_nonsense_costs_one_line(args: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["plan", *args]) == 2
    err = capsys.readouterr().err.strip()
    assert args[0] in err
    assert len(err.splitlines()) == 1


def test_the_command_prints_both(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["plan", "--rate", "1", "--price", "2", "--output-tokens", "8", "--json"]
    assert run(app, args) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["with"]["devices"] <= record["without"]["devices"]
    assert record["with"]["cost_per_million_tokens"] > 0
    assert run(app, ["plan", "--alpha", "2"]) == 2
    assert run(app, ["plan", "--curves", str(tmp_path / "none.json")]) == 2
