"""Look-ups of the native library: they find how a text may continue."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Collection
from collections.abc import Sequence as Seq

from outrider import native


def packed(numbers: Collection[int]) -> bytes:
    return array("i", numbers).tobytes()


class NativeLookup:
    """Owns a handle that `outrider_suffix_new` or `outrider_ngram_new` returned."""

    def __init__(self, handle: int | None) -> None:
        if not handle:
            raise MemoryError(native.error_message())
        self._lib = native.library()
        self.handle: int | None = handle
        self._argument = ctypes.c_void_p(handle)
        self._out = (ctypes.c_int32 * 34)()

    def __del__(self) -> None:
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self._lib.outrider_lookup_free(handle)

    @property
    def num_tokens(self) -> int:
        """Of all texts. A call that runs several steps takes in their tokens."""
        return int(self._lib.outrider_lookup_size(self._argument))

    def extend(self, tokens: Seq[int]) -> None:
        native.check(self._lib.outrider_lookup_extend(self._argument, packed(tokens), len(tokens)))

    def drafted(self, tokens: Seq[int], budget: int) -> tuple[list[int], list[int] | None]:
        """Appends `tokens` to the text; returns drafts and, for a tree, their parents."""
        if len(self._out) < 2 + 2 * budget:
            self._out = (ctypes.c_int32 * (2 + 2 * budget))()
        out = self._out
        native.check(
            self._lib.outrider_lookup_draft(
                self._argument, packed(tokens), len(tokens), budget, out
            )
        )
        end = 2 + out[0]
        return out[2:end], out[end : end + out[0]] if out[1] else None
