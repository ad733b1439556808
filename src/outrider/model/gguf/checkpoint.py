"""The tensors of a GGUF file under the names of a folder, dequantised one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.model.families import read_decoder_config
from outrider.model.gguf.config import architecture_of, read_gguf_config
from outrider.model.gguf.container import Bytes, Container
from outrider.model.gguf.names import Part, names_of
from outrider.model.gguf.types import INTEGERS
from outrider.model.stored import Blocks
from outrider.native import PACKED, STORED_KINDS

_HEADS = (".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.q_norm.", ".self_attn.k_norm.")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """What `weights.Checkpoint` is for folders."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.folder = container.path
        self._config = read_decoder_config(read_gguf_config(container))
        self._names = names_of(container, self._config)
        self._turns = architecture_of(container).pairs

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        return list(self._names)

    def kind_of(self, name: str) -> int:
        """The tensor's type as outrider.h numbers it."""
        kind = self._part(name).info.type
        return STORED_KINDS[kind.name] if kind.values == 1 else PACKED + kind.id

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor called `name`: as it is stored, or as float32 if it is quantised."""
        part = self._part(name, shape)
        blocks = self._rows(part)
        if part.info.type.name in _PLAIN:
            values = torch.frombuffer(bytearray(blocks), dtype=_PLAIN[part.info.type.name])
        else:
            values = torch.from_numpy(_dequantize(blocks, part.info.type.id))
        if self._turned(name):
            values = self._in_halves(values, name)
        self._container.release(part.info)
        return values.reshape(tuple(shape))

    @contextmanager
    def blocks(self, name: str, shape: Sequence[int]) -> Iterator[tuple[Blocks, bool]]:
        """Where a quantised tensor's blocks are, and whether rotary pairs are neighbours."""
        part = self._part(name, shape)
        found = self._container.in_file(part.info)
        yield found if part.rows < 0 else found.rows(part.first, part.rows), self._turned(name)

    def _part(self, name: str, shape: Sequence[int] | None = None) -> Part:
        if name not in self._names:
            raise ModelError(
                f"{self.folder} lacks the tensor {name} that its metadata implies; "
                "download the file again"
            )
        part = self._names[name]
        info = part.info
        if info.type.id in INTEGERS:
            raise ModelError(
                f"{info.name} in {self.folder} is stored as {info.type.name}, which is no type of "
                "weights; use a file quantised to Q4_K_M, Q6_K or Q8_0"
            )
        if shape is None:
            return part
        if part.rows < 0:
            fits = _without_ones(info.shape) == _without_ones(shape)
        else:  # of several in one tensor
            held = prod(info.shape[:-1]) if len(shape) > 1 else prod(info.shape)
            fits = part.rows == shape[0] and part.first + part.rows <= held
            same = info.type.values == 1 if len(shape) == 1 else info.shape[-1] == shape[-1]
            fits = fits and same
        if not fits:
            raise ModelError(
                f"{info.name} in {self.folder} has the shape {list(info.shape)} where the metadata "
                f"implies {list(shape)}; download the file again"
            )
        return part

    def _rows(self, part: Part) -> Bytes:
        blocks = self._container.raw(part.info)
        if part.rows < 0:
            return blocks
        if part.info.name.endswith(".bias"):  # a row of it is a number
            blocks = blocks.reshape(-1, part.info.type.row_bytes(1))
        return blocks[part.first : part.first + part.rows]

    def _turned(self, name: str) -> bool:
        return self._turns and any(part in name for part in _HEADS)

    def _in_halves(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Rope here turns dimension i of a head together with i + D/2. Some architectures hold such
        pairs as neighbours, so the rows of queries and keys move."""
        dim, turned = self._config.head_dim, self._config.rotated
        heads = self._config.num_heads if ".q_" in name else self._config.num_kv_heads
        if values.numel() % (heads * dim):
            raise ModelError(
                f"{name} in {self.folder} does not hold {heads} heads of {dim}; "
                "download the file again"
            )
        order = torch.arange(dim)
        order[:turned] = order[:turned].reshape(-1, 2).t().flatten()
        return values.reshape(heads, dim, -1)[:, order]


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _dequantize(blocks: Bytes, id: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # of a damaged file; a step whose logits are NaN fails
        found: np.ndarray[Any, np.dtype[np.float32]] = dequantize(blocks, GGMLQuantizationType(id))
    return found
