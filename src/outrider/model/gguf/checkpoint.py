"""The tensors of a GGUF file under the names of a folder, dequantised one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.errors import ModelError
from outrider.model.gguf.config import names_of, read_gguf_config
from outrider.model.gguf.container import Bytes, Container, TensorInfo

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

    @property
    def is_bfloat16(self) -> bool:
        """Whether every matrix is stored so."""
        tensors = self._container.tensors.values()
        return all(t.type.name == "BF16" for t in tensors if len(t.shape) > 1)

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor called `name`: as it is stored, or as float32 if it is quantised."""
        info, blocks = self.blocks(name, shape)
        if info.type.name in _PLAIN:
            values = torch.frombuffer(bytearray(blocks), dtype=_PLAIN[info.type.name])
        else:
            values = torch.from_numpy(_dequantize(blocks, info.type.id))
        self._container.release(info)
        return values.reshape(tuple(shape))

    def blocks(self, name: str, shape: Sequence[int]) -> tuple[TensorInfo, Bytes]:
        """The tensor's blocks, [rows, bytes of a row], mapped unless their rows must move."""
        if name not in self._names:
            raise ModelError(
                f"{self.folder} lacks the tensor {name} that its metadata implies; "
                "download the file again"
            )
        info = self._container.tensors[self._names[name]]
        if info.shape != tuple(shape):
            raise ModelError(
                f"{info.name} in {self.folder} has the shape {list(info.shape)} where the metadata "
                f"implies {list(shape)}; download the file again"
            )
        blocks = self._container.raw(info)
        for projection in _TURNED if self._turns else ():
            if f".{projection}." in name:
                blocks = self._in_halves(blocks, _TURNED[projection])
        return info, blocks

    def _in_halves(self, blocks: Bytes, key: str) -> Bytes:
        """Rope here turns dimension i of a head together with i + D/2. Files of the architecture
        llama hold such pairs as neighbours, so the rows of queries and keys move."""
        config = self._config
        per_row = blocks.size // (config[key] * config["head_dim"])  # of a bias: one value
        pairs = blocks.reshape(config[key], config["head_dim"] // 2, 2, per_row)
        return pairs.swapaxes(1, 2).reshape(blocks.shape)


def _dequantize(blocks: Bytes, id: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    found: np.ndarray[Any, np.dtype[np.float32]] = dequantize(blocks, GGMLQuantizationType(id))
    return found
