"""Folders in the form of gpt-oss: experts in MXFP4, everything else as it is.

The folder has tensors of all experts: `gate_up_proj_blocks` [E, 2 * inner, K / 32, 16], of which a
byte holds two neighbours, and `gate_up_proj_scales`, one power of two per block. Rows of gate and
up take turns. Here every expert has matrices of its own, in the blocks of GGUF files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.model.stored import Blocks
from outrider.model.weights import Checkpoint
from outrider.native import PACKED, STORED_KINDS

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_MXFP4 = PACKED + 39
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Mxfp4Checkpoint(Checkpoint):
    """A `Checkpoint` that also has `mlp.experts.E.gate_proj.weight` and its kin."""

    def __contains__(self, name: str) -> bool:
        if super().__contains__(name):
            return True
        match = _EXPERT.fullmatch(name)
        return match is not None and super().__contains__(_stored(match))

    def kind_of(self, name: str) -> int:
        if super().__contains__(name):
            return STORED_KINDS.get(super()._stored(name), STORED_KINDS["F32"])
        return _MXFP4

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor in its stored type, or dequantised to float32."""
        match = _EXPERT.fullmatch(name)
        if match is None or super().__contains__(name):
            return super().tensor(name, shape)
        if match[4] == "bias":
            return self._rows(match, _stored(match), shape)
        codes, scales = self._codes(match, shape)
        values = _VALUES[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        return values.reshape(tuple(shape))

    @contextmanager
    def blocks(self, name: str, shape: Sequence[int]) -> Iterator[tuple[Blocks, bool]]:
        """See `GgufCheckpoint.blocks`."""
        match = _EXPERT.fullmatch(name)
        assert match is not None
        codes, scales = self._codes(match, shape)
        halves = codes[..., :16] | codes[..., 16:] << 4
        found = torch.cat([scales[..., None], halves], -1).reshape(shape[0], -1)
        yield np.ascontiguousarray(found.numpy()), False

    def _codes(
        self, match: re.Match[str], shape: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[outputs, K / 32, 32] of four bits, [outputs, K / 32] of exponents."""
        count = shape[1] // 32
        packed = self._rows(match, _stored(match), (shape[0], count, 16))
        scales = self._rows(match, _stored(match, "_scales"), (shape[0], count))
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2), scales

    def _rows(self, match: re.Match[str], name: str, shape: Sequence[int]) -> torch.Tensor:
        """One expert's rows of a tensor of all."""
        expert, part = int(match[2]), match[3]
        if not super().__contains__(name):
            raise ModelError(f"{self.folder} lacks the tensor {name}; download the folder again")
        held = self._open(self._file_of[name]).get_slice(name)
        if expert >= held.get_shape()[0]:
            raise ModelError(f"{name} in {self.folder} has no expert {expert}; download it again")
        rows: torch.Tensor = held[expert]
        if part != "down":
            rows = rows[int(part == "up") :: 2]
        if tuple(rows.shape) != tuple(shape):
            raise ModelError(
                f"{name} in {self.folder} has {list(rows.shape)} per expert where config.json "
                f"implies {list(shape)}; the two do not belong together"
            )
        return rows


def _stored(match: re.Match[str], kind: str = "_blocks") -> str:
    """The tensor of all experts."""
    whole = "down_proj" if match[3] == "down" else "gate_up_proj"
    return f"{match[1]}.{whole}{'_bias' if match[4] == 'bias' else kind}"
