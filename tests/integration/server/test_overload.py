"""Too much at once, and too long. Rows 6-11 of the fault matrix."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from outrider.engine.build import EngineConfig

from .live import LONG, Live, Target, begin, raw_connection, wait_for, with_options


def refused(response: httpx.Response, code: str) -> None:
    assert response.status_code == 503
    assert response.json()["error"]["code"] == code
    assert int(response.headers["retry-after"]) >= 1


def test_rows_6_and_7_a_full_queue_and_a_long_wait(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_options(engine_config, max_sequences=1)
    with Live(config, max_queue=1) as live:
        target = Target(live, monkeypatch)
        target.delay_s = 0.02
        with raw_connection(live) as first:
            begin(live, first, **LONG, speculation={"off": True})  # 8 seconds
            wait_for(lambda: live.figure("num_requests_running") == 1)
            with raw_connection(live) as queued:
                begin(live, queued, **LONG)
                wait_for(lambda: live.figure("num_requests_waiting") == 1)
                refused(live.post("/v1/completions", LONG), "queue_full")  # row 6
                refused(live.post("/v1/completions", LONG | {"stream": True}), "queue_full")
            wait_for(lambda: live.service.num_in_flight == 1)
            impatient = replace(live.config, queue_timeout_s=0.2)
            monkeypatch.setattr(live.service, "config", impatient)
            response = live.post("/v1/completions", LONG)  # row 7
            refused(response, "overloaded")
            assert "waited too long" in response.json()["error"]["message"]
        target.delay_s = 0
        # What could never fit is the client's mistake, not our load.
        assert live.post("/v1/completions", LONG | {"n": 3}).status_code == 400
        live.check()


def together(live: Live, bodies: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: live.text(**body), bodies))


def test_row_8_preempted_requests_say_the_same(live: Live, engine_config: EngineConfig) -> None:
    prompts = [f"story {i}" for i in range(6)]
    body = {"max_tokens": 120, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    expected = [live.text(prompt=prompt, **body) for prompt in prompts]
    with Live(with_options(engine_config, kv_tokens=520, block_size=8)) as tight:
        choices = tight.complete(prompt=prompts, **body)["choices"]
        assert [choice["text"] for choice in choices] == expected
        assert tight.figure("num_preemptions_total") > 0
        tight.check()


def test_row_9_kv_that_is_too_short_for_drafts(live: Live, engine_config: EngineConfig) -> None:
    """Every block is taken by what is confirmed: drafts find no room, and take none with them."""
    speculation = {"num_draft_tokens": 16, "proposer": "ngram"}
    body = LONG | {"prompt": "ab " * 20, "max_tokens": 440, "speculation": speculation}
    expected = live.text(**body | {"speculation": {"off": True}})
    with Live(with_options(engine_config, kv_tokens=512, block_size=8)) as tight:
        assert tight.text(**body) == expected
        both = together(tight, [body, body | {"max_tokens": 100}])
        assert both[0] == expected
        tight.check()


def test_row_10_a_prompt_that_is_too_long(live: Live) -> None:
    for body in ({"prompt": [5] * 512}, {"prompt": "x" * 100_000}):
        response = live.post("/v1/completions", body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        assert error["param"] == "prompt"
    messages = [{"role": "user", "content": "y" * 5000}]
    response = live.post("/v1/chat/completions", {"messages": messages})
    assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("k", [0, 1, 5, 16])
def test_row_11_drafts_do_not_cross_the_context(live: Live, k: int) -> None:
    body = {
        "prompt": [5, 6, 7] * 168,  # 504 of 512
        "max_tokens": 100,
        "temperature": 0,
        "ignore_eos": True,
        "speculation": {"num_draft_tokens": k},
    }
    reply = live.complete(**body)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == 512
    assert reply["choices"][0]["text"] == live.text(**body | {"speculation": {"off": True}})
