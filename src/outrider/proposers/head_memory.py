"""The state of an attending head for one sequence: unread taps, and keys and values of read ones.

The target gives taps of every token it computes, in order, but not of tokens from its prefix cache.
The memory then begins later in the text, and the head drafts from what it has. This can make drafts
less often right, never invalid.

Shapes: n tokens, T taps, H hidden, N heads, K kv heads, C positions held, Q queries, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.contracts import Observation
from outrider.model.head_layers import KeyValue

_FIRST_CAPACITY = 128


class GrowingKV:
    """Keys and values of one layer and one sequence, in one buffer that doubles when full."""

    def __init__(self) -> None:
        self.length = 0
        self._buffer: Tensor | None = None  # [2, K, capacity, D]

    def append(self, own: KeyValue) -> KeyValue:
        """Appends [1, K, n, D]; returns views of all rows, valid until the next call."""
        end = self.length + own[0].shape[2]
        buffer = self._buffer
        if buffer is None or end > buffer.shape[2]:
            _, num_heads, _, size = own[0].shape
            buffer = own[0].new_empty(2, num_heads, max(_FIRST_CAPACITY, 2 * end), size)
            if self._buffer is not None:
                buffer[:, :, : self.length] = self._buffer[:, :, : self.length]
            self._buffer = buffer
        buffer[0, :, self.length : end] = own[0][0]
        buffer[1, :, self.length : end] = own[1][0]
        self.length = end
        return buffer[:1, :, :end], buffer[1:, :, :end]

    def glance(self, own: KeyValue) -> KeyValue:
        """Like `append`, but the next call overwrites the added rows."""
        length = self.length
        everything = self.append(own)
        self.length = length
        return everything


class HeadMemory:
    """One sequence: `layers` hold tokens `first .. first + length - 1` of its text."""

    def __init__(self, taps: Seq[int], num_layers: int = 1) -> None:
        self.layers = [GrowingKV() for _ in range(num_layers)]
        self.first = 0
        self._taps = taps
        self._unread: list[Tensor] = []  # [n, T, H] each
        self._end = 0  # index in the text after the last token with known taps

    def see(self, seen: Observation) -> None:
        """Keeps the taps of a step; starts anew if they do not continue the last ones."""
        if not seen.taps:
            return
        taps_nTH = torch.stack([seen.taps[tap] for tap in self._taps], dim=1)
        if seen.start != self._end:
            self.layers = [GrowingKV() for _ in self.layers]
            self._unread = []
        if not self._unread and not self.layers[0].length:
            self.first = seen.start
        self._unread.append(taps_nTH)
        self._end = seen.start + len(taps_nTH)

    def reaches(self, num_tokens: int) -> bool:
        """Whether the taps of exactly the text's first `num_tokens` tokens are known."""
        return self._end == num_tokens > self.first

    @property
    def has_unread(self) -> bool:
        return bool(self._unread)

    def take(self) -> tuple[Tensor, range]:
        """Unread taps, [n, T, H], and the range of their tokens; the caller appends their K/V."""
        taps_nTH = self._unread[0] if len(self._unread) == 1 else torch.cat(self._unread)
        self._unread = []
        return taps_nTH, range(self._end - len(taps_nTH), self._end)


def gather(queries_NQD: Tensor, past: KeyValue, mask: Tensor | None = None) -> Tensor:
    """Attention of one sequence, [N, Q, D]; `mask`, [Q, C] or [N, Q, C], is added to the scores.

    Query heads that share keys become rows of one product: the keys are read once, not copied.
    """
    num_heads, num_queries, size = queries_NQD.shape
    num_kv = past[0].shape[1]
    group = num_heads // num_kv
    if mask is not None:
        rows = mask.repeat(group, 1) if mask.dim() == 2 else mask
        mask = rows.reshape(-1, group * num_queries, mask.shape[-1])
    mixed = F.scaled_dot_product_attention(
        queries_NQD.reshape(1, num_kv, group * num_queries, size),
        *past,
        attn_mask=mask,
    )
    return mixed.reshape(num_heads, num_queries, size)
