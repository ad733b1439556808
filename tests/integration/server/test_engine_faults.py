"""The engine in trouble. Rows 12-16 of the fault matrix."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from outrider.contracts import StepBatch, StepOutput
from outrider.engine.build import EngineConfig

from .live import LONG, PROBE, Live, Target, wait_for


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1)


def test_row_12_out_of_memory_with_drafts_goes_on_without(live: Live, target: Target) -> None:
    def tight(batch: StepBatch) -> None:
        if len(batch.logit_rows_R) > len(batch.starts_S1) - 1:
            raise torch.OutOfMemoryError("CUDA out of memory at 0x7f00")

    target.before = tight
    reply = live.complete(**PROBE, speculation={"metrics": "summary"})
    assert reply["choices"][0]["text"] == live.expected_probe
    assert reply["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_row_12_out_of_memory_without_drafts_turns_one_away(live: Live, target: Target) -> None:
    def tight(batch: StepBatch) -> None:
        if len(batch.tokens_T) > 100:
            raise MemoryError

    target.before = tight
    with ThreadPoolExecutor(2) as pool:
        small = pool.submit(live.text, **PROBE)
        large = pool.submit(live.post, "/v1/completions", PROBE | {"prompt": "x" * 200})
        assert small.result(20) == live.expected_probe
        response = large.result(20)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert "0x" not in response.text


def test_row_13_a_drafter_that_raises_changes_nothing(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = live.core.proposers["draft-model"]

    def broken(*_: object) -> None:
        raise RuntimeError("drafter on fire")

    monkeypatch.setattr(drafter, "propose", broken)
    assert live.text(**PROBE) == live.expected_probe
    monkeypatch.undo()
    found = live.complete(**PROBE, speculation={"metrics": "summary"})["metrics"]
    assert found["speculative_decoding"]["num_draft_tokens"] > 0  # the next request drafts again


def test_row_14_a_target_that_raises_ends_everything_cleanly(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Live(engine_config) as live:
        target = Target(live, monkeypatch)
        target.delay_s = 0.02
        broken = threading.Event()

        def before(batch: StepBatch) -> None:
            if broken.is_set():
                raise RuntimeError("illegal memory access in /secret/path")

        target.before = before
        body = LONG | {"speculation": {"off": True}}  # 8 seconds
        with ThreadPoolExecutor(2) as pool, ExitStack() as streams:
            whole = [pool.submit(live.post, "/v1/completions", body) for _ in range(2)]
            ask = partial(live.client.stream, "POST", "/v1/completions")
            parts = [streams.enter_context(ask(json=body | {"stream": True})) for _ in range(2)]
            wait_for(lambda: live.figure("num_requests_running") == 4)
            broken.set()
            for response in [future.result(20) for future in whole]:
                assert response.status_code == 500
                assert "secret" not in response.text
            for response in parts:
                assert response.status_code == 200
                response.read()
                events = response.text.split("\n\n")
                assert '"error"' in events[-3]
                assert "secret" not in response.text
                assert events[-2] == "data: [DONE]"
        live.thread.join(10)
        assert not live.thread.is_alive()  # the process would exit now, with code 1
        assert live.service.failure is not None


def test_row_15_nan_logits_fail_one_request_only(live: Live, target: Target) -> None:
    (poison,) = live.post("/tokenize", {"prompt": "~"}).json()["tokens"]

    def nan(batch: StepBatch, output: StepOutput) -> None:
        for i in range(len(batch.starts_S1) - 1):
            start, stop = batch.starts_S1[i : i + 2]
            if poison in batch.tokens_T[start:stop]:
                rows = [r for r, t in enumerate(batch.logit_rows_R) if start <= t < stop]
                output.logits_RV[rows] = torch.nan

    target.after = nan
    target.delay_s = 0.005
    body = PROBE | {"logit_bias": {str(poison): -100}}
    expected = live.text(**body)
    with ThreadPoolExecutor(6) as pool:
        neighbours = [pool.submit(live.text, **body) for _ in range(4)]
        bad = pool.submit(live.post, "/v1/completions", body | {"prompt": "a ~"})
        streamed = pool.submit(
            live.post, "/v1/completions", body | {"prompt": "a ~", "stream": True}
        )
        assert bad.result(20).status_code == 500
        assert streamed.result(20).status_code == 500  # nothing was sent yet: a status, no event
        assert [future.result(20) for future in neighbours] == [expected] * 4
    assert "NaN" not in bad.result().text
    target.delay_s = 0


def test_row_16_an_engine_that_hangs_fails_health(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Live(engine_config, stall_timeout_s=0.3) as live:
        target = Target(live, monkeypatch)
        hang = threading.Event()
        target.before = lambda batch: hang.wait(10)
        with ThreadPoolExecutor(1) as pool:
            stuck = pool.submit(live.post, "/v1/completions", PROBE)
            wait_for(lambda: live.client.get("/health").status_code == 503)
            answer: dict[str, Any] = live.client.get("/health").json()
            assert "does not answer" in answer["error"]["message"]
            assert live.client.get("/metrics").status_code == 200
            hang.set()
            assert stuck.result(20).status_code == 200
        wait_for(lambda: live.client.get("/health").status_code == 200)
        live.check()


def test_an_idle_engine_is_a_healthy_one(engine_config: EngineConfig) -> None:
    with Live(engine_config, stall_timeout_s=0.2) as live:
        time.sleep(0.5)
        health: httpx.Response = live.client.get("/health")
        assert health.status_code == 200
