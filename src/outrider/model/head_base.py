"""What all drafting heads share: a config dataclass and a folder of config.json and weights."""

from __future__ import annotations

import json
import os
import shutil
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import nn

from outrider.model.weights import read_config

ARCHITECTURES = {  # of a head's config.json -> kind
    "MedusaModel": "medusa",
    "LlamaForCausalLMEagle3": "eagle3",
    "DFlashDraftModel": "dflash",
}


def head_kind(folder: Path) -> str | None:
    """The kind of heads in a folder, judged by its config.json; None: a model, or unknown."""
    architectures = read_config(folder).get("architectures") or [""]
    return ARCHITECTURES.get(architectures[0])


class Head(nn.Module, ABC):
    """Common to all: a frozen config dataclass, and folders of config.json + model.safetensors."""

    kind: str
    taps: tuple[int, ...] = ()

    @abstractmethod
    def config_json(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def from_json(cls, config: dict[str, Any]) -> Self: ...

    def save(self, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Write the folder, atomically. Floating-point tensors are stored as `dtype`."""
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tensors = {
            name: (value.to(dtype) if value.is_floating_point() else value).cpu().contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)
        (partial / "config.json").write_text(json.dumps(self.config_json(), indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)


def plain_fields(cls: type, config: dict[str, Any]) -> dict[str, Any]:
    """The plain fields of a config dataclass found in a config.json."""
    return {
        name: config[name]
        for name in cls.__dataclass_fields__  # type: ignore[attr-defined]
        if name in config and name not in ("taps", "mask_token_id", "markov_rank", "confidence")
    }
