"""Ratio rules through the whole engine: many sequences against the target's exact joint law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from native_models import needs_native
from other_vocabulary import write_with_other_ids
from outrider.contracts import Draw, Needs, Observation, Proposal, SequenceView
from outrider.engine.build import EngineConfig, build
from outrider.engine.engine import Engine
from outrider.engine.request import Speculation
from outrider.layout import Slice, pack
from outrider.sampling import LogitEdits, RowParams, SamplingParams, distribution_of
from outrider.testing import write_tiny_llama

V = 4
LENGTH = 5
NUM_SEQUENCES = 20_000
PROMPT = [1, 2, 3, 1, 2]
PREDICTION = [2, 1, 3, 1, 2]
PARAMS = SamplingParams(
    temperature=1.3, top_p=0.97, ignore_eos=True, max_tokens=LENGTH, n=NUM_SEQUENCES, seed=5
)
EVERYTHING = replace(
    PARAMS,
    max_tokens=3,
    n=1_500,
    temperature=0.7,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    repetition_penalty=1.2,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("ratio")
    target, _, draft = (
        write_tiny_llama(
            folder / name, num_layers=layers, vocab_size=V, max_positions=32, sharpness=sharpness
        )
        for name, layers, sharpness in (("target", 2, 1.5), ("mid", 2, 0.8), ("draft", 1, 1.5))
    )
    return target, draft


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Engine:
    target, draft = pair
    return build(
        EngineConfig(
            model=str(target),
            draft_model=str(draft),
            backend="torch",
            kv_tokens=16384,
            block_size=8,
            max_sequences=512,
            max_step_tokens=4096,
            proposer_options={"cascade": {"mid": str(target.with_name("mid"))}},
        )
    )


@pytest.fixture(scope="module")
def foreign(pair: tuple[Path, Path]) -> Engine:
    """The draft model has other ids; the cascade three levels."""
    target, draft = pair
    inside = {"mid": str(draft), "proposer": "ngram"}
    options: dict[str, dict[str, object]] = {
        "cross-vocab": {"method": "intersection"},
        "cascade": {
            "mid": str(target.with_name("mid")),
            "proposer": "cascade",
            "options": inside,
        },
    }
    return build(
        EngineConfig(
            model=str(target),
            draft_model=str(write_with_other_ids(draft, draft.with_name("foreign"))),
            proposer="ngram",
            backend="torch",
            kv_tokens=16384,
            block_size=8,
            max_sequences=512,
            max_step_tokens=4096,
            proposer_options=options,
        )
    )


def joint_law(engine: Engine, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """P(the tokens), from separate plain forwards of the target."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    edits = LogitEdits(params, len(PROMPT), V, ())
    for _ in range(params.max_tokens):
        longer: dict[tuple[int, ...], float] = {}
        for prefix, mass in law.items():
            tokens = PROMPT + list(prefix)
            engine.kv.reserve(-1, len(tokens))
            batch = pack([Slice(tokens, 0, engine.kv.table(-1), Proposal())])
            logits = engine.target.forward(batch).logits_RV
            engine.kv.free(-1)
            if params.edits_logits:
                edits.apply(logits[0], PROMPT, prefix)
            (row,) = distribution_of(logits, RowParams.of([params], [1])).double()
            for token in range(V):
                longer[(*prefix, token)] = mass * float(row[token] / row.sum())
        law = longer
    return law


def p_value(engine: Engine, speculation: Speculation, params: SamplingParams = PARAMS) -> float:
    request = engine.add(PROMPT, params, speculation=speculation, prediction=PREDICTION)
    for _ in engine.run([request]):
        pass
    counts = Counter(tuple(c.tokens) for c in engine.collect(request).completions)
    law = joint_law(engine, params)
    num_sequences = params.n
    assert set(counts) <= {cell for cell, mass in law.items() if mass > 0}
    # Cells too rare for a chi-square are pooled.
    common = [cell for cell, mass in law.items() if mass * num_sequences >= 5]
    observed = [counts[cell] for cell in common]
    expected = [law[cell] * num_sequences for cell in common]
    rest = num_sequences - sum(expected)
    if rest > 1:
        observed.append(num_sequences - sum(observed))
        expected.append(rest)
    scale = sum(observed) / sum(expected)
    return float(stats.chisquare(observed, np.array(expected) * scale).pvalue)


@pytest.mark.parametrize(
    ("verifier", "proposer", "k"),
    [
        ("token", "draft-model", 2),
        ("block", "draft-model", 3),
        ("token", "early-exit", 2),
        ("block", "cascade", 3),
        ("tree", "ngram", 2),
        ("tree", "draft-tree", 5),
        ("tree", "hybrid", 3),
        ("coupled", "draft-model", 2),
    ],
)
def test_the_output_has_the_targets_law(
    engine: Engine, verifier: str, proposer: str, k: int
) -> None:
    speculation = Speculation(proposer=proposer, num_draft_tokens=k, verifier=verifier)
    assert p_value(engine, speculation) > 1e-3


def test_a_drafter_of_another_family_leaves_the_law(foreign: Engine) -> None:
    """Drawn from the tokens in common, its law renormalised over them."""
    assert foreign.proposers["cross-vocab"].draws == {Draw.COUPLED, Draw.SAMPLED}
    speculation = Speculation(proposer="cross-vocab", num_draft_tokens=2, verifier="token")
    assert p_value(foreign, speculation, replace(PARAMS, max_tokens=3)) > 1e-3


@pytest.mark.parametrize(
    ("verifier", "proposer", "k"),
    [
        ("token", "draft-model", 3),
        ("block", "early-exit", 3),
        ("token", "prediction", 3),
        ("tree", "suffix", 4),
        ("tree", "lookahead", 6),
        ("tree", "draft-tree", 4),
        ("tree", "hybrid", 3),
        pytest.param(
            "block",
            "quantized",
            3,
            marks=needs_native,
        ),
    ],
)
def test_the_law_with_every_parameter(engine: Engine, verifier: str, proposer: str, k: int) -> None:
    speculation = Speculation(proposer=proposer, num_draft_tokens=k, verifier=verifier)
    assert p_value(engine, speculation, EVERYTHING) > 1e-3


@pytest.mark.parametrize("proposer", ["cross-vocab", "cascade"])
def test_the_law_with_every_parameter_and_foreign_drafters(foreign: Engine, proposer: str) -> None:
    speculation = Speculation(proposer=proposer, num_draft_tokens=3, verifier="block")
    assert p_value(foreign, speculation, EVERYTHING) > 1e-3


class GreedyScoredAsSoft:
    """The commonest bug: drafts the argmax, then claims to have sampled it from a soft q."""

    name = "biased"
    draws = frozenset({Draw.SAMPLED})
    trees = False
    needs = Needs()

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        soft = torch.full((1, V), 0.5 / (V - 1))
        soft[0, 2] = 0.5
        return [Proposal([2], draw=Draw.SAMPLED, q=soft, source=self.name) for _ in views]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None: ...

    def release(self, sequence_id: int) -> None: ...


def test_the_same_test_flags_a_biased_drafter(engine: Engine) -> None:
    engine.proposers["biased"] = GreedyScoredAsSoft()  # the executors share this mapping
    speculation = Speculation(proposer="biased", num_draft_tokens=1, verifier="token")
    assert p_value(engine, speculation) < 1e-6
