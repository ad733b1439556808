"""What a call of the command line gives back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def record(self) -> dict[str, Any]:
        """The JSON object on the last line of stdout."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


Command = Callable[..., Ran]
