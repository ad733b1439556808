"""A server with several drafters: each request names the one that drafts for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from outrider.engine.build import EngineConfig, build
from outrider.errors import ConfigError, ModelError
from outrider.testing import write_tiny_head

from .live import PROBE, Live

NAMES = ["draft-model", "eagle3", "eagle3:second", "medusa"]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("drafters")
    kinds = {"first": "eagle3", "second": "eagle3", "third": "medusa"}
    heads = [write_tiny_head(root / n, kind, vocab_size=320) for n, kind in kinds.items()]
    return [str(head) for head in heads]


@pytest.fixture(scope="module")
def several(engine_config: EngineConfig, drafters: list[str]) -> Iterator[Live]:
    with Live(replace(engine_config, other_drafters=tuple(drafters))) as live:
        yield live


def complete(live: Live, speculation: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/completions", json=PROBE | {"speculation": speculation})


def test_each_request_names_its_drafter(several: Live) -> None:
    plain = complete(several, {"off": True}).json()["choices"][0]["text"]
    for name in NAMES:
        answer = complete(several, {"proposer": name, "num_draft_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == plain
    info = httpx.get(f"{several.url}/live/info").json()
    assert set(NAMES) <= set(info["proposers"])  # both panes of the live page offer them
    assert info["proposer"] == "draft-model"


def test_an_unknown_drafter_is_named_with_those_there_are(several: Live) -> None:
    answer = complete(several, {"proposer": "eagle3:third"})
    assert answer.status_code == 400
    assert "eagle3:second" in answer.json()["error"]["message"]


def test_faults_are_found_at_the_start(
    engine_config: EngineConfig, drafters: list[str], tmp_path: Path
) -> None:
    twice = (*drafters, drafters[1])
    with pytest.raises(ConfigError, match="two drafters are called 'eagle3:second'"):
        build(replace(engine_config, other_drafters=twice))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    with pytest.raises(ModelError, match="broken"):
        build(replace(engine_config, other_drafters=(str(broken),)))
