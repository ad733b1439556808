"""The tensors of a quantised folder: matrices as blocks where that is exact, else dequantised.

Four- and eight-bit codes with the middle as zero point are what the types Q4_0 and Q8_0 of GGUF
files hold, if groups are consecutive, a multiple of 32 wide, and scales are half-precision numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from outrider.errors import ModelError
from outrider.model.quantized.forms import FORMS, Matrix
from outrider.model.stored import Blocks
from outrider.model.weights import Checkpoint
from outrider.native import PACKED, STORED_KINDS

log = logging.getLogger(__name__)

_BLOCK = 32
# Tensors that only a quantised matrix has, after its stem.
_MARKS = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight.quant_map")
_Q4_0, _Q8_0 = PACKED + 2, PACKED + 8


class QuantizedCheckpoint(Checkpoint):
    """What `Checkpoint` is for folders without a `quantization_config`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._config = config
        self._form = FORMS[str(config.get("quant_method"))]
        self._last: tuple[str, Matrix] | None = None
        self._is_said = False

    def kind_of(self, name: str) -> int:
        made = self._matrix(name)
        if made is None:
            stored = self._stored(name) if super().__contains__(name) else "F32"
            return STORED_KINDS.get(stored, STORED_KINDS["F32"])
        kind = _exact_kind(made)
        return STORED_KINDS["F32"] if kind is None else kind

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._matrix(name) is not None

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in its stored type, or dequantised to float32."""
        made = self._matrix(name)
        if made is None:
            return super().tensor(name, shape)
        self._check(name, made, shape)
        if _exact_kind(made) is None and not self._is_said:
            self._is_said = True
            log.info("%s: weights that have no packed form are dequantised", self.folder.name)
        return made.weight()

    @contextmanager
    def blocks(self, name: str, shape: Sequence[int]) -> Iterator[tuple[Blocks, bool]]:
        """See `GgufCheckpoint.blocks`."""
        made = self._matrix(name)
        assert made is not None
        self._check(name, made, shape)
        yield to_blocks(made), False
        self._last = None

    def _check(self, name: str, made: Matrix, shape: Sequence[int]) -> None:
        if tuple(made.code_NK.shape) != tuple(shape):
            raise ModelError(
                f"{name} in {self.folder} has shape {list(made.code_NK.shape)} where config.json "
                f"implies {list(shape)}; the two do not belong together"
            )

    def _matrix(self, name: str) -> Matrix | None:
        """The parts of a quantised matrix; None if the tensor is stored as it is."""
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        stem, _, kind = name.rpartition(".")
        if kind != "weight" or not self._is_quantised(stem):
            return None

        def part(rest: str) -> torch.Tensor | None:
            return self._read(stem + rest) if Checkpoint.__contains__(self, stem + rest) else None

        try:
            made = self._form(part, self._config)
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError) as error:
            line = " ".join(str(error).split())[:120]
            raise ModelError(
                f"the quantised {name} in {self.folder} does not fit together ({line}); "
                "download the model again"
            ) from error
        self._last = (name, made)
        return made

    def _is_quantised(self, stem: str) -> bool:
        if any(Checkpoint.__contains__(self, stem + rest) for rest in _MARKS):
            return True
        weight = f"{stem}.weight"
        return Checkpoint.__contains__(self, weight) and self._stored(weight) in ("U8", "I8")


def _exact_kind(made: Matrix) -> int | None:
    """Q4_0 or Q8_0, if it holds the matrix without another rounding."""
    if made.group_of_K is not None or made.by_rows > 1 or made.code_NK.is_floating_point():
        return None
    width = made.code_NK.shape[1]
    group = made.group or width // made.scale_NG.shape[1]
    if width % _BLOCK or (made.scale_NG.shape[1] > 1 and group % _BLOCK):
        return None
    scale = made.scale_NG.float()
    if not torch.equal(scale.half().float(), scale):
        return None
    zeros = {0.0} if made.zero_NG is None else set(made.zero_NG.flatten().tolist())
    if made.bits == 4:
        return _Q4_0 if zeros == {8} else None
    signed = made.code_NK.dtype == torch.int8
    return _Q8_0 if made.bits == 8 and zeros == ({0} if signed else {128}) else None


def to_blocks(made: Matrix) -> npt.NDArray[np.uint8]:
    """The blocks of a matrix that has an `_exact_kind`: [N, bytes of a row]."""
    num_rows = len(made.code_NK)
    codes = made.code_NK.to(torch.int16).reshape(num_rows, -1, _BLOCK)
    scale = made.scale_NG[:, made.groups()[::_BLOCK]].half().expand(num_rows, -1).contiguous()
    if _exact_kind(made) == _Q4_0:
        low, high = codes.chunk(2, -1)
        stored = (low | high << 4).to(torch.uint8)
    else:
        middle = 0 if made.code_NK.dtype == torch.int8 else 128
        stored = (codes - middle).to(torch.int8).view(torch.uint8)
    scales = scale.view(torch.uint8).reshape(num_rows, -1, 2)
    blocks = torch.cat([scales, stored], -1).reshape(num_rows, -1)
    return np.ascontiguousarray(blocks.numpy())
