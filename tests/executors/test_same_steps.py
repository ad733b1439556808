"""All executors give the tokens of the python executor, one step a call or sixteen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from counted import count_runs, take_your_time
from native_models import needs_native
from outrider.engine.build import EngineConfig, assemble, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.events import StepEvent
from outrider.model.cuda_target import CudaTarget
from outrider.model.tokenizer import load_tokenizer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from scripted import Cautious

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [1, 2, 3], [7] * 20, [3, 1, 4, 1, 5, 9, 2, 6]]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wish(proposer: str | None, num_draft_tokens: int | str = 4) -> Speculation:
    return Speculation(proposer=proposer, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]


PLAIN, DRAFTED = wish(None, 0), wish("draft-model")


@dataclass
class Case:
    wishes: list[Speculation]  # a request each
    params: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_tokens=40, ignore_eos=True)
    )
    settings: dict[str, Any] = field(default_factory=dict)
    stop_rules: bool = False


def sampled(**others: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": 3, "max_tokens": 40} | others))


CASES = {
    "plain": Case([PLAIN]),
    "plain, sampled": Case([PLAIN] * 3, sampled()),
    "plain, filtered": Case([PLAIN] * 2, sampled(top_p=0.9, min_p=0.02, top_k=20, seed=5)),
    "drafted": Case([DRAFTED]),
    "drafted, sampled": Case([DRAFTED] * 3, sampled()),
    "drafted, filtered": Case([DRAFTED], sampled(temperature=0.7, top_p=0.9, top_k=20)),
    "stops inside a block": Case(
        [DRAFTED] * 2, sampled(max_tokens=60, stop_ids=tuple(range(0, 256, 7)))
    ),
    "length ends inside a block": Case([DRAFTED] * 3, sampled(max_tokens=7)),
    "ragged": Case([DRAFTED, PLAIN, wish("draft-model", 1)], sampled()),
    "two samples": Case([DRAFTED], sampled(n=2)),
    "stop rules": Case([wish("draft-model", "auto")] * 4, sampled(), stop_rules=True),
    "early exit": Case([wish("early-exit", 3)] * 2, sampled()),
    "early exit beside plain": Case([wish("early-exit", 3), PLAIN], sampled()),
    "looked up": Case([wish("ngram", 6)] * 2),
    "trees": Case([wish("suffix", 6)] * 2),
    "trees, sampled": Case([wish("suffix", 6)], sampled(temperature=0.3, max_tokens=100)),
    "hybrid": Case([wish("hybrid", 6)] * 2, sampled(temperature=0.4, max_tokens=100)),
    "hybrid beside plain": Case([wish("hybrid", 6), PLAIN]),
    "two proposers": Case([DRAFTED, wish("ngram", 6)], sampled()),
    "preemption": Case([DRAFTED] * 4, sampled(max_tokens=30), {"kv_tokens": 112}),
    "more requests than places": Case([DRAFTED] * 4, sampled(), {"max_sequences": 2}),
    "log-probabilities": Case([DRAFTED], sampled(logprobs=2, max_tokens=12)),
    "stop strings": Case([DRAFTED], sampled(stop=("zzz",), max_tokens=12)),
    "penalties": Case([DRAFTED], sampled(repetition_penalty=1.2, max_tokens=12)),
    "ratio rule": Case(
        [Speculation(proposer="draft-model", num_draft_tokens=4, verifier="token")],
        sampled(max_tokens=12),
    ),
}
ONE_BY_ONE = {"log-probabilities", "stop strings", "penalties", "ratio rule"}
# Filters and plans other than chains are not for the device's cycles.
ON_DEVICE = {
    "plain",
    "plain, sampled",
    "drafted",
    "drafted, sampled",
    "stops inside a block",
    "length ends inside a block",
    "two samples",
    "preemption",
    "more requests than places",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", head_dim=16, max_positions=160)
    return target, write_tiny_llama(folder / "draft", head_dim=16, num_layers=1, max_positions=96)


Make = Callable[[str, dict[str, Any]], Engine]


@pytest.fixture
def make(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Make:
    """An engine whose target has this executor."""

    def make_one(executor: str, settings: dict[str, Any]) -> Engine:
        config = EngineConfig(
            model=str(pair[0]),
            draft_model=str(pair[1]),
            backend="native" if executor == "native" else "torch",
            num_draft_tokens=4,
            max_ahead_steps=16,
            device=DEVICE if executor == "cuda" else "cpu",
            **{"kv_tokens": 1024, "block_size": 8, "prefix_caching": False} | settings,
        )
        if executor != "cuda":
            return build(config)

        def load(name: str | Path, **_: object) -> CudaTarget:
            return CudaTarget.load(name, device=DEVICE, dtype=torch.float32)

        monkeypatch.setattr("outrider.engine.build.load_model", load)
        return assemble(config, load(pair[0]), load_tokenizer(str(pair[0])))

    return make_one


def decode(engine: Engine, case: Case) -> list[list[StepEvent]]:
    """The events of each request."""
    if case.stop_rules:
        engine.policy = Cautious()
    requests = [
        engine.add(prompt, case.params, speculation=one)
        for prompt, one in zip(PROMPTS, case.wishes, strict=False)
    ]
    events: dict[str, list[StepEvent]] = {request: [] for request in requests}
    for report in engine.run(requests):
        engine.kv.check()
        for event in report.events:
            events[event.request_id].append(event)
    for request in requests:
        engine.collect(request)
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
    return list(events.values())


def texts(events: list[list[StepEvent]]) -> list[object]:
    return [
        [
            (
                [t for e in some if e.sample_index == i for t in e.tokens],
                "".join(e.text for e in some if e.sample_index == i),
                [e.finish_reason for e in some if e.sample_index == i][-1],
            )
            for i in sorted({e.sample_index for e in some})
        ]
        for some in events
    ]


@pytest.mark.parametrize("max_steps", [1, 16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", [pytest.param("native", marks=needs_native), "python"])
def test_native_and_python(
    executor: str, name: str, max_steps: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_your_time(monkeypatch)
    case = CASES[name]
    reference = make(executor, case.settings)
    reference.executors.fast.clear()
    reference.max_steps = 1
    expected = decode(reference, case)
    engine = make(executor, case.settings)
    runs = count_runs(engine)[executor]
    if max_steps == 1:
        engine.interrupt()  # each call ends after its first step
    events = decode(engine, case)
    assert texts(events) == texts(expected)
    if "preemption" not in name and "hybrid" not in name:  # hybrid decides by the clock
        assert events == expected
    if executor == "native" and name in ONE_BY_ONE:
        assert not runs.calls
    elif name.startswith("plain") or (executor == "native" and name != "two proposers"):
        assert (max(runs.calls) > 1) == (max_steps > 1)


@pytest.mark.parametrize("max_steps", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_cuda(name: str, max_steps: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cycles accept runners-up, too: there are fewer steps, of the same tokens."""
    take_your_time(monkeypatch)
    case = CASES[name]
    reference = make("cuda", case.settings)
    reference.executors.fast.clear()
    reference.max_steps = 1
    expected = decode(reference, case)
    engine = make("cuda", case.settings)
    runs = count_runs(engine)["cuda"]
    if max_steps == 1:
        engine.interrupt()
    assert texts(decode(engine, case)) == texts(expected)
    if name in ON_DEVICE:
        assert (max(runs.calls) > 1) == (max_steps > 1)
    elif name in ONE_BY_ONE:
        assert not runs.calls


