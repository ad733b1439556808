"""Allocates the pages of the KV memory while the server is idle.

The system allocates the memory of a block pool page by page, at the first use of each page. That is
fast on most machines, and takes milliseconds on a virtual machine whose host must allocate the page
as well. A server uses every block of its pool at some time, because cached prefixes keep earlier
blocks. So an idle server touches all pages in advance. While it serves, this would take more time
from passes than it saves; if memory is scarce, pages stay unallocated.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

PIECE = 2 << 20  # bytes at a time
LEFT = 2 << 30  # bytes of free memory to leave for other processes
PAUSE_S = 0.05  # between two checks whether the server is idle


@runtime_checkable
class Populates(Protocol):
    """A model whose KV memory can be allocated in advance."""

    def populate(self, offset: int, num_bytes: int) -> int:
        """Allocates a part of the memory; returns its size, 0 beyond the end."""
        ...


class Populating:
    """A thread that, while `is_idle`, allocates the KV memory of all models that allow it."""

    def __init__(self, models: Sequence[object], is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._stopped = threading.Event()
        self._models = [model for model in models if isinstance(model, Populates)]
        self.thread = threading.Thread(target=self._run, name="outrider-memory", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Call it before a model is freed."""
        self._stopped.set()
        self.thread.join()

    def _run(self) -> None:
        for model in self._models:
            offset, found = 0, 1
            while found and available_bytes() > LEFT and not self._stopped.is_set():
                if self._is_idle():
                    found = model.populate(offset, PIECE)
                    offset += found
                else:
                    self._stopped.wait(PAUSE_S)


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
