"""A file of pickled tensors, read without running code, as if it were an open safetensors file."""

from __future__ import annotations

import zipfile
from collections.abc import KeysView
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.errors import ModelError

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class _Slice:
    tensor: torch.Tensor

    def get_dtype(self) -> str:
        return _STORED.get(self.tensor.dtype, str(self.tensor.dtype))


class PickledFile:
    """`weights_only` unpickles tensors and plain containers; anything else is a `ModelError`."""

    def __init__(self, path: Path) -> None:
        try:
            found = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except Exception as error:  # pickle, zip and torch raise many kinds
            raise ModelError(
                f"the weights in {path} are damaged or hold more than tensors, which could run "
                "code; convert them to safetensors, or download them again"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(tensor, torch.Tensor)
            for name, tensor in found.items()
        ):
            raise ModelError(f"{path} holds other things than tensors by name; convert the model")
        self._tensors: dict[str, torch.Tensor] = found

    def keys(self) -> KeysView[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])
