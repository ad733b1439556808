"""Reading, checking and batching training data."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch

from outrider.train.config import DataError
from outrider.train.data import Mixture, Rows, Windows, encode, read_documents
from tiny_training import tiny_tokenizer


def test_text_jsonl_and_shards_are_read_in_order(tmp_path: Path) -> None:
    plain, rows, shard = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.txt.xz"
    plain.write_text("one")
    rows.write_text(
        "\n".join(
            json.dumps(row)
            for row in (
                {"text": "two"},
                {"prompt": "three ", "completion": "four"},
                {"messages": [{"role": "user", "content": "five"}]},
            )
        )
    )
    shard.write_bytes(lzma.compress(b"six\0seven\0"))
    documents = read_documents([plain, rows, shard])
    assert documents == ["one", "two", "three four", "five", "six", "seven"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"  \n", "holds no text"),
        ("bad.jsonl", b'{"text": "a"}\n{oops', r"bad.jsonl:2: not JSON"),
        ("odd.jsonl", b'{"body": "a"}', 'needs "messages"'),
        ("chat.jsonl", b'{"messages": [{"role": "user"}]}', "every message needs"),
        ("binary.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("fake.xz", b"plain", "not an xz file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_documents([path])
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_documents([tmp_path / "none.txt"])


def test_documents_end_with_the_end_token() -> None:
    tokenizer = tiny_tokenizer()
    tokens = encode(["ab", "c"], tokenizer, 300)
    assert tokens.tolist().count(tokenizer.eos_token_id) == 2
    assert tokens[-1] == tokenizer.eos_token_id


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(DataError, match="wrong tokenizer"):
        encode(["def f(x):"], tiny_tokenizer(), 40)


def test_windows_cover_the_stream_once_per_epoch_and_depend_only_on_the_step() -> None:
    tokens = torch.arange(1000)
    windows = Windows(tokens, 10, seed=3)
    first = [windows.rows(step, 11) for step in range(9)]
    assert sorted(torch.cat(first)[:, 0].tolist()) == list(range(0, 990, 10))
    again = Windows(tokens, 10, seed=3)
    assert torch.equal(again.rows(7, 11), first[7])
    assert not torch.equal(Windows(tokens, 10, seed=4).rows(0, 11), first[0])


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="too little text: 15 tokens"):
        Windows(torch.arange(15), 10)


def test_mixture_takes_its_share_of_each_source() -> None:
    text, own = Windows(torch.zeros(100), 10), Rows(torch.ones(6, 10))
    rows = Mixture([(text, 0.75), (own, 0.25)]).rows(0, 8)
    assert rows.shape == (8, 10)
    assert rows[:, 0].sum() == 2
