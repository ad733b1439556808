"""The tensors of a GGUF file under the names of a folder, dequantised one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.model.gguf.config import names_of, read_gguf_config
from outrider.model.gguf.container import Bytes, Container, TensorInfo
from outrider.native import PACKED, STORED_KINDS

# Projection -> how many heads it makes.
_TURNED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufCheckpoint:
    """What `weights.Checkpoint` is for folders."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.folder = container.path
        self._names = names_of(container)
        self._config = read_gguf_config(container)
        self._turns = self._config["model_type"] == "llama"

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        return list(self._names)

    def kind_of(self, name: str) -> int:
        """The tensor's type as outrider.h numbers it."""
        kind = self._info(name).type
        return STORED_KINDS[kind.name] if kind.values == 1 else PACKED + kind.id

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor called `name`: as it is stored, or as float32 if it is quantised."""
        info = self._info(name, shape)
        blocks = self._container.raw(info)
        key = self._turned(name)
        if key is not None:
            blocks = self._in_halves(blocks, key)
        if info.type.name in _PLAIN:
            values = torch.frombuffer(bytearray(blocks), dtype=_PLAIN[info.type.name])
        else:
            values = torch.from_numpy(_dequantize(blocks, info.type.id))
        self._container.release(info)
        return values.reshape(tuple(shape))

    @contextmanager
    def blocks(self, name: str, shape: Sequence[int]) -> Iterator[tuple[Bytes, bool]]:
        """A quantised tensor's blocks, mapped, [rows, bytes of a row], and whether rotary pairs are
        neighbours. Afterwards the system may drop the pages."""
        info = self._info(name, shape)
        yield self._container.raw(info), self._turned(name) is not None
        self._container.release(info)

    def _info(self, name: str, shape: Sequence[int] | None = None) -> TensorInfo:
        if name not in self._names:
            raise ModelError(
                f"{self.folder} lacks the tensor {name} that its metadata implies; "
                "download the file again"
            )
        info = self._container.tensors[self._names[name]]
        if shape is not None and info.shape != tuple(shape):
            raise ModelError(
                f"{info.name} in {self.folder} has the shape {list(info.shape)} where the metadata "
                f"implies {list(shape)}; download the file again"
            )
        return info

    def _turned(self, name: str) -> str | None:
        """The number of heads' key, if the tensor's rotary pairs are neighbours."""
        if not self._turns:
            return None
        return next((key for part, key in _TURNED.items() if f".{part}." in name), None)

    def _in_halves(self, blocks: Bytes, key: str) -> Bytes:
        """Rope here turns dimension i of a head together with i + D/2. Files of the architecture
        llama hold such pairs as neighbours, so the rows of queries and keys move."""
        config = self._config
        rows = config[key] * config["head_dim"]
        if blocks.size % rows:
            raise ModelError(
                f"{self.folder} has queries or keys that do not make whole heads; "
                "download the file again"
            )
        per_row = blocks.size // rows  # of a bias: one value
        pairs = blocks.reshape(config[key], config["head_dim"] // 2, 2, per_row)
        return pairs.swapaxes(1, 2).reshape(blocks.shape)


def _dequantize(blocks: Bytes, id: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    found: np.ndarray[Any, np.dtype[np.float32]] = dequantize(blocks, GGMLQuantizationType(id))
    return found
