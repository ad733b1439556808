"""Tenants share a server and nothing else. Rows 41-44 of the fault matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from outrider.contracts import Proposal, SequenceView
from outrider.draft_plans import Propose
from outrider.engine.build import EngineConfig
from outrider.server.stream import bucket

from .live import LONG as LONGEST
from .live import Live, with_options

ALICE, BOB = "key-of-alice", "key-of-bob"
LONG = LONGEST | {"max_tokens": 120}


@pytest.fixture(scope="module")
def tenants(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config, api_keys=(ALICE, BOB)) as live:
        yield live
        live.check()


def ask(live: Live, key: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{live.url}/v1/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_row_41_cached_prefixes_stay_with_their_key(tenants: Live) -> None:
    body = {"prompt": "a private matter " * 8, "max_tokens": 1}

    def cached(key: str, **more: Any) -> int:
        found = ask(tenants, key, **body, **more)["usage"]["prompt_tokens_details"]
        return int(found["cached_tokens"])

    assert cached(ALICE) == 0
    assert cached(ALICE) > 100
    assert cached(BOB) == 0
    assert cached(BOB) > 100
    assert cached(ALICE, cache_salt="project") == 0


def test_row_42_shared_outputs_stay_with_their_key(tenants: Live) -> None:
    """What one tenant generated makes that tenant's next request faster, and nobody else's."""
    speculation = {"proposer": "suffix", "num_draft_tokens": 8, "metrics": "detailed"}
    body = {
        "prompt": "zyx",
        "max_tokens": 80,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
        "speculation": speculation,
    }

    def accepted(key: str) -> int:
        found = ask(tenants, key, **body)["metrics"]["speculative_decoding"]
        return int(found["num_accepted_draft_tokens"])

    fresh = accepted(ALICE)
    again = accepted(ALICE)
    assert again > fresh + 20
    assert accepted(BOB) == fresh


def wire_sizes(live: Live, **body: Any) -> list[int]:
    """The size of every frame of a stream, [DONE] left out."""
    response = live.post("/v1/completions", body | {"stream": True})
    assert response.status_code == 200
    return [len(frame.encode()) + 2 for frame in response.text.split("\n\n")[:-2]]


def test_row_43_padded_frames_have_few_sizes(live: Live, engine_config: EngineConfig) -> None:
    # How many tokens share a frame is the clock's: a few frames or many, padded or plainly not.
    bare = wire_sizes(live, **LONG)
    assert any(size != bucket(size) for size in bare)
    with Live(engine_config, pad=True) as padded:
        body = LONG | {"stream_options": {"include_usage": True}}
        sizes = wire_sizes(padded, **body)
        assert all(size == bucket(size) for size in sizes)
        assert set(sizes) <= {512, 1024}  # all the text in one frame has less
        chunks = padded.stream(**LONG)
        assert all(chunk["obfuscation"].isalpha() for chunk in chunks if chunk["obfuscation"])
        assert "".join(c["choices"][0]["text"] for c in chunks) == live.text(**LONG)
        # The client may decline, as with OpenAI; and may ask where the server would not.
        declined = LONG | {"stream_options": {"include_obfuscation": False}}
        assert any(size != bucket(size) for size in wire_sizes(padded, **declined))
        padded.check()
    wanted = LONG | {"stream_options": {"include_obfuscation": True}}
    assert all(size == bucket(size) for size in wire_sizes(live, **wanted))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_padding_is_on_where_others_can_listen(host: str) -> None:
    from outrider.server_config import ServerConfig

    config = ServerConfig(host=host, api_keys=("k",))
    assert config.pads == (host != "127.0.0.1")
    assert not ServerConfig(host=host, api_keys=("k",), pad=False).pads


def test_row_44_paced_streams_look_the_same_at_any_acceptance(engine_config: EngineConfig) -> None:
    """The same text with every draft right and with every draft wrong: the same frames."""
    config = with_options(engine_config, num_draft_tokens=4)
    with Live(config, paced=200.0) as live:
        body: dict[str, Any] = {
            "prompt": "steady",
            "max_tokens": 60,
            "temperature": 0,
            "ignore_eos": True,
        }
        whole = live.complete(**body)["choices"][0]["text"]
        drafter = live.core.proposers["draft-model"]
        true: list[int] = []

        def right(views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
            done = [len(view.tokens) - view.num_prompt_tokens for view in views]
            return [Proposal(true[d : d + k]) for d, k in zip(done, budgets, strict=True)]

        def wrong(views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
            done = [len(view.tokens) - view.num_prompt_tokens for view in views]
            return [
                Proposal([(t + 1) % 300 for t in true[d : d + k]])
                for d, k in zip(done, budgets, strict=True)
            ]

        live.core.observers.append(
            lambda report: true.extend(t for e in report.events for t in e.tokens)
        )
        live.complete(**body)
        live.core.observers.clear()
        sizes = {}
        for name, propose in (("right", right), ("wrong", wrong)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(drafter, "propose", propose)
                patch.setattr(drafter, "plan", lambda *_: Propose())
                reply = live.complete(**body, speculation={"metrics": "summary"})
                rate = reply["metrics"]["speculative_decoding"]["draft_acceptance_rate"]
                assert rate == (1.0 if name == "right" else 0.0)
                sizes[name] = wire_sizes(live, **body)
                chunks = live.stream(**body)
                assert "".join(c["choices"][0]["text"] for c in chunks) == whole
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        # Frames without a token come where the engine was late; all frames are alike in size.
        assert set(sizes["right"]) == set(sizes["wrong"])
        assert len(set(sizes["right"])) == 1
        assert len(sizes["right"]) >= 6
        live.check()