@needs_native
@pytest.mark.parametrize("name", ["plain", "drafted", "trees", "hybrid", "early exit"])
def test_requests_that_end_and_begin_between_steps(
    name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_your_time(monkeypatch)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    [speculation, *_] = CASES[name].wishes
    plain = make("native", {})
    alone = []
    for prompt in PROMPTS[:3]:
        request = plain.add(prompt, params, speculation=PLAIN)
        for _ in plain.run([request]):
            pass
        alone.append(plain.collect(request).tokens)
    engine = make("native", {})
    first = engine.add(PROMPTS[0], params, speculation=speculation)
    victim = engine.add(PROMPTS[1], params, speculation=speculation)
    while not engine.has_ready_steps:
        engine.step()
    engine.cancel(victim)
    while not engine.has_ready_steps:
        engine.step()
    last = engine.add(PROMPTS[2], params, speculation=speculation)
    for number, _ in enumerate(engine.run([first, last])):
        engine.kv.check()
        (engine.interrupt, engine.resume)[number % 3 > 0]()
    assert engine.collect(first).tokens == alone[0]
    assert engine.collect(last).tokens == alone[2]
    cut = engine.collect(victim).tokens
    assert cut == alone[1][: len(cut)]
    assert engine.kv.num_free_blocks == engine.kv.num_blocks
