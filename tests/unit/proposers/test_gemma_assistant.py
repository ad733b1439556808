"""Gemma 4's assistant drafts what transformers' own does, and the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exactness.same_tokens import assert_same, run
from outrider.engine.build import EngineConfig, build
from outrider.engine.request import Speculation
from outrider.errors import ModelError
from outrider.model.head_kinds import head_kind
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from published import gemma
from published.comparing import PROMPTS, K, Seen, compare
from published.record import keep


@pytest.mark.parametrize(
    ("name", "ordered"), [("shared", False), ("shared", True), ("keys_are_values", False)]
)
def test_drafts_are_the_reference(name: str, ordered: bool, tmp_path: Path) -> None:
    target, apart, reference = gemma.write(name, tmp_path, ordered=ordered)
    assert head_kind(apart) == "mtp"
    config = EngineConfig(
        model=str(target),
        draft_model=str(apart),
        num_draft_tokens=K,
        kv_tokens=512,
        block_size=4,
        backend="torch",
    )
    engine = build(config)
    count = compare(engine, reference, Seen(target))
    assert count["steps"] >= 20, count
    assert count["whole drafts"] >= 10, count
    assert count["same"] == count["drafts"], count
    assert count["accepted"] > 0, count
    assert count["rejecting steps"] > 0, count
    keep(f"gemma_assistant_{name}" + "_ordered" * ordered, "mtp", "torch", count)
    for params in (
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5),
    ):
        plain = run(engine, PROMPTS, params, Speculation(proposer=None))
        assert_same(engine, run(engine, PROMPTS, params), plain, params, name, bitwise=False)


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    target, apart, _ = gemma.write("shared", tmp_path)
    llama = write_tiny_llama(tmp_path / "llama")
    with pytest.raises(ModelError, match="drafts for Gemma 4, not for a model of type llama"):
        build(EngineConfig(model=str(llama), draft_model=str(apart), num_draft_tokens=2))
    config = json.loads((apart / "config.json").read_text())
    (apart / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 48}))
    with pytest.raises(ModelError, match="made for a target of width 48"):
        build(EngineConfig(model=str(target), draft_model=str(apart), num_draft_tokens=2))
