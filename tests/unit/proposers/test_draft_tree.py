"""Trees of a draft model: what grows, what is fed, and that the drafter's own KV stays right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

from native_models import needs_native
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, LossyPairing
from outrider.events import StepEvent
from outrider.proposers import draft_tree
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.draft_tree import DraftTreeConfig
from outrider.proposers.trees import ROOT, BestFirst, FixedShape, likely_shape
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PROMPTS = [[5, 9, 5, 9, 2], [1], list(range(1, 30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    write_tiny_llama(folder / "target", max_positions=64)
    write_tiny_llama(folder / "draft", num_layers=1, max_positions=64)
    return folder


def engine_for(
    folder: Path, draft: str, backend: Literal["torch", "native"] = "torch", **options: object
) -> Engine:
    config = EngineConfig(
        model=str(folder / "target"),
        draft_model=str(folder / draft),
        proposer="draft-tree",
        num_draft_tokens=12,
        proposer_options={"draft-tree": options, "draft-model": {"dtype": "float32"}},
        backend=backend,
        block_size=4,
        kv_tokens=512,
    )
    return build(config)


def run(engine: Engine, params: SamplingParams, prompts: list[list[int]]) -> list[StepEvent]:
    ids = [engine.add(prompt, params) for prompt in prompts]
    return [event for report in engine.run(ids) for event in report.events]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, {"width": 1}, {"children": 2, "width": 12, "passes": 3}])
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_a_perfect_drafter_is_never_refused(
    folder: Path,
    temperature: float,
    options: dict[str, object],
    backend: Literal["torch", "native"],
) -> None:
    """The target drafts for itself: every step must walk first children, down to a leaf.

    A wrong mask, a node in the wrong slot or a path moved wrongly would end a path early.
    """
    engine = engine_for(folder, "target", backend, **options)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=30, ignore_eos=True)
    num_accepted = 0
    for event in run(engine, params, PROMPTS):
        parents = event.draft_parents or []
        node = ROOT
        for step in event.path:
            assert step == parents.index(node), "not the first child"
            node = step
        if event.finish_reason is None:
            assert node not in parents, "refused although the drafter is the target"
        num_accepted += len(event.path)
    assert num_accepted > 60


@needs_native
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(
            temperature=0.8, top_p=0.9, top_k=20, seed=5, max_tokens=30, ignore_eos=True
        ),
    ],
)
def test_one_call_grows_what_many_passes_grow(
    folder: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes in one native call, and pass by pass in Python: the same trees."""
    at_once = run(engine_for(folder, "draft", "native"), params, PROMPTS)
    monkeypatch.setattr(draft_tree, "DraftsInOneCall", str)  # which no model is
    stepwise = run(engine_for(folder, "draft", "native"), params, PROMPTS)
    assert [(e.draft_tokens, e.draft_parents) for e in at_once] == [
        (e.draft_tokens, e.draft_parents) for e in stepwise
    ]
    assert sum(len(e.draft_tokens) for e in at_once) > 100


def test_trees_are_grown_where_the_drafter_is_unsure(folder: Path) -> None:
    engine = engine_for(folder, "draft")
    events = run(engine, SamplingParams(max_tokens=40), PROMPTS)
    trees = [e.draft_parents for e in events if e.draft_parents]
    assert any(tree.count(ROOT) > 1 for tree in trees)
    assert len({tuple(tree) for tree in trees}) > 3
    assert all(len(tree) <= 12 for tree in trees)
    # Siblings differ: a token drafted twice would be wasted.
    for event in events:
        drafted = list(zip(event.draft_parents or [], event.draft_tokens, strict=True))
        assert len(set(drafted)) == len(drafted)


def test_chains_and_trees_share_one_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(folder, "target")
    chains = engine.proposers["draft-model"]
    assert isinstance(chains, DraftModelProposer)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    ids = [
        engine.add(PROMPTS[0], params, speculation=Speculation(proposer=name, num_draft_tokens=4))
        for name in ("draft-model", "draft-tree", "draft-model")
    ]
    for _ in engine.run(ids):
        pass
    assert len({tuple(engine.collect(i).tokens) for i in ids}) == 1
    assert chains.memory.kv.usage == 0
    chains.memory.kv.check()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_context_may_end_and_the_drafters_kv_may_be_full(
    folder: Path, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=100, seed=2, ignore_eos=True)
    engine = engine_for(folder, "draft")
    assert sum(len(e.tokens) for e in run(engine, params, [[3] * 40])) == 64 - 40
    chains = engine.proposers["draft-model"]
    assert isinstance(chains, DraftModelProposer)
    assert chains.memory.kv.reserve(-1, 496)  # leaves one sequence a little room
    assert sum(len(e.tokens) for e in run(engine, params, [[3] * 10])) == 64 - 10
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_rules_that_judge_chains_refuse_trees(folder: Path) -> None:
    engine = engine_for(folder, "draft")
    with pytest.raises(LossyPairing, match="'tree' or 'coupled'"):
        engine.add([1], speculation=Speculation(proposer="draft-tree", verifier="token"))


def test_best_first_takes_the_best_paths() -> None:
    growth = BestFirst(4, num_children=2, max_depth=3, width=2, finish_ids={99})
    assert growth.to_expand() == [ROOT]
    growth.add(ROOT, [1, 2], [-0.1, -3.0])
    assert growth.to_expand() == [0, 1]
    growth.add(0, [3, 99], [-0.2, -0.5])
    growth.add(1, [4, 5], [-0.1, -0.2])
    # Node 3 finishes; of the four best (0, 2, 3, 1) the last cannot have descendants among them.
    assert growth.to_expand() == [2]
    growth.add(2, [6, 7], [-1.0, -9.0])
    assert [growth.tokens[node] for node in growth.chosen()] == [1, 3, 99, 6]
    assert growth.to_expand() == []  # three tokens deep


def test_a_fixed_shape_does_not_look_at_tokens() -> None:
    assert likely_shape(3, 4, 9) == {ROOT: (0,), 0: (1,), 1: (2,), 2: ()}  # .6, .36, .216 > .18
    assert likely_shape(5, 1, 3) == {ROOT: (0,), 0: (1,), 1: (2,), 2: ()}
    shape = likely_shape(12, 3, 9)
    assert len(shape) == 13
    assert len(shape[ROOT]) == 3
    growth = FixedShape(4, num_children=2, max_depth=2, finish_ids={99})
    growth.add(ROOT, [99, 5], [0.0, 0.0])
    assert growth.to_expand() == []  # the first child finishes, the second was planned as a leaf
    assert growth.chosen() == [0, 1]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        DraftTreeConfig(width=0)
