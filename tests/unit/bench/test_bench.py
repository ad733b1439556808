"""The benchmark's parts: what it reads, how it times and compares, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from outrider.bench.contenders import (
    PLAIN,
    FullBatch,
    Ours,
    Run,
    fit_together,
    make_jobs,
    plain,
    race,
)
from outrider.bench.decode import needs_outputs, ours, rows_of
from outrider.bench.formula import BareCosts, BareCycle
from outrider.bench.measure import measure, row
from outrider.bench.report import Result, cell, read_result
from outrider.bench.statistics import estimate
from outrider.bench.synthetic import SyntheticProposer, add_synthetic
from outrider.bench.workloads import HOT, Prompt, load_workload, workload_names
from outrider.contracts import Needs, Proposer, SequenceView
from outrider.draft_plans import DraftPlan, EarlyExit, Propose, Script
from outrider.engine.engine import Engine
from outrider.engine.lane import take_turns
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, RequestError, UnknownName
from outrider.llm import LLM
from outrider.options import read_numbers
from outrider.testing import write_tiny_llama

PROMPTS = [Prompt("the quick brown fox"), Prompt("jumps over", temperature=1.0)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("bench")
    target = write_tiny_llama(folder / "target", vocab_size=128)
    draft = write_tiny_llama(folder / "draft", vocab_size=128, num_layers=1)
    return LLM(str(target), draft_model=str(draft), num_draft_tokens=4).engine


# --- workloads --------------------------------------------------------------------------------


def test_shipped_workloads_have_prompts_and_temperatures() -> None:
    for name in workload_names():
        found = load_workload(name)
        assert 8 <= len(found.prompts) <= 64
        assert all(prompt.text for prompt in found.prompts)
    assert {p.temperature for p in load_workload("hot").prompts} == {HOT}
    assert {p.temperature for p in load_workload("mixed").prompts} == {0.0, HOT}
    assert all(p.prediction for p in load_workload("edit").prompts)
    assert len(load_workload("code", 3).prompts) == 3
    assert {p.temperature for p in load_workload("code").at_temperature(0.7).prompts} == {0.7}


def test_prompts_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "one\\ntwo", "prediction": "three"}\n\nfour\n')
    found = load_workload(str(file))
    assert found.name == "mine"
    assert found.prompts == [Prompt("one\ntwo", "three"), Prompt("four")]
    file.write_text('{"prompt": 3}')
    with pytest.raises(RequestError, match="line 1"):
        load_workload(str(file))
    with pytest.raises(UnknownName, match="Did you mean 'code'"):
        load_workload("cod")


# --- synthetic acceptance ---------------------------------------------------------------------


@pytest.mark.parametrize("beneath", [None, "draft-model"])
def test_a_prescribed_acceptance_is_what_happens(engine: Engine, beneath: str | None) -> None:
    jobs = make_jobs(engine, [Prompt("abc")], 150)
    [output] = plain(engine).run(jobs).outputs
    for alpha in (0.0, 0.7, 1.0):
        name = add_synthetic(engine, alpha, beneath)
        wish = Speculation(proposer=name, num_draft_tokens=4)
        results = []
        for _ in range(2):
            request = engine.add(
                jobs[0].prompt, jobs[0].params, speculation=wish, prediction=output
            )
            for _ in engine.run([request]):
                pass
            results.append(engine.collect(request))
        assert all(result.tokens == output for result in results)  # exact, whatever is drafted
        rates = [result.stats.conditional_acceptance[0] for result in results]
        assert sum(rates) / 2 == pytest.approx(alpha, abs=0.15)


def test_dice_are_thrown_no_further_than_a_draft_can_reach() -> None:
    """The engine is timed with them."""
    view = SimpleNamespace(tokens=[1, 2], num_prompt_tokens=2, prediction=[3] * 100)
    thrown = 0

    def throw() -> float:
        nonlocal thrown
        thrown += 1
        return 0.5

    synthetic = SyntheticProposer([1.0], 9, random=throw)
    plan = synthetic.plan(cast("list[SequenceView]", [view]), [4], 6)
    assert isinstance(plan, Script)
    [text], [right] = plan.texts, plan.num_right
    assert text == [3] * 30  # six steps of four drafts and one token more
    assert right == [4] * 27 + [3, 2, 1]
    assert thrown == sum(right)


class Beneath:
    """A drafter with plans."""

    name = "beneath"
    needs = Needs()

    def __init__(self, plan: DraftPlan) -> None:
        self._plan = plan

    def plan(self, views: list[SequenceView], budgets: list[int], max_steps: int) -> DraftPlan:
        return self._plan


def test_a_synthetic_drafter_plans_where_the_one_beneath_does() -> None:
    exit_ = EarlyExit("beneath", 1, [4])
    view = SimpleNamespace(id=1, tokens=[1, 2], num_prompt_tokens=2, prediction=[3] * 100)
    one_by_one = SimpleNamespace(name="steps", needs=Needs())
    for beneath, expected in (
        (None, Script("synthetic", [[3] * 5], [[4, 4, 3, 2, 1]], [4])),
        (Beneath(exit_), Script("synthetic", [[3] * 5], [[4, 4, 3, 2, 1]], [4], clock=exit_)),
        (Beneath(Propose()), Propose()),
        (one_by_one, Propose()),
    ):
        synthetic = SyntheticProposer([1.0], 9, cast("Proposer", beneath))
        assert synthetic.plan(cast("list[SequenceView]", [view]), [4], 1) == expected


def test_a_synthetic_acceptance_is_a_probability(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        add_synthetic(engine, 1.5)


def test_the_formula_needs_only_survival_and_costs(engine: Engine) -> None:
    costs = BareCosts(engine, "draft-model")
    plain_s, cycle_s = costs.seconds(3)
    assert plain_s > 0
    assert costs.speedup(3, [1.0, 1.0, 1.0]) == pytest.approx(4 * plain_s / cycle_s)
    assert costs.speedup(3, []) == pytest.approx(plain_s / cycle_s)


def test_two_measurements_at_once_do_not_share_slots(engine: Engine) -> None:
    context = 32
    with BareCycle(engine, "draft-model", 3, context) as first:
        with BareCycle(engine, "draft-model", 3, context) as second:
            assert second.plain_s() > 0
        assert first.plain_s() > 0  # the other one freed its own slots alone


# --- measuring --------------------------------------------------------------------------------


def test_contenders_from_what_a_user_writes(engine: Engine) -> None:
    assert read_numbers("0.5,1", "x") == [0.5, 1.0]
    with pytest.raises(ConfigError, match="temperatures"):
        read_numbers("hot", "temperatures")
    found = ours(engine, ["draft-model", "synthetic:0.5@draft-model"], [0, 2])
    assert [c.name for c in found] == [
        PLAIN,
        "draft-model K=2",
        "synthetic 0.5 over draft-model K=2",
    ]
    assert needs_outputs(found)
    assert not needs_outputs(found[:2])


def test_everybody_decodes_everything_and_is_compared(engine: Engine) -> None:
    contenders = ours(engine, ["draft-model"], [2, "auto"])
    records = measure(contenders, make_jobs(engine, PROMPTS, 20), batch=2, repeats=2)
    for record in records.values():
        assert len(record.seconds) == 2
        assert record.num_tokens == [2 * 18] * 2 or record.contender.name != PLAIN
        assert record.is_exact
    assert records["draft-model K=2"].exactness == "4/4"
    entry = row(records["draft-model K=2"], records[PLAIN], workload="x")
    assert entry["speedup_low"] <= entry["speedup"] <= entry["speedup_high"]
    shares = [entry[f"{part}_share"] for part in ("draft", "verify", "other")]
    assert sum(shares) == pytest.approx(1.0)


def test_an_output_that_comes_in_one_step_has_a_speed(engine: Engine) -> None:
    jobs = make_jobs(engine, [Prompt("abc")], 8)
    outputs = plain(engine).run(jobs).outputs
    wish = Speculation(proposer=add_synthetic(engine, 1.0), num_draft_tokens=8)
    run = Ours("at once", engine, wish).run([replace(jobs[0], prediction=outputs[0])])
    assert run.outputs == outputs
    assert run.num_tokens == 5  # reading the prompt gave three
    assert len(run.steps) == 1
    assert run.seconds > 0


class Liar(Ours):
    """Somebody whose output is not plain decoding's."""

    def start(self, jobs, batch=1):  # type: ignore[no-untyped-def]
        return LyingLane(self, jobs, batch)


