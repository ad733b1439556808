"""Our look-ups behind vLLM's interface: nameless rows that come, grow, move and go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from outrider.errors import UnknownName
from outrider.integrations.vllm.mailbox import Mailbox
from outrider.integrations.vllm.proposers import Hybrid, LookUp, Ngram, Prediction, Suffix

MAX_LENGTH = 64


def vllm_config(k: int = 4, **outrider: Any) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(
            max_model_len=MAX_LENGTH, hf_config=SimpleNamespace(eos_token_id=0)
        ),
        additional_config={"outrider": outrider},
    )


class Batch:
    """vLLM's side: rows of tokens in one array."""

    def __init__(self, proposer: LookUp) -> None:
        self.proposer = proposer
        self.tokens = np.zeros((8, MAX_LENGTH), np.int32)
        self.lengths = np.zeros(8, np.int32)

    def put(self, row: int, tokens: list[int]) -> None:
        self.tokens[row, : len(tokens)] = tokens
        self.lengths[row] = len(tokens)

    def step(self, *new: list[int]) -> list[list[int]]:
        """One step in which row i got the tokens `new[i]`."""
        for row, tokens in enumerate(new):
            end = self.lengths[row]
            self.tokens[row, end : end + len(tokens)] = tokens
            self.lengths[row] += len(tokens)
        return self.proposer.propose([*new], self.lengths, self.tokens, slot_mappings=None)


def test_a_repeated_ending_is_continued() -> None:
    batch = Batch(Ngram(vllm_config()))
    batch.put(0, [5, 6, 7, 8, 9, 5])
    assert batch.step([6]) == [[7, 8, 9, 5]]


def test_rows_in_their_prompt_get_nothing() -> None:
    batch = Batch(Ngram(vllm_config()))
    batch.put(0, [5, 6, 7, 5, 6])
    assert batch.step([]) == [[]]


def test_a_sequence_is_known_again_when_its_row_moves() -> None:
    proposer = Suffix(vllm_config())
    batch = Batch(proposer)
    batch.put(0, [1, 2, 3])
    batch.put(1, [5, 6, 7, 8, 5])
    batch.step([4], [6])
    known = proposer.rows[1]
    batch.put(0, [5, 6, 7, 8, 5, 6])  # row 0 has ended and row 1 took its place
    batch.lengths[1] = 0
    assert batch.step([7])[0][:2] == [8, 5]
    assert proposer.rows == {0: known}
    assert known.tokens == [5, 6, 7, 8, 5, 6, 7]
    assert known.num_prompt_tokens == 5


def test_who_left_is_forgotten() -> None:
    proposer = Ngram(vllm_config())
    batch = Batch(proposer)
    batch.put(0, [1, 2, 3])
    batch.step([4])
    batch.put(0, [9, 9])
    batch.step([9])
    inner: Any = proposer.proposer
    assert inner.num_sequences == 1
    assert proposer.rows[0].tokens == [9, 9, 9]


def test_equal_texts_stay_two_sequences() -> None:
    proposer = Ngram(vllm_config())
    batch = Batch(proposer)
    for row in (0, 1):
        batch.put(row, [1, 2, 3])
    batch.step([4], [4])
    batch.step([5], [6])
    assert [s.tokens[-1] for s in proposer.rows.values()] == [5, 6]
    assert proposer.rows[0] is not proposer.rows[1]


def test_nothing_is_drafted_past_the_context() -> None:
    batch = Batch(Ngram(vllm_config(k=8)))
    batch.put(0, ([1, 2, 3, 4] * 16)[: MAX_LENGTH - 4])
    assert [len(draft) for draft in batch.step([1])] == [2]
    assert batch.step([2, 3]) == [[]]


def test_nothing_is_drafted_past_the_end_of_a_text() -> None:
    batch = Batch(Ngram(vllm_config(k=8)))
    batch.put(0, [5, 6, 0, 7, 8, 5])
    assert batch.step([6]) == [[0]]


def test_suffixes_are_chains_and_share_nothing_unless_told() -> None:
    for options, drafts in [({}, []), ({"shared_tokens": 1000}, [13, 14])]:
        batch = Batch(Suffix(vllm_config(k=2, options=options)))
        batch.put(0, [1, 2])
        for token in (11, 12, 13, 14):
            batch.step([token])
        batch.put(0, [3, 4])  # another request
        assert batch.step([11, 12]) == [drafts]


def test_a_prediction_is_found_by_its_prompt(tmp_path: Path) -> None:
    letter = Mailbox(tmp_path).put([1, 2, 3], [20, 21, 22, 23])
    for proposer in (Prediction, Hybrid):
        batch = Batch(proposer(vllm_config(k=3, predictions=str(tmp_path))))
        batch.put(0, [1, 2, 3])
        batch.put(1, [1, 2, 4])
        assert batch.step([20], [20]) == [[21, 22, 23], []]
    letter.unlink()
    assert Mailbox(tmp_path).get([1, 2, 3]) == []


def test_options_are_checked() -> None:
    with pytest.raises(UnknownName, match="max_n"):
        Ngram(vllm_config(options={"max": 3}))


def test_drafting_is_a_function_of_the_text() -> None:
    """Tensor-parallel workers draft each for itself."""
    rng = np.random.default_rng(0)
    text = rng.integers(1, 5, 40).tolist()
    runs = []
    for _ in range(2):
        batch = Batch(Hybrid(vllm_config()))
        batch.put(0, text[:10])
        runs.append([batch.step([token]) for token in text[10:]])
    assert runs[0] == runs[1]
