"""Allocates the pages of the KV memory ahead of their use, while the server is idle.

The system allocates the memory of a block pool page by page, at the first use of each page. That is
fast on most machines, and takes milliseconds on a virtual machine whose host must allocate the page
as well. So an idle server touches pages before requests do: those of the first requests at its
start, and later about as much again as has been used. An unused pool costs no memory. While the
server serves, touching pages would take more time from passes than it saves; if memory is scarce,
pages stay unallocated.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

PIECE = 2 << 20  # bytes at a time
AHEAD = 64 << 20  # bytes for the first requests
LEFT = 2 << 30  # bytes of free memory to leave for other processes
PAUSE_S = 0.05  # between two checks whether there is something to do


@runtime_checkable
class Populates(Protocol):
    """A model whose KV memory can be allocated in advance."""

    def populate(self, offset: int, num_bytes: int) -> int:
        """Allocates a part of the memory; returns its size, 0 beyond the end."""
        ...


class Store(NamedTuple):
    """The KV memory of a model."""

    model: Populates
    num_bytes: int


class Populating:
    """A thread that, while `is_idle`, allocates KV memory ahead of its use.

    `starts` are where new sequences begin, as fractions of a pool and in the order of their use;
    `used()` is the fraction of the pool that is in use.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        starts: Sequence[float],
        used: Callable[[], float],
        is_idle: Callable[[], bool],
    ) -> None:
        self._pieces = _in_order(stores, starts)
        self._used, self._is_idle = used, is_idle
        self._num_bytes = sum(store.num_bytes for store in stores)
        self._stopped = threading.Event()
        self.num_populated = 0  # bytes
        self.thread = threading.Thread(target=self._run, name="outrider-memory", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Call it before a model is freed."""
        self._stopped.set()
        self.thread.join()

    def _run(self) -> None:
        wanted = AHEAD
        for model, offset in self._pieces:
            while self.num_populated >= wanted or not self._is_idle():
                if self._stopped.wait(PAUSE_S):
                    return
                wanted = max(wanted, AHEAD + int(2 * self._used() * self._num_bytes))
            if self._stopped.is_set() or available_bytes() <= LEFT:
                return
            self.num_populated += model.populate(offset, PIECE)


def _in_order(stores: Sequence[Store], starts: Sequence[float]) -> list[tuple[Populates, int]]:
    """All pieces in the order of their probable use.

    Sequences begin at the starts and grow from there. The piece that follows start s at depth d
    comes before those with a larger s + d: the memory of the first start is provided deepest.
    """
    largest = max((store.num_bytes for store in stores), default=0)
    found = []
    for which, (_, num_bytes) in enumerate(stores):
        firsts = {int(start * num_bytes) // PIECE: i for i, start in reversed([*enumerate(starts)])}
        ends = [*sorted(firsts), -(-num_bytes // PIECE)]
        for first, end in pairwise(ends):
            for piece in range(first, end):
                depth = (piece - first) * largest / num_bytes
                found.append((firsts[first] + depth, which, piece * PIECE))
    return [(stores[which].model, offset) for _, which, offset in sorted(found)]


def available_bytes() -> int:
    """Estimates the free memory available to this process, in bytes."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError, ValueError):  # the limit of a container
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return min(found, default=0)
