"""Blocks of quantised weights: in memory, or still in an open file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


class OpenFile:
    """A file to read, open as long as this object lives."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class InFile:
    """Rows of blocks that nothing has read yet."""

    file: OpenFile
    offset: int
    num_rows: int
    row_bytes: int

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, first: int, count: int) -> InFile:
        return InFile(self.file, self.offset + first * self.row_bytes, count, self.row_bytes)


Blocks = npt.NDArray[np.uint8] | InFile  # [rows, bytes of a row]
