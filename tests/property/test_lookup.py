"""Prompt lookup and prediction against scans of the whole text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from native_models import needs_native
from outrider.contracts import Draw, SequenceView
from outrider.errors import ConfigError, UnknownName
from outrider.proposers.ngram import MakeIndex, NgramConfig, NgramProposer
from outrider.proposers.ngram_index import NativeNgramIndex, PythonNgramIndex
from outrider.proposers.options import read_options
from outrider.proposers.prediction import PredictionConfig, PredictionProposer

TOKENS = st.lists(st.integers(0, 2), max_size=30)
RANGES = st.tuples(st.integers(1, 3), st.integers(0, 3)).map(lambda r: (r[0], r[0] + r[1]))


both_indexes = pytest.mark.parametrize(
    "make_index", [PythonNgramIndex, pytest.param(NativeNgramIndex, marks=needs_native)]
)


def view_of(
    tokens: list[int],
    *,
    num_prompt_tokens: int = 1,
    prediction: list[int] | None = None,
    finish_ids: frozenset[int] = frozenset(),
    sequence_id: int = 0,
) -> SequenceView:
    view = SimpleNamespace(
        id=sequence_id,
        tokens=tokens,
        num_prompt_tokens=num_prompt_tokens,
        prediction=prediction or [],
        finish_ids=finish_ids,
    )
    return cast(SequenceView, view)


def trusted(match: int) -> int:
    """How much a place is worth that agrees with the last `match` tokens."""
    return int(min(2 + 2 * match, 6 + match / 4))


def scan(tokens: list[int], min_n: int, max_n: int, budget: int) -> list[int]:
    """Prompt lookup as its definition has it: try every n and every place."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                draft: list[int] = []
                end = start + n
                agreeing = [m for m in range(end + 1) if tokens[end - m : end] == tokens[-m:]]
                match = max((m for m in agreeing if m), default=0)
                for i in range(end, end + min(budget, trusted(match))):
                    draft.append((tokens + draft)[i])
                return draft
    return []


@both_indexes
@given(
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    ns=RANGES,
    budget=st.integers(1, 9),
    released=st.integers(0, 8),
)
def test_lookup_is_the_scan(
    make_index: MakeIndex, pieces: list[list[int]], ns: tuple[int, int], budget: int, released: int
) -> None:
    proposer = NgramProposer(NgramConfig(min_n=ns[0], max_n=ns[1]), make_index)
    tokens: list[int] = []
    view = view_of(tokens)
    for i, piece in enumerate(pieces):
        tokens += piece
        if i == released:  # preempted: it comes back with all its tokens
            proposer.release(0)
        (proposal,) = proposer.propose([view], [budget])
        assert proposal.tokens == scan(tokens, *ns, budget)
        assert proposal.draw is Draw.DETERMINISTIC
        assert proposal.source == "ngram"


def align(output: list[int], guess: list[int], min_n: int, max_n: int) -> tuple[int, int] | None:
    """Where the guess goes on after `output`, token by token, every place tried each time.

    Also: how many tokens have agreed there.
    """
    cursor, lost, agreed = 0, False, 4
    for end in range(1, len(output) + 1):
        if not lost and cursor < len(guess) and guess[cursor] == output[end - 1]:
            cursor += 1
            agreed += 1
            continue
        lost = True
        for n in range(min(max_n, end), min_n - 1, -1):
            ends = [
                e for e in range(n, len(guess) + 1) if guess[e - n : e] == output[end - n : end]
            ]
            if ends:
                cursor = min((e for e in ends if e >= cursor), default=ends[-1])
                lost = False
                agreed = n
                break
    return None if lost else (cursor, agreed)


@given(
    guess=TOKENS,
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    pieces=st.lists(TOKENS, max_size=5),
    ns=RANGES,
    budget=st.integers(1, 9),
    released=st.integers(0, 5),
)
@example(guess=[0, 1], prompt=[0], pieces=[[0, 1]], ns=(1, 2), budget=1, released=5)
def test_prediction_is_the_scan(
    guess: list[int],
    prompt: list[int],
    pieces: list[list[int]],
    ns: tuple[int, int],
    budget: int,
    released: int,
) -> None:
    proposer = PredictionProposer(PredictionConfig(min_n=ns[0], max_n=ns[1]))
    tokens = list(prompt)
    view = view_of(tokens, num_prompt_tokens=len(prompt), prediction=guess)
    for i, piece in enumerate([[], *pieces]):
        tokens += piece
        if i == released:
            proposer.release(0)
        (proposal,) = proposer.propose([view], [budget])
        place = align(tokens[len(prompt) :], guess, *ns)
        cursor, agreed = place or (len(guess), 0)
        assert proposal.tokens == guess[cursor : cursor + min(budget, trusted(agreed))]


def test_a_repetition_is_continued() -> None:
    view = view_of([9, 1, 2, 1, 2])
    assert NgramProposer().propose([view], [5])[0].tokens == [1, 2, 1, 2, 1]


def test_nothing_is_drafted_past_a_finishing_id() -> None:
    finish = frozenset({7})
    view = view_of([1, 2, 3, 7, 4, 1, 2], finish_ids=finish)
    assert NgramProposer().propose([view], [4])[0].tokens == [3, 7]
    view = view_of([1], prediction=[5, 7, 6], finish_ids=finish)
    assert PredictionProposer().propose([view], [4])[0].tokens == [5, 7]


def test_prediction_finds_its_way_after_an_edit() -> None:
    guess = [1, 2, 3, 4, 5, 6, 1, 2, 9]
    view = view_of([0, 1, 2, 8, 4], prediction=guess)  # 3 became 8
    assert PredictionProposer().propose([view], [3])[0].tokens == [5, 6, 1]


def test_sequences_do_not_mix_and_release_forgets() -> None:
    proposer = NgramProposer()
    first, second = view_of([1, 2, 3, 1, 2]), view_of([4, 5, 6, 4, 5], sequence_id=1)
    drafts = proposer.propose([first, second], [1, 1])
    assert [draft.tokens for draft in drafts] == [[3], [6]]
    for sequence_id in (0, 1, 2):
        proposer.release(sequence_id)
    assert proposer.num_sequences == 0


@pytest.mark.parametrize("config", [NgramConfig, PredictionConfig])
def test_bad_options_are_refused(config: type[NgramConfig] | type[PredictionConfig]) -> None:
    with pytest.raises(ConfigError, match="min_n=5"):
        config(min_n=5, max_n=4)
    with pytest.raises(UnknownName, match="Did you mean 'max_n'"):
        read_options(config, "it", {"max_m": 3})
    with pytest.raises(ConfigError, match="proposer 'it'"):
        read_options(config, "it", {"max_n": "3"})
