"""What goes wrong inside a step costs the request it belongs to, and nobody else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.contracts import StepBatch, StepOutput
from outrider.engine.async_engine import AsyncEngine
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.engine.scheduler import SchedulerConfig
from outrider.errors import EngineError, Overloaded
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PROMPT = [5, 9, 5, 9, 5, 9, 2] * 3
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
POISON = 63  # a token that makes the broken target below misbehave


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target", max_positions=96)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=96)


@pytest.fixture
def engine(folders: tuple[Path, Path]) -> Engine:
    return build(
        EngineConfig(
            model=str(folders[0]),
            draft_model=str(folders[1]),
            num_draft_tokens=4,
            backend="torch",
            block_size=8,
            kv_tokens=512,
            max_step_tokens=16,
        )
    )


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


def run(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS) -> list[int]:
    request = engine.add(prompt, params)
    for _ in engine.run([request]):
        pass
    return engine.collect(request).tokens


def breaking(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[StepBatch, StepOutput], None],
) -> None:
    """Lets `change` see every pass of the target, before its logits are used."""
    forward = engine.target.forward

    def changed(batch: StepBatch) -> StepOutput:
        output = forward(batch)
        change(batch, output)
        return output

    monkeypatch.setattr(engine.target, "forward", changed)


def poisoned_rows(batch: StepBatch, output: StepOutput) -> None:
    """NaN in every row of a sequence whose pass contains the poison."""
    for i in range(len(batch.starts_S1) - 1):
        start, stop = batch.starts_S1[i : i + 2]
        if POISON in batch.tokens_T[start:stop]:
            rows = [r for r, t in enumerate(batch.logit_rows_R) if start <= t < stop]
            output.logits_RV[rows, 3] = torch.nan


def test_nan_logits_fail_one_request_and_leave_its_neighbours_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[*PROMPT, i] for i in (1, 2, 3)]
    expected = [run(engine, prompt) for prompt in prompts]
    breaking(engine, monkeypatch, poisoned_rows)
    ids = [engine.add(prompt, PARAMS) for prompt in prompts]
    bad = engine.add([*PROMPT, POISON], SamplingParams(max_tokens=9, n=2))
    failures: dict[str, EngineError] = {}
    while engine.has_work:
        report = engine.step()
        assert report is not None
        failures |= report.failures
    assert list(failures) == [bad]
    assert [engine.collect(i).tokens for i in ids] == expected
    result = engine.collect(bad)
    assert [c.finish_reason for c in result.completions] == ["error", "error"]
    assert result.tokens == []
    assert engine.kv.usage == 0


def test_what_a_failed_request_computed_is_not_shared(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine, [*PROMPT, POISON])
    engine = build(engine_config_of(engine))
    with monkeypatch.context() as patch:
        breaking(engine, patch, poisoned_rows)
        with pytest.raises(EngineError, match="NaN"):
            run(engine, [*PROMPT, POISON])
    request = engine.add([*PROMPT, POISON], PARAMS)
    for _ in engine.run([request]):
        pass
    result = engine.collect(request)
    assert result.num_cached_tokens == 0
    assert result.tokens == expected


def engine_config_of(engine: Engine) -> EngineConfig:
    return EngineConfig(
        model=str(engine.tokenizer.folder), backend="torch", block_size=8, kv_tokens=512
    )


def test_out_of_memory_with_drafts_repeats_the_step_without(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine)
    widths: list[int] = []

    def tight(batch: StepBatch, output: StepOutput) -> None:
        widths.append(len(batch.logit_rows_R))
        if len(batch.logit_rows_R) > 1:
            raise torch.OutOfMemoryError("no room for drafts")

    breaking(engine, monkeypatch, tight)
    request = engine.add(PROMPT, PARAMS)
    reports = list(engine.run([request]))
    assert max(widths) > 1
    assert not any(event.draft_tokens for report in reports for event in report.events)
    assert engine.collect(request).tokens == expected
    assert engine.kv.usage == 0


def test_out_of_memory_without_drafts_turns_one_request_away(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine, PROMPT[:4])

    def tight(batch: StepBatch, output: StepOutput) -> None:
        if len(batch.tokens_T) - len(batch.starts_S1) + 1 > 8:
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")

    breaking(engine, monkeypatch, tight)
    small = engine.add(PROMPT[:4], PARAMS)
    large = engine.add(PROMPT, PARAMS)
    failures: dict[str, EngineError] = {}
    while engine.has_work:
        report = engine.step()
        assert report is not None
        failures |= report.failures
    assert list(failures) == [large]
    assert isinstance(failures[large], Overloaded)
    assert engine.collect(small).tokens == expected


def test_a_request_that_waited_too_long_is_never_computed(engine: Engine) -> None:
    engine.scheduler.config = SchedulerConfig(max_sequences=1)
    first = engine.add(PROMPT, PARAMS)
    late = engine.add(PROMPT, PARAMS, queue_timeout_s=0.01)
    failures: dict[str, EngineError] = {}
    for pause_s in (0.0, 0.02):
        time.sleep(pause_s)
        report = engine.step()
        assert report is not None
        failures |= report.failures
    assert isinstance(failures[late], Overloaded)
    result = engine.collect(late)
    assert result.times.admitted_s is None
    for _ in engine.run([first]):
        pass
    times = engine.collect(first).times
    assert times.arrived_s <= (times.admitted_s or 0) <= (times.first_token_s or 0)
    assert (times.first_token_s or 0) < (times.last_token_s or 0)


@pytest.mark.parametrize("chunk", [4, 512])
def test_prompt_logprobs_are_those_of_plain_decoding(
    folders: tuple[Path, Path], chunk: int
) -> None:
    engine = build(
        EngineConfig(model=str(folders[0]), backend="torch", block_size=4, max_step_tokens=chunk)
    )
    run(engine)  # the prompt is cached now, and must be computed again all the same
    request = engine.add(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=3, n=2))
    first = next(e for report in engine.run([request]) for e in report.events)
    engine.collect(request)
    request = engine.add(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=3))
    for _ in engine.run([request]):
        pass
    scored = engine.collect(request).prompt_logprobs
    assert scored is not None
    assert first.prompt_logprobs is not None
    assert [s.logprob for s in first.prompt_logprobs] == pytest.approx([s.logprob for s in scored])
    assert [s.token for s in scored] == PROMPT[1:]
    for i, score in enumerate(scored):
        plain = engine.add(
            PROMPT[: i + 1],
            SamplingParams(max_tokens=1, logprobs=20),
            speculation=Speculation(),
        )
        for _ in engine.run([plain]):
            pass
        (expected,) = engine.collect(plain).completions[0].logprobs or []
        assert list(score.top) == list(expected.top)[:3]
        assert list(score.top.values()) == pytest.approx(list(expected.top.values())[:3], abs=1e-4)
        if score.token in expected.top:
            assert score.logprob == pytest.approx(expected.top[score.token], abs=1e-4)


def test_pieces_do_not_depend_on_the_steps(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, stop=("zq", "e t"))

    def pieces(speculation: Speculation) -> list[str]:
        request = engine.add(PROMPT, params, speculation=speculation)
        events = [e for report in engine.run([request]) for e in report.events]
        assert "".join(e.text for e in events) == engine.collect(request).text
        assert all(len(e.pieces) == len(e.tokens) for e in events)
        return [piece for event in events for piece in event.pieces]

    assert pieces(engine.default) == pieces(Speculation())


def test_the_async_engine_tells_who_failed_and_when_it_stalls(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    died: list[BaseException] = []
    hanging, go_on = threading.Event(), threading.Event()

    def hang(batch: StepBatch, output: StepOutput) -> None:
        poisoned_rows(batch, output)
        if 62 in batch.tokens_T:
            hanging.set()
            go_on.wait(60)
        if 61 in batch.tokens_T:
            raise ValueError("broken for good")

    async def main() -> None:
        served = AsyncEngine(engine, on_failure=died.append)
        breaking(engine, monkeypatch, hang)
        good = asyncio.create_task(served.generate(PROMPT, params=PARAMS))
        with pytest.raises(EngineError, match="NaN"):
            await served.generate([*PROMPT, POISON], params=PARAMS)
        assert len((await good).tokens) == 24
        async with asyncio.timeout(60):
            while served.stalled_s:  # until the thread has found out that there is no more work
                await asyncio.sleep(0.01)
        slow = asyncio.create_task(served.generate([1, 62], params=SamplingParams(max_tokens=1)))
        assert await asyncio.to_thread(hanging.wait, 60)
        await asyncio.sleep(0.1)
        assert served.stalled_s > 0.05
        go_on.set()
        await slow
        with pytest.raises(EngineError):
            await served.generate([1, 61], params=PARAMS)
        assert await served.close(timeout_s=60)

    asyncio.run(main())
    assert isinstance(died[0], ValueError)
