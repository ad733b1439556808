"""N-grams of a growing text, found by their last tokens in constant time per token.

The n-grams that end at one place, for n = 1, 2, ..., are keyed by one integer each, built from
the place backwards so that every key extends the one before:

    key_n = (token[end-1] + 1) << 32*(n-1) | ... | (token[end-n] + 1)

Keys are exact (no two n-grams share one, whatever their n), so nothing is ever compared again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider import native
from outrider.native.lookup import NativeLookup, packed
from outrider.proposers._lookup import Draft

_TOKEN_BITS = 32
MAX_MATCH = 64  # a longer match counts as this long


def suffix_keys(tokens: Sequence[int], end: int, min_n: int, max_n: int) -> list[int]:
    """Keys of the n-grams that end before `end`: `min_n` first, `max_n` or the whole text last."""
    keys = []
    key = 0
    for n in range(1, min(max_n, end) + 1):
        key = key << _TOKEN_BITS | (tokens[end - n] + 1)
        if n >= min_n:
            keys.append(key)
    return keys


@dataclass(frozen=True, slots=True)
class NgramRule:
    """Endings of `max_n` tokens are tried first, shorter ones down to `min_n`."""

    min_n: int
    max_n: int
    trusted: Sequence[int]  # [n]: most tokens after a match of n; longer ones count as the last


class PythonNgramIndex:
    """Where each n-gram of a text last occurred, its final tokens excepted.

    An occurrence counts once a token follows it: the text's own ending never finds itself.
    """

    __slots__ = ("_finish_ids", "_last_end", "_rule", "_text")

    def __init__(self, rule: NgramRule, finish_ids: frozenset[int] = frozenset()) -> None:
        self._rule = rule
        self._finish_ids = finish_ids
        self._text: list[int] = []
        self._last_end: dict[int, int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._text)

    def draft(self, tokens: Sequence[int], budget: int) -> Draft:
        text, rule = self._text, self._rule
        first = len(text)
        text += tokens
        for end in range(first, len(text)):
            for key in suffix_keys(text, end, rule.min_n, rule.max_n):
                self._last_end[key] = end
        start = self._find()
        if start is None:
            return Draft()
        trusted = rule.trusted[match_length(text, start, len(rule.trusted) - 1)]
        return Draft(up_to_finish(copy_from(text, start, min(budget, trusted)), self._finish_ids))

    def _find(self) -> int | None:
        """Where the text goes on after the latest earlier occurrence of its longest known ending.

        None when no ending of `min_n` tokens occurred before.
        """
        found = None
        for key in suffix_keys(self._text, len(self._text), self._rule.min_n, self._rule.max_n):
            end = self._last_end.get(key)
            if end is None:  # then no longer ending occurred either
                break
            found = end
        return found


class NativeNgramIndex(NativeLookup):
    """The same by a scan of the text, which takes microseconds."""

    def __init__(self, rule: NgramRule, finish_ids: frozenset[int] = frozenset()) -> None:
        super().__init__(
            native.library().outrider_ngram_new(
                packed(rule.trusted),
                len(rule.trusted) - 1,
                rule.min_n,
                rule.max_n,
                packed(finish_ids),
                len(finish_ids),
            )
        )

    def draft(self, tokens: Sequence[int], budget: int) -> Draft:
        return Draft(*self.drafted(tokens, budget))


def match_length(tokens: Sequence[int], end: int, most: int) -> int:
    """How far back from `end < len(tokens)` the text agrees with its own ending, up to `most`."""
    last = len(tokens)
    for n in range(min(most, end)):
        if tokens[end - 1 - n] != tokens[last - 1 - n]:
            return n
    return min(most, end)


def trusted_length(match: int, factor: float) -> int:
    """How many tokens to copy from a position that agrees with the last `match` tokens.

    A longer match predicts a longer copy, but every further row makes the verifying pass more
    expensive: four tokens for a match of one, six for two, then a quarter of a token for each.
    """
    return max(1, int(factor * min(2 + 2 * match, 6 + match / 4)))


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start < len(tokens)`; past the end the copy reads what it has written.

    So text that ends in the middle of a repetition is continued as that repetition.
    """
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    for i in range(len(copied), count):
        copied.append(copied[i - period])
    return copied


def up_to_finish(draft: list[int], finish_ids: frozenset[int]) -> list[int]:
    """The draft up to its first finishing id: nothing after it could ever be emitted."""
    if not finish_ids.isdisjoint(draft):
        for i, token in enumerate(draft):
            if token in finish_ids:
                return draft[: i + 1]
    return draft
