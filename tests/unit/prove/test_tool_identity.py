"""`outrider prove --tools`: what it compares, and that it sees a difference."""

from __future__ import annotations

import pytest

from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.prove.tool_identity import check_tools
from outrider.testing import write_tiny_llama
from outrider.verifiers import coupled

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tools") / "target"
    write_tiny_llama(folder, vocab_size=320, num_tokens=300, max_positions=2048)
    return build(EngineConfig(model=str(folder), proposer="ngram", num_draft_tokens=3, threads=1))


def test_calls_with_drafts_are_those_without(engine: Engine) -> None:
    found = check_tools(engine, ["weather?", "time?"], 160, lambda text: None)
    assert found.passed, found.troubles
    assert found.figures["num_outputs"] == 16
    assert found.figures["num_calls"] > 0
    assert found.figures["num_accepted"] > 100  # forced text is drafted by the grammar


def test_a_rule_that_accepts_everything_is_seen(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(tokens: list[int], parents: list[int] | None, draws: list[int]) -> list[int]:
        return list(range(len(tokens)))

    monkeypatch.setattr(coupled, "match", careless)
    monkeypatch.setattr(engine, "max_steps", 1)  # the native engine has a rule of its own
    found = check_tools(engine, ["weather?"], 96, lambda text: None)
    assert not found.passed
    assert found.troubles
