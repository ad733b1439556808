"""Many asyncio clients on one engine thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from outrider.engine import async_engine
from outrider.engine.async_engine import AsyncEngine, Item
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine, Result
from outrider.errors import EngineError, RequestError
from outrider.events import StepEvent, StepReport
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PROMPT = [5, 9, 5, 9, 5, 9, 2]
PARAMS = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_llama(folder / "target")
    draft = write_tiny_llama(folder / "draft", num_layers=1)
    config = EngineConfig(
        model=str(target), draft_model=str(draft), backend="torch", block_size=8, kv_tokens=1024
    )
    return build(config)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine)
    try:
        yield served
    finally:
        await served.close()


def expected(engine: Engine, prompt: list[int]) -> list[int]:
    request = engine.add(prompt, PARAMS)
    for _ in engine.run([request]):
        pass
    return engine.collect(request).tokens


def test_clients_get_what_they_would_get_alone(sync: Engine) -> None:
    prompts = [[*PROMPT, i] for i in range(12)]
    alone = [expected(sync, prompt) for prompt in prompts]

    async def main() -> list[list[int]]:
        async with running(sync) as engine:
            results = await asyncio.gather(*(engine.generate(p, params=PARAMS) for p in prompts))
            return [result.tokens for result in results]

    assert asyncio.run(main()) == alone


def test_a_stream_delivers_every_event(sync: Engine) -> None:
    async def main() -> list[int]:
        async with running(sync) as engine:
            return [t async for e in engine.stream(PROMPT, params=PARAMS) for t in e.tokens]

    assert asyncio.run(main()) == expected(sync, PROMPT)


def test_news_is_gathered_but_for_the_first_and_the_last(
    sync: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "MAX_GATHER_S", 60.0)
    monkeypatch.setattr(async_engine, "GATHER_S", 60.0)
    heard: list[list[Item]] = []

    async def main() -> None:
        async with running(sync) as engine:
            done = asyncio.Event()

            def deliver(items: list[Item]) -> None:
                heard.append(items)
                if isinstance(items[-1], Result):
                    done.set()

            # Somebody else's first news opens the minute in which the rest is gathered.
            await engine.generate(PROMPT, params=PARAMS)
            engine.submit(PROMPT, deliver, params=PARAMS)
            await done.wait()

    asyncio.run(main())
    first, rest = heard
    assert [type(item) for item in first] == [StepEvent]
    assert isinstance(rest[-1], Result)
    events = [*first, *rest[:-1]]
    assert sum(len(e.tokens) for e in events if isinstance(e, StepEvent)) == 30


def test_who_comes_together_is_read_together(sync: Engine) -> None:
    """The engine does not run off with the first of several requests."""
    prompts = [[*PROMPT, i] for i in range(6)]
    first_steps: list[int] = []  # how many requests got their first token in a step

    def watch(report: StepReport) -> None:
        num = sum(event.step == 1 for event in report.events)
        if num:
            first_steps.append(num)

    async def ask(engine: AsyncEngine, prompt: list[int], num_turns: int) -> None:
        for _ in range(num_turns):  # what a server does before a request gets here
            await asyncio.sleep(0)
        await engine.generate(prompt, params=PARAMS)

    async def main() -> None:
        async with running(sync) as engine:
            await asyncio.gather(*(ask(engine, p, i // 2) for i, p in enumerate(prompts)))

    sync.observers.append(watch)
    try:
        asyncio.run(main())
    finally:
        sync.observers.remove(watch)
    assert first_steps == [6]


def test_a_loop_that_does_not_listen_holds_nobody_up(
    sync: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[StepReport] = []
    monkeypatch.setattr(sync, "observers", [reports.append])

    async def main() -> int:
        async with running(sync) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, params=PARAMS))
            await asyncio.sleep(0)  # submitted; now the loop is busy with something else
            until = time.monotonic() + 60.0
            while not any(event.finish_reason for report in reports for event in report.events):
                assert time.monotonic() < until, "the engine waits for a loop that is busy"
                time.sleep(0.001)
            return len((await task).tokens)

    assert asyncio.run(main()) == 30


def test_samples_that_end_in_the_same_step_all_tell_so(sync: Engine) -> None:
    params = SamplingParams(max_tokens=5, n=3, temperature=1.0, seed=2, ignore_eos=True)

    async def main() -> list[str | None]:
        async with running(sync) as engine:
            return [e.finish_reason async for e in engine.stream(PROMPT, params=params)]

    assert asyncio.run(main()).count("length") == 3


class Stuck:
    """An observer that keeps the engine in its first step until it is told to go on."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._go = threading.Event()
        self.release = self._go.set

    def __call__(self, report: StepReport) -> None:
        self._reached.set()
        self._go.wait(60)

    async def wait(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 60)


@pytest.fixture
def stuck(sync: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    gate = Stuck()
    monkeypatch.setattr(sync, "observers", [gate])
    yield gate
    gate.release()


def test_who_has_everything_disturbs_nobody_by_leaving(
    sync: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted: list[int] = []
    monkeypatch.setattr(sync, "interrupt", lambda: interrupted.append(1))

    async def main() -> None:
        async with running(sync) as engine:
            for _ in range(3):
                await engine.generate(PROMPT, params=PARAMS)
            assert len(interrupted) == 3  # to begin, not to end
            stream = engine.stream(PROMPT, params=PARAMS)
            async for _ in stream:
                break
            await stream.aclose()
            assert len(interrupted) == 5

    asyncio.run(main())


def test_leaving_a_stream_cancels_its_request(sync: Engine) -> None:
    async def main() -> None:
        async with running(sync) as engine:
            stream = engine.stream(PROMPT, params=SamplingParams(max_tokens=400, ignore_eos=True))
            async for _ in stream:
                break
            await stream.aclose()

    asyncio.run(main())
    assert not sync.has_work
    assert sync.kv.usage == 0


def test_a_cancelled_task_cancels_its_request(sync: Engine, stuck: Stuck) -> None:
    async def main() -> None:
        async with running(sync) as engine:
            task = asyncio.create_task(engine.generate(PROMPT, params=PARAMS))
            await stuck.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stuck.release()
            # The engine is free again: a new request runs to its end.
            assert len((await engine.generate(PROMPT, params=PARAMS)).tokens) == 30

    asyncio.run(main())
    assert not sync.has_work
    assert sync.kv.usage == 0


def test_a_bad_request_fails_alone(sync: Engine) -> None:
    async def main() -> None:
        async with running(sync) as engine:
            good = asyncio.create_task(engine.generate(PROMPT, params=PARAMS))
            with pytest.raises(RequestError):
                await engine.generate([])
            assert (await good).tokens

    asyncio.run(main())


def test_closing_ends_every_client(sync: Engine, stuck: Stuck) -> None:
    async def main() -> None:
        engine = AsyncEngine(sync)
        task = asyncio.create_task(
            engine.generate(PROMPT, params=SamplingParams(max_tokens=400, ignore_eos=True))
        )
        await stuck.wait()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)  # told to end; now it may go on
        stuck.release()
        assert await closing
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate(PROMPT)

    asyncio.run(main())
    for line in list(sync.scheduler.running):
        sync.cancel(line.request.id)
        sync.collect(line.request.id)


def test_a_failing_target_reaches_every_client(
    sync: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: object) -> None:
        raise RuntimeError("out of memory")

    async def main() -> None:
        engine = AsyncEngine(sync)
        monkeypatch.setattr(sync.target, "forward", broken)
        results = await asyncio.gather(
            *(engine.generate(PROMPT, params=PARAMS) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(r, EngineError) for r in results)
        await engine.close()

    asyncio.run(main())
