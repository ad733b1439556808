"""Training data: text files, JSONL, corpus shards or stored generations -> token ids -> batches.

Wrong data is an error here, before any training: empty files, JSON that is neither chat nor
completion, a tokenizer whose ids do not fit the model, too little text.

A batch is a function of (seed, step) alone, so a resumed run trains on the same rows as an
uninterrupted one. Shapes: B rows, L positions.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.train.config import DataError

Ids = NDArray[np.uint16] | NDArray[np.uint32]
SEPARATOR = "\0"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that training uses."""

    eos_token_id: int | None

    def __call__(self, text: Sequence[str], **options: bool) -> Any: ...
    def __len__(self) -> int: ...


def read_documents(paths: Iterable[Path], tokenizer: Any = None) -> list[str]:
    """Documents of text, `.jsonl` and `.xz` (NUL-separated) files, in the order given.

    `tokenizer` renders chat messages; without a chat template their contents are joined by blank
    lines.
    """
    documents: list[str] = []
    for path in paths:
        if not path.is_file():
            raise DataError(f"no such file: {path}")
        try:
            if path.suffix == ".xz":
                found = lzma.decompress(path.read_bytes()).decode().split(SEPARATOR)
            elif path.suffix == ".jsonl":
                found = [
                    _json_document(line, f"{path}:{number}", tokenizer)
                    for number, line in enumerate(path.read_text().splitlines(), 1)
                    if line.strip()
                ]
            else:
                found = [path.read_text()]
        except UnicodeDecodeError:
            raise DataError(f"{path} is not UTF-8 text") from None
        except lzma.LZMAError:
            raise DataError(f"{path} is not an xz file") from None
        found = [text for text in found if text.strip()]
        if not found:
            raise DataError(f"{path} holds no text")
        documents.extend(found)
    if not documents:
        raise DataError("no training data was given")
    return documents


def _json_document(line: str, where: str, tokenizer: Any) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg})") from None
    if isinstance(row, dict):
        if isinstance(row.get("messages"), list):
            return _chat_document(row["messages"], where, tokenizer)
        if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
            return str(row["prompt"] + row["completion"])
        for key in ("text", "prompt", "completion"):
            if isinstance(row.get(key), str):
                return str(row[key])
    raise DataError(f'{where}: needs "messages", "prompt"/"completion" or "text"')


def _chat_document(messages: list[Any], where: str, tokenizer: Any) -> str:
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError(f'{where}: every message needs a "role" and a text "content"')
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n\n".join(message["content"] for message in messages)


def encode(documents: Sequence[str], tokenizer: Tokenizer, vocab_size: int) -> Ids:
    """One stream of token ids, each document followed by the end-of-text token."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-text token")
    parts: list[NDArray[np.uint32]] = []
    highest = 0
    for start in range(0, len(documents), 4096):
        encoded = tokenizer(
            documents[start : start + 4096],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for ids in encoded["input_ids"]:
            parts.append(np.asarray([*ids, tokenizer.eos_token_id], dtype=np.uint32))
            highest = max(highest, int(parts[-1].max()))
    if highest >= vocab_size:
        raise DataError(
            f"token id {highest} is outside the vocabulary of {vocab_size}: wrong tokenizer?"
        )
    tokens = np.concatenate(parts)
    return tokens.astype(np.uint16) if vocab_size <= 1 << 16 else tokens


def digest(tokens: Ids) -> str:
    """SHA-256 of a token stream, for provenance files."""
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()


class BatchSource(Protocol):
    """rows(step) -> int64 [B, length]; the same step always gives the same rows."""

    def rows(self, step: int, num_rows: int) -> Tensor: ...


class Shuffle:
    """Endless indices below `size`: every one once per epoch, in an order set by the seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def pick(self, step: int, num_rows: int) -> list[tuple[int, int]]:
        """(epoch, index) of each row of `step`; `num_rows` must stay the same over a run."""
        picked = []
        for row in range(step * num_rows, (step + 1) * num_rows):
            epoch, position = divmod(row, self.size)
            if epoch != self._epoch:
                generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
                self._order, self._epoch = generator.permutation(self.size), epoch
            picked.append((epoch, int(self._order[position])))
        return picked


class Windows:
    """Windows of `length` tokens of one stream; their borders move each epoch."""

    def __init__(self, tokens: Tensor, length: int, seed: int = 0) -> None:
        num_windows = (len(tokens) - length) // length
        if num_windows < 1:
            raise DataError(
                f"too little text: {len(tokens)} tokens, at least {2 * length} are needed "
                f"for sequences of {length}"
            )
        self.tokens, self.length = tokens, length
        self._shuffle = Shuffle(num_windows, seed)

    def rows(self, step: int, num_rows: int) -> Tensor:
        # 0.618...: successive phases are far from one another.
        starts = [
            index * self.length + int(epoch * 0.6180339887 % 1 * self.length)
            for epoch, index in self._shuffle.pick(step, num_rows)
        ]
        offsets_L = torch.arange(self.length, device=self.tokens.device)
        index_BL = torch.tensor(starts, device=self.tokens.device)[:, None] + offsets_L
        return self.tokens[index_BL].long()


class Rows:
    """Ready rows, [R, length]: the target's own generations."""

    def __init__(self, table: Tensor, seed: int = 0) -> None:
        if not len(table):
            raise DataError("no generated rows")
        self.table = table
        self._shuffle = Shuffle(len(table), seed)

    def rows(self, step: int, num_rows: int) -> Tensor:
        picks = [index for _, index in self._shuffle.pick(step, num_rows)]
        return self.table[torch.tensor(picks, device=self.table.device)].long()


def pack_answers(tokens_RL: Tensor, first_R: Tensor, end_R: Tensor) -> Tensor:
    """Rows with two numbers in front: where the answer begins, and where it ends. [R, 2 + L]"""
    return torch.cat([first_R[:, None], end_R[:, None], tokens_RL], dim=1).to(torch.int32)


@dataclass
class Mixture:
    """A fixed share of each batch from each source; shares are rounded to whole rows."""

    sources: Sequence[tuple[BatchSource, float]]

    def rows(self, step: int, num_rows: int) -> Tensor:
        counts = [round(share * num_rows) for _, share in self.sources]
        counts[0] += num_rows - sum(counts)
        parts = [
            source.rows(step, count)
            for (source, _), count in zip(self.sources, counts, strict=True)
            if count > 0
        ]
        return torch.cat(parts)


def to_device(tokens: Ids, device: torch.device | str) -> Tensor:
    """The stream as int32 on `device` (torch cannot index uint16)."""
    return torch.from_numpy(tokens.astype(np.int32)).to(device)
