"""Triton's interpreter on newer NumPy, which no longer takes arrays of one element for numbers.

A product is added up in one order for all rows, as a GPU does it: a BLAS may take another one for a
row that stands elsewhere.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    import numpy as np
    from triton.runtime import interpreter

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(tensor, "__bool__", lambda self: bool(self.handle.data.all()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
