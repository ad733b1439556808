"""Following a text in another tokenizer's tokens: the text stays the same, whatever the cuts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from outrider.model.tokenizer import Tokenizer, load_tokenizer
from outrider.proposers.retokenize import Follower, continuation

TEXT = "def add(first, second):\n    return first + second\n" * 3 + "naïve café — 東京\n" * 3
MARKS = 2  # index of the tokenizer that works the SentencePiece way


def trained(folder: Path, size: int, *, metaspace: bool) -> Tokenizer:
    inner = Inner(models.BPE(unk_token="<unk>", byte_fallback=metaspace))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<end>", "<unk>"]
    if metaspace:  # words begin with a mark, bytes are a last resort
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet = [chr(c) for c in range(33, 127)]
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    inner.train_from_iterator([TEXT], trainer)
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return [
        trained(folder / "small", 270, metaspace=False),
        trained(folder / "large", 330, metaspace=False),
        trained(folder / "marks", 420, metaspace=True),
    ]


pieces = st.lists(
    st.sampled_from(
        ["def ", "return first", "\n    ", "add(", ":", "naï", "ve", "東京", " x", "é"]
    ),
    max_size=12,
)


@given(pieces, pieces, st.integers(0, 2), st.integers(0, 2))
def test_the_ids_spell_the_text(
    tokenizers: list[Tokenizer], prompt: list[str], rest: list[str], i: int, j: int
) -> None:
    source, other = tokenizers[i], tokenizers[j]
    tokens = source.encode("x" + "".join(prompt))
    follower = Follower(source, other, tokens)
    for id in source.encode("".join(rest), special=False):
        tokens = [*tokens, id]
        before = list(follower.ids)
        stayed = follower.read(tokens)
        assert follower.ids[:stayed] == before[:stayed]
    if MARKS not in (i, j):  # which begin every text with a space of their own
        assert other.decode(follower.ids) == "x" + "".join(prompt) + "".join(rest)


@given(pieces, pieces, st.integers(0, 2))
def test_a_continuation_says_exactly_its_text(
    tokenizers: list[Tokenizer], prompt: list[str], rest: list[str], i: int
) -> None:
    tokenizer = tokenizers[i]
    tokens, text = tokenizer.encode("x" + "".join(prompt)), "".join(rest)
    ids = continuation(tokenizer, tokens, text)
    tail = tokens[-6:]
    if ids:
        assert tokenizer.decode(tail + ids) == tokenizer.decode(tail) + text
    elif i != MARKS:
        assert not text


def test_half_a_character_is_not_continued(tokenizers: list[Tokenizer]) -> None:
    small, large, _ = tokenizers
    tokens = small.encode("x 東京")
    assert small.decode(tokens[:-1]).endswith("\ufffd")
    assert continuation(small, tokens[:-1], " x") == []
    follower = Follower(small, large, tokens[:-1])
    assert "\ufffd" not in large.decode(follower.ids)
    end = large.encode("<end>")
    assert follower.text_of([*large.encode("def "), *end, *large.encode("x")]) == "def "
