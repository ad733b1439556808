"""Passes predictions from the front to the proposer in vLLM's worker.

vLLM's proposers get the tokens of a batch but not their requests. So the front writes the
prediction into a file named by a hash of the prompt. The proposer reads it at its first draft.
On another host there is no file, and nothing is drafted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence as Seq
from hashlib import blake2b
from pathlib import Path

import numpy as np


class Mailbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, prompt: Seq[int], prediction: Seq[int]) -> Path:
        """Leaves a guess for a prompt; returns the file, to be removed when the request ends."""
        file = self._file(prompt)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_bytes(np.asarray(prediction, np.int32).tobytes())
        partial.replace(file)
        return file

    def get(self, prompt: Seq[int]) -> list[int]:
        """The guess for a prompt; empty where there is none."""
        with contextlib.suppress(OSError, ValueError):
            found: list[int] = np.frombuffer(self._file(prompt).read_bytes(), np.int32).tolist()
            return found
        return []

    def _file(self, prompt: Seq[int]) -> Path:
        name = blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).hexdigest()
        return self._folder / f"{name}.tokens"
