"""What all drafting heads share: a config dataclass and a folder of config.json and weights."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


class Head(nn.Module, ABC):
    """Base of all heads: a frozen config dataclass; saved as config.json and model.safetensors."""

    kind: str
    taps: tuple[int, ...] = ()
    target_size: int  # width of the target's hidden states
    vocab_size: int  # the target's; 0: any
    num_draft_tokens: int | None = None  # what the checkpoint recommends
    made_for: str = ""  # the target's name, where the checkpoint has it

    @abstractmethod
    def config_json(self) -> dict[str, Any]:
        """The config.json that `outrider.model.dialects` reads back."""

    def published(self) -> dict[str, Tensor]:
        """The tensors under the names that go with `config_json`."""
        return self.state_dict()

    def save(self, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the folder, atomically. Floating-point tensors are stored as `dtype`."""
        write_folder(folder, self.config_json(), self.published(), dtype)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Writes a drafter's folder, atomically. Floating-point tensors are stored as `dtype`."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    stored = {
        name: (value.to(dtype) if value.is_floating_point() else value).cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "model.safetensors").chmod(0o644)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
