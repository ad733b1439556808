"""Sampling against its definition, written once more in the most naive way."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.contracts import Draw, Proposal, Stream
from outrider.errors import RequestError
from outrider.noise import draw_key, gumbel
from outrider.sampling import (
    LogitEdits,
    RowDistributions,
    RowParams,
    SamplingParams,
    depths,
    distribution_of,
    draw_tokens,
    filtered,
    path_to,
)

V = 12


@dataclass
class View:
    params: SamplingParams
    tokens: list[int]
    num_prompt_tokens: int
    id: int = 0
    seed: int = 11
    sample_index: int = 0
    draw: Draw = Draw.COUPLED
    prediction: list[int] = field(default_factory=list)
    salt: str = ""
    num_computed: int = 0
    finish_ids: frozenset[int] = frozenset({0})
    edits: LogitEdits | None = None
    stop_rule: None = None

    def __post_init__(self) -> None:
        if self.params.edits_logits:
            self.edits = LogitEdits(self.params, self.num_prompt_tokens, V, self.finish_ids)


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """The filters exactly as the module's docstring defines them."""
    scaled = [x / params.temperature for x in logits]
    kept = {
        v
        for v in range(len(scaled))
        if not params.top_k or sum(w > scaled[v] for w in scaled) < params.top_k
    }
    top = max(scaled)
    mass = {v: math.exp(scaled[v] - top) for v in kept}
    total = sum(mass.values())
    probs = {v: m / total for v, m in mass.items()}
    if params.top_p < 1:
        kept = {v for v in kept if sum(q for q in probs.values() if q > probs[v]) < params.top_p}
    return {v for v in kept if probs[v] >= params.min_p * max(probs.values())}


# Quarter steps make ties frequent, and keep thresholds away from rounding.
logit_rows = st.lists(st.integers(-12, 12).map(lambda x: x / 4), min_size=V, max_size=V)
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, V + 2),
    top_p=st.sampled_from([0.0371, 0.313, 0.731, 0.917, 1.0]),
    min_p=st.sampled_from([0.0, 0.0173, 0.217, 0.771, 1.0]),
)


@settings(max_examples=500)
@given(st.lists(st.tuples(logit_rows, filters), min_size=1, max_size=4))
def test_filters_keep_what_the_definition_keeps(
    rows: list[tuple[list[float], SamplingParams]],
) -> None:
    logits = torch.tensor([r for r, _ in rows])
    result = filtered(logits, RowParams.of([p for _, p in rows], [1] * len(rows)))
    for got, (row, params) in zip(result, rows, strict=True):
        assert set(torch.isfinite(got).nonzero().flatten().tolist()) == naive_kept(row, params)


@settings(max_examples=300)
@given(logit_rows, filters, st.integers(0, 2**64 - 1))
def test_a_draw_is_the_argmax_over_what_is_kept(
    row: list[float], params: SamplingParams, key: int
) -> None:
    kept = naive_kept(row, params)
    noise = gumbel([key], V, torch.device("cpu"))[0]
    scores = {v: row[v] / params.temperature + float(noise[v]) for v in kept}
    (token,) = draw_tokens(torch.tensor([row]), RowParams.of([params], [1]), [key])
    assert token in kept
    assert scores[token] >= max(scores.values()) - 1e-5


@given(logit_rows, filters)
def test_the_law_is_normalised_over_what_is_kept(row: list[float], params: SamplingParams) -> None:
    (law,) = distribution_of(torch.tensor([row]), RowParams.of([params], [1]))
    assert set(law.nonzero().flatten().tolist()) == naive_kept(row, params)
    assert float(law.sum()) == pytest.approx(1, abs=1e-5)


def test_greedy_is_the_lowest_of_the_largest_and_ignores_filters() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    rows = RowParams.of([SamplingParams(temperature=0, top_k=1, top_p=0.1)], [1])
    assert draw_tokens(logits, rows, [5]) == [1]
    assert distribution_of(logits, rows).tolist() == [[0, 1, 0, 0]]


