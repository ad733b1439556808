"""Triton's interpreter on newer NumPy, which no longer takes arrays of one element for numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(tensor, "__bool__", lambda self: bool(self.handle.data.all()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
