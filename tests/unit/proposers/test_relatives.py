"""Quantized copies, early exits, cascades and foreign vocabularies: options, refusals, memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from native_models import needs_native
from other_vocabulary import write_with_other_ids
from outrider import native
from outrider.contracts import StepBatch, StepOutput
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.errors import ConfigError, UnknownName, VocabularyMismatch
from outrider.proposers.cascade import CascadeProposer
from outrider.proposers.cross_vocab import CrossVocabProposer
from outrider.proposers.early_exit import EarlyExitConfig, EarlyExitProposer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relatives")
    for name, num_layers in (("target", 3), ("mid", 2), ("draft", 1)):
        write_tiny_llama(folder / name, num_layers=num_layers, vocab_size=300, max_positions=128)
    write_with_other_ids(folder / "draft", folder / "foreign")
    return folder


def engine_for(
    folder: Path,
    proposer: str | None,
    options: dict[str, object] | None = None,
    *,
    model: str = "target",
    draft: str | None = "draft",
    backend: str = "torch",
) -> Engine:
    return build(
        EngineConfig(
            model=str(folder / model),
            draft_model=None if draft is None else str(folder / draft),
            proposer=proposer,
            proposer_options={proposer: options} if proposer and options else {},
            num_draft_tokens=4,
            backend=backend,  # type: ignore[arg-type]
            kv_tokens=512,
        )
    )


def outputs(engine: Engine, proposer: str | None, params: SamplingParams) -> list[int]:
    request = engine.add([5, 6, 7], params, speculation=Speculation(proposer=proposer))
    for _ in engine.run([request]):
        pass
    return engine.collect(request).tokens


def test_the_exit_layer_has_a_default_and_limits(folder: Path) -> None:
    assert [EarlyExitConfig().resolved(n) for n in (2, 3, 7, 32)] == [1, 1, 3, 13]
    early = engine_for(folder, "early-exit", {"exit_layer": 2}).proposers["early-exit"]
    assert isinstance(early, EarlyExitProposer)
    assert early.exit_layer == 2
    for wrong, reason in ((0, r"in 1\.\.2"), (3, r"in 1\.\.2"), ("two", "a whole number or null")):
        with pytest.raises(ConfigError, match=f"must be {reason}"):
            engine_for(folder, "early-exit", {"exit_layer": wrong})
    with pytest.raises(ConfigError, match="two layers or more"):
        engine_for(folder, "early-exit", model="draft")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True),
        SamplingParams(frequency_penalty=0.5, max_tokens=24, ignore_eos=True),
    ],
)
def test_only_the_first_layers_draft(
    folder: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting with all layers would give the same tokens, more accepted and nothing gained."""
    engine = engine_for(folder, "early-exit", {"exit_layer": 2})
    target = engine.target
    forward, exits = target.forward, []

    def noting(batch: StepBatch) -> StepOutput:
        exits.append(batch.exit_layer)
        return forward(batch)

    monkeypatch.setattr(target, "forward", noting)
    request = engine.add([5, 6, 7], params)
    for _ in engine.run([request]):
        pass
    stats = engine.collect(request).stats
    assert exits.count(None) == stats.num_steps
    # Each draft, and the last of them once more for its state.
    assert exits.count(2) == stats.num_drafted + stats.num_proposals > 10


def test_a_quantized_copy_is_refused_where_it_cannot_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownName, match="int8"):
        engine_for(folder, "quantized", {"dtype": "int9"})
    monkeypatch.setattr(native, "available", lambda: False)
    with pytest.raises(ConfigError, match="early-exit") as refused:
        engine_for(folder, "quantized")
    assert "\n" not in str(refused.value)


@needs_native
def test_a_quantized_copy_agrees_with_the_target(folder: Path) -> None:
    engine = engine_for(folder, "quantized")
    request = engine.add([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in engine.run([request]):
        pass
    assert engine.collect(request).stats.acceptance_length > 3


def test_a_cascade_names_what_it_lacks(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'mid'"):
        engine_for(folder, "cascade")
    mid = str(folder / "mid")
    with pytest.raises(ConfigError, match="passes of at least 1"):
        engine_for(folder, "cascade", {"mid": mid, "passes": 0})
    with pytest.raises(UnknownName, match="Did you mean 'ngram'"):
        engine_for(folder, "cascade", {"mid": mid, "proposer": "n-gram"})
    options: dict[str, object] = {"mid": mid, "proposer": "ngram", "options": {"maxn": 1}}
    with pytest.raises(UnknownName, match="Did you mean 'max_n'"):
        engine_for(folder, "cascade", options)
    with pytest.raises(VocabularyMismatch):
        engine_for(folder, "cascade", {"mid": str(folder / "foreign")})


def test_what_a_cascade_passes_on_is_the_middle_models_own_output(folder: Path) -> None:
    """With the target itself in the middle every draft must stand, whatever drafts inside."""
    engine = engine_for(folder, "cascade", {"mid": str(folder / "target"), "passes": 4})
    for params in (
        SamplingParams(max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(
            temperature=0.8, frequency_penalty=0.6, repetition_penalty=1.3, seed=4, max_tokens=40
        ),
    ):
        request = engine.add([5, 6, 7], params)
        for _ in engine.run([request]):
            pass
        stats = engine.collect(request).stats
        assert stats.num_accepted == stats.num_drafted > 20
    cascade = engine.proposers["cascade"]
    assert isinstance(cascade, CascadeProposer)
    assert cascade.memory.kv.usage == 0


def test_a_draft_model_of_another_vocabulary_is_asked_for_by_name(folder: Path) -> None:
    for proposer in (None, "draft-model"):
        with pytest.raises(VocabularyMismatch, match="cross-vocab"):
            engine_for(folder, proposer, draft="foreign")
    engine = engine_for(folder, "cross-vocab", draft="foreign")
    assert isinstance(engine.proposers[engine.default.proposer or ""], CrossVocabProposer)
    with pytest.raises(ConfigError, match="--draft-model"):
        engine_for(folder, "cross-vocab", draft=None)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    assert outputs(engine, "cross-vocab", params) == outputs(engine, None, params)


def test_common_tokens_are_drafted_as_the_drafter_would_draw_them(folder: Path) -> None:
    """The target under other ids drafts for itself: all is in common, so nothing is refused."""
    write_with_other_ids(folder / "target", folder / "mirrored")
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=30, seed=3, max_tokens=30, ignore_eos=True),
    ):
        engine = engine_for(folder, "cross-vocab", {"method": "intersection"}, draft="mirrored")
        request = engine.add([5, 6, 7], params)
        for _ in engine.run([request]):
            pass
        stats = engine.collect(request).stats
        assert stats.num_accepted == stats.num_drafted > 20
    with pytest.raises(UnknownName, match="Did you mean 'intersection'"):
        engine_for(folder, "cross-vocab", {"method": "intersect"}, draft="mirrored")


def test_a_tuned_draft_model_loads_like_any_other(folder: Path, tmp_path: Path) -> None:
    """Distilled or tuned drafts are plain model folders: here one of another shape and type."""
    write_tiny_llama(
        tmp_path / "tuned", vocab_size=300, hidden_size=16, num_layers=1, dtype=torch.bfloat16
    )
    engine = engine_for(folder, "draft-model", draft=str(tmp_path / "tuned"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    assert outputs(engine, "draft-model", params) == outputs(engine, None, params)