def test_greedy_and_sampled_rows_mix() -> None:
    logits = torch.randn(2, V)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1.0)]
    both = draw_tokens(logits, RowParams.of(params, [1, 1]), [1, 2])
    alone = [
        draw_tokens(logits[i : i + 1], RowParams.of([params[i]], [1]), [i + 1])[0] for i in (0, 1)
    ]
    assert both == alone


def naive_edit(
    row: list[float], history: list[int], num_prompt: int, p: SamplingParams
) -> list[float]:
    output = history[num_prompt:]
    result = list(row)
    for v in range(V):
        if v in p.banned_ids or (v == 0 and len(output) < p.min_tokens):
            result[v] = -math.inf
        result[v] += p.logit_bias.get(v, 0.0)
        if v in history:
            r = p.repetition_penalty
            result[v] = result[v] / r if result[v] > 0 else result[v] * r
        count = output.count(v)
        result[v] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return result


edits = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, V - 1), st.sampled_from([-2.0, 3.0]), max_size=2),
    banned_ids=st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
    min_tokens=st.integers(0, 6),
    max_tokens=st.just(20),
)
tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=8)


@settings(max_examples=300)
@given(edits, tokens, st.lists(st.integers(0, V - 1), max_size=5), st.data())
def test_penalties_follow_every_path_of_a_draft(
    params: SamplingParams, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """Each row of a tree is processed as plain decoding would process it at that position."""
    drafted = data.draw(st.lists(st.integers(0, V - 1), max_size=5))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(len(drafted))]
    proposal = Proposal(drafted, parents)
    view = View(params, prompt + output, len(prompt))
    logits = torch.randn(len(drafted) + 1, V)
    raw = logits.tolist()
    laws = RowDistributions(logits, [view], [proposal], [view.edits], num_tokens=V)
    draws = laws.draw()
    for node in range(-1, len(drafted)):
        path = [drafted[i] for i in path_to(proposal, node)]
        expected = naive_edit(raw[node + 1], prompt + output + path, len(prompt), params)
        got = logits[node + 1].tolist()
        assert got == pytest.approx(expected, abs=1e-5)
        assert got[draws[node + 1]] == max(got)


def test_rows_are_keyed_by_absolute_position() -> None:
    """The row at depth d of a draft draws what the root row draws d tokens later."""
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(1, V).repeat(4, 1)
    proposal = Proposal([1, 2, 3])
    early = View(params, [5, 6], 2)
    draws = RowDistributions(logits.clone(), [early], [proposal], [None], num_tokens=V).draw()
    for depth in range(4):
        late = View(params, [5, 6, *[1, 2, 3][:depth]], 2)
        alone = RowDistributions(logits[:1].clone(), [late], [Proposal()], [None], num_tokens=V)
        assert alone.draw() == [draws[depth]]
        key = draw_key(11, 0, 2 + depth, Stream.TARGET)
        assert draws[depth] == int((logits[0] + gumbel([key], V, logits.device)[0]).argmax())


def test_padding_ids_are_never_drawn_and_never_in_a_law() -> None:
    logits = torch.zeros(1, V)
    logits[0, V - 2 :] = 50.0
    view = View(SamplingParams(temperature=1.0), [1], 1)
    laws = RowDistributions(logits, [view], [Proposal()], [None], num_tokens=V - 2)
    assert laws.draw()[0] < V - 2
    assert laws.probs(0, 1).shape == (1, V - 2)


def test_depths_and_paths() -> None:
    chain, tree = Proposal([7, 8, 9]), Proposal([1, 2, 3, 4], [-1, -1, 0, 2])
    assert depths(chain) == [0, 1, 2, 3]
    assert depths(tree) == [0, 1, 1, 2, 3]
    assert path_to(tree, 3) == [0, 2, 3]
    assert path_to(chain, 1) == [0, 1]
    assert path_to(tree, -1) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.nan),
        ("n", 0),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 1000),
        ("logprobs", 21),
        ("seed", 2**64),
        ("stop", ("",)),
        ("logit_bias", {3: math.nan}),
        ("temperature", True),
        ("temperature", "hot"),
    ],
)
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name
    assert "\n" not in str(caught.value)
