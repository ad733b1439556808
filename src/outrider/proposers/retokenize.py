"""Translates the target's tokens into another tokenizer's tokens of the same text.

Committed target ids are never re-tokenised, even if the tokenizer would cut their text differently.
The other model's tokens follow the text as it grows: new text is encoded together with the last few
tokens, and replaces them from the first cut that is the same in both.
"""

from __future__ import annotations

from outrider.model.tokenizer import Tokenizer

_WINDOW = 12  # tokens at the end that are cut anew
_SETTLED = 2  # tokens at the window's beginning that stay, because their left context is missing
_TAIL = 6  # committed target tokens that a continuation is tokenised with
_BROKEN = "\ufffd"


class Follower:
    """A growing text in another tokenizer's tokens. `ids` may change at its end as text comes."""

    def __init__(self, source: Tokenizer, other: Tokenizer, prompt: list[int]) -> None:
        self._other = other
        self._stream = source.stream(prompt)
        self._num_read = len(prompt)
        self.ids = other.encode(source.decode(prompt).rstrip(_BROKEN))

    def read(self, tokens: list[int]) -> int:
        """Reads the new ones of the target's `tokens`; returns how many ids stayed."""
        text = "".join(self._stream.add(token) for token in tokens[self._num_read :])
        self._num_read = len(tokens)
        if not text:
            return len(self.ids)
        before = self.ids[-_WINDOW:]
        first = len(self.ids) - len(before)
        after = self._recut(before, text)
        stayed = 0
        while stayed < len(before) and before[stayed : stayed + 1] == after[stayed : stayed + 1]:
            stayed += 1
        self.ids[first + stayed :] = after[stayed:]
        return first + stayed

    def _recut(self, window: list[int], text: str) -> list[int]:
        """Tokens of the window's text and `text` after it."""
        decode = self._other.decode
        cuts = {decode(window[:i]): i for i in range(_SETTLED, len(window) + 1)}
        fresh = self._other.encode(decode(window) + text, special=False)
        for i in range(1, len(fresh)):
            start = decode(fresh[:i])
            if start in cuts and not start.endswith(_BROKEN):
                return window[: cuts[start]] + fresh[i:]
        return window + self._other.encode(text, special=False)

    def text_of(self, draft: list[int]) -> str:
        """The text that `draft` adds: up to the first special id, without a broken character."""
        special = self._other.special_ids
        end = next((i for i, id in enumerate(draft) if id in special), len(draft))
        context = self.ids[-_WINDOW:]
        before = self._other.decode(context)
        after = self._other.decode(context + draft[:end])
        if before.endswith(_BROKEN) or not after.startswith(before):
            return ""
        return after[len(before) :].rstrip(_BROKEN)


def continuation(tokenizer: Tokenizer, tokens: list[int], text: str) -> list[int]:
    """Ids that continue the committed `tokens` by exactly `text`; none where they cannot.

    `text` is tokenised together with the last of `tokens` if these stay unchanged, because some
    tokenizers treat the beginning of a text specially; otherwise alone.
    """
    tail = tokens[-_TAIL:]
    before = tokenizer.decode(tail)
    if not text or before.endswith(_BROKEN):  # the last character is incomplete
        return []
    together = tokenizer.encode(before + text, special=False)
    if together[: len(tail)] == tail:
        return together[len(tail) :]
    alone = tokenizer.encode(text, special=False)
    return alone if tokenizer.decode(tail + alone) == before + text else []
