"""Text in, text out: never a broken character, never a word taken back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from outrider.errors import ModelError, VocabularyMismatch
from outrider.model.tokenizer import (
    Tokenizer,
    check_drafter_vocabulary,
    check_same_vocabulary,
    load_tokenizer,
)
from outrider.testing import write_tiny_llama, write_tiny_tokenizer


def byte_fallback(folder: Path) -> Tokenizer:
    """Llama-2's kind: words with a leading mark, and bytes for everything else."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "▁b", "a", "b", "▁hello"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    inner.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("level"), num_tokens=300))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_fallback(tmp_path_factory.mktemp("fallback"))


@given(text=st.text(st.sampled_from("az09 \n\t\0<>é\u0301你\ufffd\uffff🎉👩\u200d")))
def test_round_trip(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text)) == text


def streamed(tokenizer: Tokenizer, ids: list[int], context: list[int]) -> str:
    """What a stream shows, checked against what every longer prefix says."""
    stream = tokenizer.stream(context)
    shown = ""
    start = len(tokenizer.decode(context))
    for n, id in enumerate(ids):
        shown += stream.add(id)
        for longer in range(n + 1, min(n + 6, len(ids)) + 1):
            assert tokenizer.decode(context + ids[:longer])[start:].startswith(shown)
    return shown + stream.flush()


@given(ids=st.lists(st.integers(0, 299), max_size=80))
def test_stream_of_any_tokens_byte_level(byte_level: Tokenizer, ids: list[int]) -> None:
    assert streamed(byte_level, ids, []) == byte_level.decode(ids)


tokens = st.one_of(
    st.integers(0, 264), st.sampled_from([1, 2, 3 + 10, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0])
)


@given(ids=st.lists(tokens, max_size=80))
def test_stream_of_any_tokens_byte_fallback(fallback: Tokenizer, ids: list[int]) -> None:
    context = fallback.encode("hello a")
    whole = fallback.decode(context + ids)
    assert fallback.decode(context) + streamed(fallback, ids, context) == whole


def test_stream_continues_the_prompt(fallback: Tokenizer) -> None:
    word = {token: id for id, token in fallback.vocabulary.items()}["▁hello"]
    assert fallback.decode([word]) == fallback.stream().add(word) == "hello"
    assert fallback.stream(fallback.encode("a")).add(word) == " hello"


def test_stream_holds_back_half_a_character(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    pieces = [stream.add(id) for id in byte_level.encode("aé你🎉b")]
    assert "".join(pieces) == "aé你🎉b"
    assert all("\ufffd" not in piece for piece in pieces)
    assert pieces.count("") == 1 + 2 + 3


def test_stream_flushes_a_broken_tail(byte_level: Tokenizer) -> None:
    stream = byte_level.stream()
    first, *_ = byte_level.encode("你")
    assert stream.add(first) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_special_tokens(fallback: Tokenizer, byte_level: Tokenizer) -> None:
    assert fallback.encode("a")[0] == fallback.bos_id == 1
    assert fallback.encode("a", special=False)[0] != 1
    assert fallback.eos_ids == (2,)
    assert fallback.decode([1, 2]) == ""
    assert fallback.decode([1], skip_special=False) == "<s>"
    assert byte_level.special_ids == {0}
    assert byte_level.num_tokens == 300
    assert byte_level.token(0) == "<end>"
    assert byte_level.token(5000) is None


def test_same_vocabulary(tmp_path: Path) -> None:
    target = load_tokenizer(write_tiny_llama(tmp_path / "a", vocab_size=80, num_tokens=70))
    padded = load_tokenizer(write_tiny_llama(tmp_path / "b", vocab_size=96, num_tokens=70))
    check_same_vocabulary(target, padded)
    shorter = load_tokenizer(write_tiny_llama(tmp_path / "c", vocab_size=60))
    with pytest.raises(VocabularyMismatch, match=r"id 60 is .* to the target and None") as caught:
        check_same_vocabulary(target, shorter)
    assert "\n" not in str(caught.value)
    content = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[3:5]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(VocabularyMismatch, match="2 ids differ"):
        check_same_vocabulary(target, load_tokenizer(tmp_path / "b"))
    with pytest.raises(VocabularyMismatch, match="2 ids differ"):
        check_drafter_vocabulary(target, tmp_path / "b")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        check_drafter_vocabulary(
            target, write_tiny_llama(tmp_path / "d", vocab_size=80, tokenizer=False)
        )


def test_a_drafter_with_the_same_tokenizer_file_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_tokenizer(write_tiny_llama(tmp_path / "a", vocab_size=80, num_tokens=70))
    write_tiny_llama(tmp_path / "b", vocab_size=96, num_tokens=70)
    monkeypatch.setattr("outrider.model.tokenizer.Tokenizer", None)
    check_drafter_vocabulary(target, tmp_path / "b")


def test_no_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m", tokenizer=False)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
