"""A head that reads the target's states drafts in calls of several steps what it drafts alone."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from counted import count_runs, take_your_time
from native_models import needs_native
from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.events import StepEvent, StepTiming
from outrider.policy.base import Decision
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama

pytestmark = needs_native

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [1, 2, 3], [7] * 20]
PHASE = 5  # steps of a decision


class Alternating:
    """All draft, then none, then every other sequence."""

    def __init__(self) -> None:
        self._num_steps = 0

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        phase = self._num_steps // PHASE % 3
        drafting = [phase == 0 or (phase == 2 and i % 2 == 0) for i in range(len(views))]
        budgets = [min(4, n) if yes else 0 for n, yes in zip(limits, drafting, strict=True)]
        return Decision(budgets, [None] * len(views), PHASE - self._num_steps % PHASE)

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        self._num_steps += 1

    def release(self, sequence_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_tiny_llama(folder / "target", num_layers=3, max_positions=160)
    write_tiny_head(folder / "eagle3", "eagle3", taps=(1, 3))
    return folder


def engine_for(folder: Path, proposer: str, options: dict[str, Any]) -> Engine:
    engine = build(
        EngineConfig(
            model=str(folder / "target"),
            draft_model=str(folder / "eagle3"),
            proposer=proposer,
            proposer_options={"eagle3": {"weights": "float32"} | options},
            num_draft_tokens="auto",
            backend="native",
            prefix_caching=False,
            kv_tokens=1024,
            block_size=8,
        )
    )
    engine.policy = Alternating()
    return engine


def decode(engine: Engine, params: SamplingParams) -> list[list[StepEvent]]:
    """The events of each request."""
    requests = [engine.add(prompt, params) for prompt in PROMPTS]
    events: dict[str, list[StepEvent]] = {request: [] for request in requests}
    for report in engine.run(requests):
        engine.kv.check()
        for event in report.events:
            events[event.request_id].append(event)
    for request in requests:
        engine.collect(request)
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    return list(events.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"children": 1}, {"passes": 3, "width": 3}])
def test_eagle_drafts_the_same_in_calls_and_step_by_step(
    folder: Path, options: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after steps in which it rested, alone or beside others: it has read them all."""
    take_your_time(monkeypatch)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, ignore_eos=True)
    reference = engine_for(folder, "eagle3", options)
    reference.executors.fast.clear()
    expected = decode(reference, params)
    engine = engine_for(folder, "eagle3", options)
    runs = count_runs(engine)["native"]
    assert decode(engine, params) == expected
    assert max(runs.calls) == PHASE
    drafts = [event for events in expected for event in events if event.draft_tokens]
    assert len(drafts) > 20
    if temperature:
        assert sum(len(event.path) for event in drafts) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_look_up_and_a_head_share_a_call(
    folder: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_your_time(monkeypatch)
    params = SamplingParams(max_tokens=100, temperature=temperature, seed=4, ignore_eos=True)
    reference = engine_for(folder, "hybrid", {})
    expected = decode(reference, params)
    plain = engine_for(folder, "hybrid", {})
    requests = [plain.add(p, params, speculation=Speculation(proposer=None)) for p in PROMPTS]
    for _ in plain.run(requests):
        pass
    texts = [plain.collect(request).tokens for request in requests]
    assert [[t for e in events for t in e.tokens] for events in expected] == texts
    sources = {event.source for events in expected for event in events}
    assert sources >= {"eagle3", "suffix"}
