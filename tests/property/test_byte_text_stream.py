"""The table look-up for byte-level vocabularies against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.model.bundled import bundled_path
from outrider.model.tokenizer import ByteTextStream, TextStream, Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(bundled_path("target"))


@given(st.data())
def test_the_stream_says_what_decoding_says(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any ids: half characters, special tokens and all."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens - 1), max_size=30))
    # Single bytes, so that characters are cut in every possible way.
    ids += tokenizer.encode(data.draw(st.text(max_size=8)), special=False)
    stream = tokenizer.stream()
    assert isinstance(stream, ByteTextStream)
    assert "".join(map(stream.add, ids)) + stream.flush() == tokenizer.decode(ids)


@given(st.text(min_size=1, max_size=12), st.text(max_size=12))
def test_a_prompt_may_end_inside_a_character(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(prompt + text, special=False)
    for cut in range(1, len(ids) + 1):
        streams = [kind(tokenizer, ids[:cut]) for kind in (ByteTextStream, TextStream)]
        fast, slow = ("".join(map(s.add, ids[cut:])) + s.flush() for s in streams)
        assert fast == slow or "\ufffd" in tokenizer.decode(ids[:cut])
