"""The inputs of a pass on a GPU: buffers that never move, on the host and on the device.

Shape legend: see `outrider.model.cuda_decoder`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import IntArray, StepBatch
from outrider.cuda.ops import Pass

MAX_TOKENS = 64  # of a padded pass; wider passes are better served by ordinary matrix products


def make_event(*, timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


class Inputs:
    """The inputs of a pass in one piece of memory, so that one copy to the device is enough."""

    def __init__(self, table_width: int, device: torch.device) -> None:
        sizes = {
            "masks": (MAX_TOKENS, torch.int64),
            "keys": (MAX_TOKENS, torch.int64),
            "secrets": (MAX_TOKENS, torch.int64),
            "temperature": (MAX_TOKENS, torch.float32),
            "tokens": (MAX_TOKENS, torch.int32),
            "positions": (MAX_TOKENS, torch.int32),
            "slots": (MAX_TOKENS, torch.int32),
            "contexts": (MAX_TOKENS, torch.int32),
            "lengths": (MAX_TOKENS, torch.int32),
            "committed": (MAX_TOKENS, torch.int32),
            "tables": (MAX_TOKENS * table_width, torch.int32),
        }
        total = sum(count * dtype.itemsize for count, dtype in sizes.values())
        pinned = device.type == "cuda"
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)
        self._device = self._host.to(device)  # the same memory on a CPU
        self.host: dict[str, Any] = {}
        self.device: dict[str, torch.Tensor] = {}
        at = 0
        for name, (count, dtype) in sizes.items():
            part = slice(at, at + count * dtype.itemsize)
            self.host[name] = self._host[part].view(dtype).numpy()
            self.device[name] = self._device[part].view(dtype)
            at = part.stop
        self.table_width = table_width
        self._tables_at = at - sizes["tables"][0] * 4
        self._sent = make_event() if pinned else None
        self.num_changes = 0  # passes laid out so far; tells whether inputs still belong to a pass

    def wait(self) -> None:
        """Waits until the host's copy may be overwritten."""
        if self._sent is not None:
            self._sent.synchronize()

    def lay_out(
        self, batch: StepBatch, num_sequences: int, width: int, page: int
    ) -> npt.NDArray[np.int64]:
        """Waits, then writes a pass into the host's copy; returns the rows of its tokens.

        The tokens of a sequence are right-aligned in its row of M.
        """
        self.wait()
        host = self.host
        for name in ("tokens", "positions", "masks", "keys", "temperature"):
            host[name][: num_sequences * width] = 0
        host["slots"][: num_sequences * width] = -1
        host["contexts"][:num_sequences] = 0
        host["lengths"][:num_sequences] = 0
        tables = host["tables"].reshape(-1, self.table_width)
        tables[:num_sequences] = -1
        place_T = np.empty(len(batch.tokens_T), np.int64)
        starts = batch.starts_S1.tolist()
        for s, context in enumerate(batch.context_S.tolist()):
            first, stop = starts[s], starts[s + 1]
            at = np.arange((s + 1) * width - (stop - first), (s + 1) * width)
            place_T[first:stop] = at
            table = batch.tables_SW[s, : self.table_width]
            tables[s, : len(table)] = table
            slots = np.arange(context, context + stop - first)
            host["slots"][at] = table[slots // page] * page + slots % page
            host["masks"][at] = _masks(
                None if batch.parents_T is None else batch.parents_T[first:stop], stop - first
            )
            host["contexts"][s] = context
            host["lengths"][s] = context + stop - first
        host["tokens"][place_T] = batch.tokens_T
        host["positions"][place_T] = batch.positions_T
        return place_T

    def send(self, num_sequences: int) -> None:
        self.num_changes += 1
        self._send(0, num_sequences)

    def send_tables(self, num_sequences: int) -> None:
        """Sends the block tables only: passes in flight update the other inputs themselves."""
        self._send(self._tables_at, num_sequences)

    def _send(self, start: int, num_sequences: int) -> None:
        if self._sent is not None:
            part = slice(start, self._tables_at + num_sequences * self.table_width * 4)
            self._device[part].copy_(self._host[part], non_blocking=True)
            self._sent.record()

    def at(self, num_sequences: int, width: int, num_others: int = 0) -> Pass:
        num_tokens, on = num_sequences * width, self.device
        return Pass(
            num_sequences,
            width,
            on["tokens"][:num_tokens],
            on["positions"][:num_tokens],
            on["slots"][:num_tokens],
            on["masks"][:num_tokens],
            on["contexts"][:num_sequences],
            on["lengths"][:num_sequences],
            on["tables"][: num_sequences * self.table_width].view(num_sequences, -1),
            num_others=num_others,
        )


def _masks(parents: IntArray | None, count: int) -> list[int]:
    """Bit j of row i is set if new token j is i or an ancestor of i."""
    masks: list[int] = []
    for i, parent in enumerate(range(-1, count - 1) if parents is None else parents.tolist()):
        masks.append((1 << i) | (masks[parent] if parent >= 0 else 0))
    return masks
