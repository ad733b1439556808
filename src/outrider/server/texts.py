"""Tokens in replies: text, bytes, log-probabilities.

Offsets count characters of the reply's text. A token that holds part of a character has the text
U+FFFD, so its bytes are given too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from outrider.events import TokenLogprob
from outrider.model.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no minus infinity; OpenAI writes this


class TokenTexts:
    """The texts of a tokenizer's ids, cached."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(maxsize=1 << 16)(self._text)
        self.eos_ids = tokenizer.eos_ids
        self.longest = max(map(len, tokenizer.vocabulary.values()), default=1)  # in characters

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)

    def by_id(self) -> TokenTexts:
        """The same, with the tokens of log-probabilities as `token_id:5`."""
        found = copy.copy(self)
        found.text = lambda token: f"token_id:{token}"  # type: ignore[assignment]
        return found

    def prompt_scores(
        self, scored: Sequence[TokenLogprob] | None, num_tokens: int
    ) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` under vLLM's names: by token id, nothing for the first token."""
        found: list[dict[str, Any] | None] = [None]
        for entry in scored or ():
            best = sorted(entry.top, key=lambda token: -entry.top[token])
            values = {entry.token: entry.logprob, **entry.top}
            found.append(
                {
                    str(token): {
                        "logprob": finite(value),
                        "rank": best.index(token) + 1 if token in entry.top else None,
                        "decoded_token": self._text(token),
                    }
                    for token, value in values.items()
                }
            )
        return found[:num_tokens]

    def all(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(tokens, skip_special=False)

    def count(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self._tokenizer.encode(text, special=False))

    def plain(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def bytes(self, token: int) -> list[int]:
        spelled = self._tokenizer.token(token) or ""
        if token in self._tokenizer.special_ids:
            return list(spelled.encode())
        if self._tokenizer.is_byte_level:
            return list(self._tokenizer.token_bytes(token))
        if token in self._tokenizer.byte_ids:
            return [int(spelled[3:5], 16)]
        return list(self.text(token).encode())

    def legacy(
        self, scored: Sequence[TokenLogprob | None], tokens: Sequence[int], offset: int
    ) -> dict[str, Any]:
        """`logprobs` of a completion choice. None: the first token of a prompt."""
        texts = [self.text(token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if s is None else finite(s.logprob) for s in scored],
            "top_logprobs": [None if s is None else self._alternatives(s) for s in scored],
            "text_offset": offsets,
        }

    def chat(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        return {
            "content": [
                {
                    **self._entry(s.token, s.logprob),
                    "top_logprobs": [self._entry(token, value) for token, value in s.top.items()],
                }
                for s in scored
            ],
            "refusal": None,
        }

    def _alternatives(self, scored: TokenLogprob) -> dict[str, float]:
        """By text, the chosen token first; of tokens with equal text, the most probable one."""
        found: dict[str, float] = {}
        for token, value in [(scored.token, scored.logprob), *scored.top.items()]:
            text = self.text(token)
            found[text] = max(finite(value), found.get(text, -math.inf))
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.text(token),
            "logprob": finite(logprob),
            "bytes": self.bytes(token),
        }


def finite(logprob: float) -> float:
    return max(logprob, FLOOR) if not math.isnan(logprob) else FLOOR