class LyingLane(FullBatch):
    def finish(self) -> Run:
        found = super().finish()
        found.outputs[0][3] = (found.outputs[0][3] + 1) % 90
        return found


def test_a_wrong_output_is_noticed(engine: Engine) -> None:
    liar = Liar("liar", engine, Speculation(proposer="draft-model", num_draft_tokens=2))
    records = measure([plain(engine), liar], make_jobs(engine, PROMPTS[:1], 12), repeats=1)
    assert not records["liar"].is_exact
    assert records["liar"].differences == ["differs from plain at token 3"]


def test_auto_is_compared_with_the_best_fixed_k(engine: Engine) -> None:
    contenders = ours(engine, ["draft-model"], [1, 2, "auto"])
    rows = rows_of(measure(contenders, make_jobs(engine, PROMPTS[:1], 12), repeats=1))
    *fixed, auto = rows
    best = max(entry["speedup"] for entry in fixed[1:])
    assert auto["of_best_fixed"] == pytest.approx(auto["speedup"] / best)
    assert all("of_best_fixed" not in entry for entry in fixed)


def test_lanes_take_turns_and_change_nothing(engine: Engine) -> None:
    contenders = [plain(engine), *ours(engine, ["draft-model"], [3, "auto"])[1:]]
    jobs = make_jobs(engine, PROMPTS, 24)
    alone = [contender.run(jobs).outputs for contender in contenders]
    assert fit_together(contenders, jobs, 2)
    runs = race([c.start(jobs, 2) for c in contenders if isinstance(c, Ours)])
    assert [run.outputs for run in runs] == alone
    assert all(run.seconds == sum(took for _, took in run.steps) for run in runs)
    assert not engine.has_work
    assert engine.kv.usage == 0
    assert not fit_together(contenders, jobs * 1000, 2000)


