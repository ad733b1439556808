"""The user's models seen through three tokens: the right laws, from the right place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.contracts import Proposal
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.layout import Slice, pack
from outrider.prove.small_pair import (
    GRAIN,
    MOST_PROBABLE,
    SIZE,
    SmallPair,
    draft_logits,
    small_pair,
    target_logits,
)
from outrider.testing import write_tiny_llama

PROMPTS = [[5, 9, 5, 9, 5, 9, 2], [7, 7, 7, 1], [3, 1, 4, 1, 5, 9, 2, 6]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("small")
    target = write_tiny_llama(folder / "target", max_positions=96)
    return target, write_tiny_llama(folder / "draft", num_layers=1, max_positions=96)


def make(folders: tuple[Path, Path], **options: object) -> Engine:
    config = {"draft_model": str(folders[1]), "backend": "torch"} | options
    return build(EngineConfig(model=str(folders[0]), **config))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return make(folders)


@pytest.fixture(scope="module")
def pair(engine: Engine) -> SmallPair:
    return small_pair(engine, PROMPTS)


def plain_logits(engine: Engine, tokens: list[int]) -> torch.Tensor:
    engine.kv.reserve(-5, len(tokens))
    try:
        return engine.target.forward(
            pack([Slice(tokens, 0, engine.kv.table(-5), Proposal())])
        ).logits_RV[0]
    finally:
        engine.kv.free(-5)


def test_the_laws_are_the_models_own(engine: Engine, pair: SmallPair) -> None:
    ids = list(pair.alphabet)
    for context in [(), (0,), (2, 1), (1, 1, 0)]:
        tokens = [*pair.prompt, *(ids[v] for v in context)]
        expected = (plain_logits(engine, tokens)[ids] / pair.temperature).softmax(-1)
        got = torch.tensor([float(p) for p in pair.target(context)])
        assert torch.allclose(got, expected, atol=2 / GRAIN)
        (q_V,) = draft_logits(engine, tokens, [()])  # type: ignore[misc]
        expected = (q_V[ids] / pair.temperature).softmax(-1)
        got = torch.tensor([float(q) for q in pair.draft(context)])
        assert torch.allclose(got, expected, atol=2 / GRAIN)


def test_laws_are_exact_positive_and_not_too_certain(pair: SmallPair) -> None:
    for context in [(), (1,), (0, 2), (0, 1, 2), (2, 0, 1, 2, 0)]:
        for model in (pair.target, pair.draft):
            dist = model(context)
            assert len(dist) == SIZE
            assert sum(dist) == 1
            assert min(dist) > 0
    assert max(pair.target(())) <= MOST_PROBABLE + 1 / GRAIN or pair.temperature == 8
    assert 0 < pair.disagreement < 1
    assert pair.is_drafters


def test_a_tree_of_contexts_in_one_pass(engine: Engine) -> None:
    contexts = [(), (1,), (2,), (1, 5)]
    rows = target_logits(engine, PROMPTS[0], contexts)
    for context, row in zip(contexts, rows, strict=True):
        assert torch.allclose(row, plain_logits(engine, [*PROMPTS[0], *context]), atol=1e-4)


def test_nothing_is_left_in_the_engine(engine: Engine, pair: SmallPair) -> None:
    assert engine.kv.usage == 0
    assert not engine.has_work


def test_a_proposer_without_a_law_gets_a_made_up_one(folders: tuple[Path, Path]) -> None:
    engine = make(folders, proposer="ngram", draft_model=None)
    pair = small_pair(engine, PROMPTS)
    assert not pair.is_drafters
    assert sum(pair.draft((0, 1))) == 1


def test_drafts_without_replacement_show_their_law_too(folders: tuple[Path, Path]) -> None:
    assert small_pair(make(folders, proposer="draft-tree", verifier="tree"), PROMPTS).is_drafters
