"""KV memory, provided while nobody waits for it.

A pool of blocks is memory that the system has promised. It keeps the promise page by page, when a
page is first used, and that takes time: little on most machines, milliseconds on a virtual one
whose host has not given it the page either. Every block of a server's pool is used some day, since
cached prefixes keep the ones before, so an idle server may as well ask for all of them. Only while
it is idle: this would take more time from passes than it saves them. And not where memory is
scarce: there a promise is better than the thing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.model.native_model import NativeModel

PIECE = 2 << 20  # bytes at a time
LEFT = 2 << 30  # bytes that must be left to others
PAUSE_S = 0.05  # between two looks at whether anybody is served


class Populating:
    """Goes on in a thread of its own, while `is_idle`, until all of these models' is there."""

    def __init__(self, models: Sequence[object], is_idle: Callable[[], bool]) -> None:
        self._is_idle = is_idle
        self._stopped = threading.Event()
        self._models = [model for model in models if isinstance(model, NativeModel)]
        self._thread = threading.Thread(target=self._run, name="outrider-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Before a model may go."""
        self._stopped.set()
        self._thread.join()

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
    """What this process may still take without anybody being in need, as far as it can be told."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    with contextlib.suppress(OSError, ValueError):  # a container's own limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return min(found, default=0)
