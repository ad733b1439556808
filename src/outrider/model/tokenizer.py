"""Text to token ids and back, from the tokenizer.json of a folder.

`TextStream` turns tokens into text one by one. Tokens are not characters, and text that a client
has received cannot be changed, so it returns only text that no later token can change.
"""

from __future__ import annotations

import codecs
import filecmp
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from outrider.errors import ModelError, VocabularyMismatch
from outrider.model.bundled import find_folder
from outrider.model.gguf.files import is_gguf
from outrider.model.weights import read_config, read_eos_ids, read_json

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


def _byte_of() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_of()


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """The tokenizer of a folder, hub name or bundled name; `ModelError` if there is none."""
    return Tokenizer(find_folder(path_or_name))


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; load it once with transformers' AutoTokenizer "
            "and save_pretrained into the folder"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        line = " ".join(str(error).split())
        raise ModelError(f"{path} is not a tokenizer ({line}); download it again") from error


class Tokenizer:
    """`encode`, `decode` and the properties of ids that generation needs. Immutable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bytes: dict[int, bytes] = {}
        self.config: dict[str, Any] = {}
        if is_gguf(folder):
            from outrider.model.gguf.container import open_gguf
            from outrider.model.gguf.tokenizer import build_tokenizer

            self._inner, self.config = build_tokenizer(open_gguf(folder))
        else:
            self._inner = _read_tokenizer(folder)
            if (folder / "tokenizer_config.json").is_file():
                self.config = read_json(folder / "tokenizer_config.json")
        self._inner.no_truncation()
        self._inner.no_padding()
        self.bos_id = self._special("bos_token")
        self.eos_ids = self._eos_ids()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`. `special` adds the begin-of-text token of tokenizer.json's template,
        if it has one; use False for text that continues another or comes from a chat template."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that form no character become U+FFFD; skips unknown ids."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def serialized(self) -> str:
        """The tokenizer as JSON, for libraries that build their own tokenizer from it."""
        text: str = self._inner.to_str()
        return text

    def token(self, id: int) -> str | None:
        """The vocabulary's own spelling of an id; None for padding."""
        token: str | None = self._inner.id_to_token(id)
        return token

    def stream(
        self, context: Sequence[int] = (), *, special: bool = False
    ) -> TextStream | ByteTextStream:
        """Incremental detokenisation of the tokens after `context` (the prompt); `special`: with
        the text of special tokens."""
        kind = ByteTextStream if self.is_byte_level else TextStream
        return kind(self, context, special=special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether the bytes of a text are the concatenated bytes of its tokens."""
        decoder = self._inner.decoder
        return decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel"

    def token_bytes(self, id: int) -> bytes:
        """The bytes that an id adds to a byte-level text; none for special and unknown ids."""
        found = self._bytes.get(id)
        if found is None:
            token = None if id in self.special_ids else self.token(id)
            codes = [] if token is None else [_BYTE_OF.get(char, -1) for char in token]
            # Tokens with other characters are added tokens, which stand for themselves.
            found = bytes(codes) if min(codes, default=0) >= 0 else (token or "").encode()
            self._bytes[id] = found
        return found

    def spelled_bytes(self, id: int) -> bytes:
        """As `token_bytes`, with the text of special tokens."""
        if id in self.special_ids:
            return (self.token(id) or "").encode()
        return self.token_bytes(id)

    @cached_property
    def added(self) -> dict[str, int]:
        """The ids of added tokens, special ones and others, by their text."""
        return {token.content: id for id, token in self._inner.get_added_tokens_decoder().items()}

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """Every id of a token, with its spelling."""
        return {id: token for token, id in self._inner.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def num_tokens(self) -> int:
        """Ids below this number have a token."""
        return max(self.vocabulary, default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` skips."""
        added = self._inner.get_added_tokens_decoder()
        return frozenset(id for id, token in added.items() if token.special)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids whose text depends on neighbours: the bytes of a byte-fallback decoder."""
        if self._inner.decoder is None or b"ByteFallback" not in self._inner.decoder.__getstate__():
            return frozenset()
        return frozenset(i for i, token in self.vocabulary.items() if _BYTE_TOKEN.fullmatch(token))

    def _special(self, name: str) -> int | None:
        token = self.config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return self._inner.token_to_id(token) if isinstance(token, str) else None

    def _eos_ids(self) -> tuple[int, ...]:
        config: Mapping[str, Any] = {}
        if is_gguf(self.folder):
            config = read_config(self.folder)
        elif (self.folder / "config.json").is_file():
            config = read_json(self.folder / "config.json")
        ids = read_eos_ids(self.folder, config)
        own = self._special("eos_token")
        return ids or (() if own is None else (own,))


class ByteTextStream:
    """`TextStream` for byte-level vocabularies: a table look-up instead of decoding a window."""

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, special: bool = False
    ) -> None:
        self._bytes = tokenizer.spelled_bytes if special else tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for id in context[-4:]:  # the prompt may end inside a character
            self._decoder.decode(self._bytes(id))

    def add(self, id: int) -> str:
        """Takes one token; returns the text that it completes."""
        return self._decoder.decode(self._bytes(id))

    def flush(self) -> str:
        """The text held back so far, as it stands; call at the end."""
        return self._decoder.decode(b"", final=True)


class TextStream:
    """Tokens in, final text out. `"".join` of everything it returns is the text of the tokens.

    It holds back a last character with missing bytes, and a run of byte tokens, because the whole
    run determines their text.
    """

    _WINDOW = 24  # tokens decoded at a time; the text of older tokens is final
    _OVERLAP = 4  # tokens kept as left context: decoders treat the first token of a text specially

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), *, special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = not special
        self._ids: list[int] = []
        self._num_shown = 0  # characters of the text of `_ids` that were returned, or are context
        self._settled_tail(list(context))

    def add(self, id: int) -> str:
        """Takes one token; returns the text that it completes, often none."""
        self._ids.append(id)
        text = self._settled()
        shown, self._num_shown = self._num_shown, max(self._num_shown, len(text))
        if len(self._ids) > self._WINDOW and len(text) == len(self._decode(self._ids)):
            self._settled_tail(self._ids)
        return text[shown:]

    def flush(self) -> str:
        """The text held back so far, as it stands; call at the end."""
        text = self._decode(self._ids)[self._num_shown :]
        self._num_shown += len(text)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skips)

    def _settled(self) -> str:
        """The part of the window's text that later tokens cannot change."""
        end = len(self._ids)
        bytes_, special = self._tokenizer.byte_ids, self._tokenizer.special_ids
        if bytes_:
            while end and (self._ids[end - 1] in bytes_ or self._ids[end - 1] in special):
                end -= 1
        text = self._decode(self._ids[:end])
        return text.removesuffix(_REPLACEMENT)

    def _settled_tail(self, ids: list[int]) -> None:
        """Keeps the last few tokens with text; all of their text counts as returned."""
        keep = self._OVERLAP
        while keep < len(ids) and not self._decode(ids[-keep:]).strip(_REPLACEMENT):
            keep += self._OVERLAP
        self._ids = ids[-keep:]
        self._num_shown = len(self._decode(self._ids))


def check_drafter_vocabulary(target: Tokenizer, drafter: str | Path) -> None:
    """`check_same_vocabulary` of a folder or name; reads no tokenizer if the files are equal."""
    folder = find_folder(drafter)
    ours, theirs = target.folder / "tokenizer.json", folder / "tokenizer.json"
    are_files = ours.is_file() and theirs.is_file()
    if not (are_files and filecmp.cmp(ours, theirs, shallow=False)):
        check_same_vocabulary(target, Tokenizer(folder))


def check_same_vocabulary(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raises `VocabularyMismatch` if an id stands for different tokens.

    Only ids with a token count; embeddings may be padded to different widths.
    """
    ours, theirs = target.vocabulary, drafter.vocabulary
    if ours == theirs:
        return
    differing = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    first = differing[0]
    raise VocabularyMismatch(
        f"target and drafter do not share a vocabulary: id {first} is {ours.get(first)!r} to the "
        f"target and {theirs.get(first)!r} to the drafter ({len(differing)} ids differ); "
        "choose a drafter with the target's tokenizer, or proposer 'cross-vocab'"
    )
