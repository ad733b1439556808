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

from outrider.errors import ModelError
from outrider.model.gguf.files import is_gguf
from outrider.model.weights import read_json

ARCHITECTURES = {  # of a head's config.json -> kind
    "MedusaModel": "medusa",
    "LlamaForCausalLMEagle3": "eagle3",
    "DFlashDraftModel": "dflash",
}


_WORDS = ("eagle", "medusa", "dflash", "hydra", "speculator", "draft")  # in names of heads


def head_kind(folder: Path) -> str | None:
    """The kind of heads in a folder, judged by its config.json; None: a model.

    Raises ModelError for heads of a kind that is not supported.
    """
    if is_gguf(folder):
        return None
    name = (read_json(folder / "config.json").get("architectures") or [""])[0]
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    is_head = any(word in name.lower() for word in _WORDS)
    if is_head or not (name or (folder / "tokenizer.json").exists()):
        raise ModelError(
            f"the config.json of {folder} names {name or 'no architecture'}, which cannot draft "
            f"here: give a language model with its tokenizer, or heads of one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    return None


class Head(nn.Module, ABC):
    """Base of all heads: a frozen config dataclass; saved as config.json and model.safetensors."""

    kind: str
    taps: tuple[int, ...] = ()
    copies: frozenset[str] = frozenset()  # of the target's tensors, that other engines store here

    @abstractmethod
    def config_json(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def from_json(cls, config: dict[str, Any]) -> Self: ...

    def save(self, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        """Writes the folder, atomically. Floating-point tensors are stored as `dtype`."""
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