def test_a_batch_stays_whole(engine: Engine) -> None:
    """Who ends is followed by the next; nothing is timed in which fewer decode."""
    prompts = [Prompt("abc"), Prompt("def ghi"), Prompt("x")]
    jobs = make_jobs(engine, prompts, 24)
    jobs[0] = replace(jobs[0], params=replace(jobs[0].params, max_tokens=7))
    alone = [plain(engine).run([job]).outputs[0] for job in jobs]
    for contender in ours(engine, ["draft-model"], [3, "auto"]):
        assert isinstance(contender, Ours)
        lane = contender.start(jobs, 2)
        sizes = {len(report.events) for _, report in take_turns([lane], lambda lane: lane.progress)}
        run = lane.finish()
        assert run.outputs == alone
        assert sizes == {2}
        assert run.num_tokens > 0
        assert not engine.has_work
        assert engine.kv.usage == 0


def test_prompts_of_one_length(engine: Engine) -> None:
    jobs = make_jobs(engine, PROMPTS, 10, context=50)
    assert [len(job.prompt) for job in jobs] == [50, 50]
    with pytest.raises(ConfigError, match="do not fit"):
        make_jobs(engine, PROMPTS, 10, context=510)


def test_a_median_lies_in_its_interval() -> None:
    found = estimate([1.0, 1.1, 0.9, 1.05, 5.0])
    assert found.value == 1.05
    assert 0.9 <= found.low <= found.value <= found.high <= 5.0
    assert estimate([2.0]) == estimate([2.0, 2.0])


def test_results_come_back_from_their_files(tmp_path: Path) -> None:
    rows = [{"contender": "a", "speedup": 1.5, "speedup_low": 1.25, "speedup_high": 1.75}]
    result = Result("decode", "A title", rows, ("contender", "speedup", "absent"), "A note.")
    paths = result.write(tmp_path / "deep" / "r.json")
    assert [path.name for path in paths] == ["r.json", "r.md"]
    assert read_result(paths[0])["rows"] == rows
    text = paths[1].read_text()
    assert "| a | 1.5 [1.25, 1.75] |" in text
    assert "commit" in text
    assert cell({"x": 1234.5}, "x") == "1234"
    paths[0].write_text(json.dumps({"rows": 3}))
    with pytest.raises(ConfigError, match="no result"):
        read_result(paths[0])


@pytest.mark.parametrize("proposer", ["suffix", "hybrid"])
def test_a_repeat_gains_nothing(engine: Engine, proposer: str) -> None:
    """Sampled outputs of a tiny model are noise: only a replay of an earlier output can draft."""
    jobs = make_jobs(engine, [Prompt("abc", temperature=1.0), Prompt("xyz", temperature=1.0)], 48)
    contender = Ours(proposer, engine, Speculation(proposer=proposer, num_draft_tokens=8))
    rounds = [contender.run([*jobs, jobs[0]], batch=2) for _ in range(3)]
    assert rounds[0].outputs == rounds[1].outputs == rounds[2].outputs
    accepted = [run.stats.num_accepted for run in rounds if run.stats is not None]
    assert max(accepted) < 0.3 * rounds[0].num_tokens
