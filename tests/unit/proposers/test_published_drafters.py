"""Every published layout loads and drafts what its formulas say, step after step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from native_models import needs_native
from outrider.contracts import Recommends
from outrider.engine.build import EngineConfig, build
from outrider.errors import ModelError
from outrider.model.head_kinds import head_kind
from outrider.model.heads import load_head
from outrider.model.heads_native import runs_natively
from outrider.policy.controller import AdaptivePolicy
from outrider.testing import write_tiny_llama
from published import CASES, TARGET, L, eagle3, mtp
from published.comparing import Seen, compare, engine_for
from published.record import keep, read
from published.refused import REFUSED

TREES = ("eagle", "eagle3", "medusa")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), **TARGET)


@pytest.fixture(scope="module")
def seen(target: Path) -> Seen:
    return Seen(target)


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_reference(name: str, target: Path, seen: Seen, tmp_path: Path) -> None:
    kind, write = CASES[name]
    reference = write(tmp_path)
    assert head_kind(tmp_path) == kind
    options = {"children": 1} if kind in TREES else {}
    count = compare(engine_for(target, tmp_path, "torch", **options), reference, seen)
    assert count["steps"] >= 20, count
    assert count["whole drafts"] >= 10 or kind in ("medusa", "mlp", "dflash"), count
    assert count["same"] == count["drafts"], count
    assert count["accepted"] > 0, count
    assert count["rejecting steps"] > 0, count
    keep(name, kind, "torch", count)


def test_a_file_of_llama_cpp_drafts_like_its_folder(
    target: Path, seen: Seen, tmp_path: Path
) -> None:
    file = tmp_path / "eagle3.gguf"
    reference = eagle3.eagle3_gguf(file)
    assert head_kind(file) == "eagle3"
    count = compare(engine_for(target, file, "torch", children=1), reference, seen)
    assert count["same"] == count["drafts"] > 0, count
    keep("llama_cpp_gguf", "eagle3", "torch", count)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(("speculators_llama", 5), ("p_eagle_speculators", 5), ("dflash_speculators", 5)),
        *(("medusa_authors", 4), ("mlp_ibm", 4), ("specforge", None), ("eagle1_with_bias", None)),
    ],
)
def test_what_the_checkpoint_recommends(
    name: str, wanted: int | None, target: Path, tmp_path: Path
) -> None:
    kind, write = CASES[name]
    write(tmp_path)
    proposer = engine_for(target, tmp_path, "torch").proposers[kind]
    assert isinstance(proposer, Recommends)
    assert proposer.recommended == wanted


def test_auto_begins_with_what_the_checkpoint_recommends(target: Path, tmp_path: Path) -> None:
    kind, write = CASES["speculators_llama"]
    write(tmp_path)
    config = EngineConfig(
        model=str(target), draft_model=str(tmp_path), num_draft_tokens="auto", proposer=kind
    )
    policy = build(config).policy
    assert isinstance(policy, AdaptivePolicy)
    assert policy.costs.first == {kind: 5}


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_by_name(name: str, target: Path, tmp_path: Path) -> None:
    REFUSED[name](tmp_path / "head")
    with pytest.raises(ModelError) as refused:
        build(EngineConfig(model=str(target), draft_model=str(tmp_path / "head")))
    line = str(refused.value).replace(str(tmp_path / "head"), "HEAD")
    assert "\n" not in line
    keep(name, "another model", "refused", line)


def test_the_record_is_of_these_layouts() -> None:
    layouts = {*CASES, *REFUSED, "llama_cpp_gguf", *(f"mtp_{name}" for name in mtp.CASES)}
    layouts |= {
        f"gemma_assistant_{name}" for name in ("shared", "shared_ordered", "keys_are_values")
    }
    assert layouts == {*read()}
    for name, known in read().items():
        if "refused" not in known:
            same, drafts = known["torch"]
            assert same == drafts > 0, name


@pytest.mark.parametrize(
    "name",
    [
        *("safeailab", "speculators_two_layers", "sliding_windows", "sliding_last_layer"),
        *("eagle1_with_bias", "eagle1_mistral", "medusa_authors", "medusa_vllm_token_map"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_native)])
def test_trees_go_down_the_chain(
    name: str, backend: str, target: Path, seen: Seen, tmp_path: Path
) -> None:
    """Rows of a tree see their own line: every first child is what the reference drafts there."""
    _, write = CASES[name]
    reference = write(tmp_path)
    engine = engine_for(target, tmp_path, backend, children=3, weights="float32")
    count = compare(engine, reference, seen, trees=True)
    assert count["drafts"] > 2 * count["steps"], "the trees have no depth"
    assert count["branches"] > 0, "nothing but the main line was compared"
    assert count["same"] >= 0.99 * count["drafts"], count
    assert count["accepted"] > 0, count


@needs_native
@pytest.mark.parametrize("weights", ["float32", None])
@pytest.mark.parametrize("name", CASES)
def test_native_drafts_agree(
    name: str, weights: str | None, target: Path, seen: Seen, tmp_path: Path
) -> None:
    """On the native engine, with the head's weights as they are and as it prefers them: int8.

    int8 moves scores by about 0.01 in heads of width 32, so only those drafts count that win by
    more than that.
    """
    kind, write = CASES[name]
    reference = write(tmp_path)
    options: dict[str, object] = {"weights": weights} if weights else {}
    if kind in TREES:
        options["children"] = 1
    count = compare(engine_for(target, tmp_path, "native", **options), reference, seen)
    counted, same = ("drafts", "same") if weights else ("clear", "clear and same")
    assert count[same] >= 0.99 * count[counted] > 0, count
    assert count["same"] >= 0.985 * count["drafts"], count
    assert count["clear"] > 0.9 * count["drafts"], count
    if runs_natively(load_head(tmp_path, num_layers=L)):
        keep(name, kind, weights or "int8", count)
