"""A published drafter's folder in, one of our heads out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.errors import ModelError
from outrider.model.dialects import speculators
from outrider.model.dialects.dflash import read_dflash
from outrider.model.dialects.eagle import read_eagle
from outrider.model.dialects.eagle3 import read_eagle3
from outrider.model.dialects.folder import Fields, Tensors
from outrider.model.dialects.gguf import head_config
from outrider.model.dialects.medusa import read_medusa
from outrider.model.dialects.mlp import read_mlp
from outrider.model.gguf.files import is_gguf
from outrider.model.head_base import Head
from outrider.model.head_kinds import MTP, head_kind
from outrider.model.weights import read_json


def read_head(folder: Path, num_layers: int | None = None) -> Head:
    """The head in a folder, on the CPU in float32. `num_layers` is the target's, if known.

    Raises ModelError, one line, for whatever is missing, unknown or impossible.
    """
    if not is_gguf(folder) and not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no drafting head: it has no config.json")
    kind = head_kind(folder)
    if kind is None:
        raise ModelError(f"{folder} holds no drafting head, but a language model")
    if kind == MTP:
        raise ModelError(f"{folder} holds an MTP layer, which only its target can load")
    config = head_config(folder) if is_gguf(folder) else read_json(folder / "config.json")
    fields = Fields(config, folder)
    tensors = Tensors(folder)
    tensors.drop_leftovers()
    try:
        head = _read(kind, fields, tensors, num_layers)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(
            f"{folder} holds no drafting head that makes sense ({type(error).__name__}: {error})"
        ) from error
    head.made_for = made_for(fields.values)
    fields.finish()
    _fill(head, tensors)
    return head


def made_for(config: Mapping[str, Any]) -> str:
    """The name of the target in a head's config.json; "": there is none."""
    speculators = config.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return str(name or config.get("base_model_name_or_path") or "")


def _read(kind: str, fields: Fields, tensors: Tensors, num_layers: int | None) -> Head:
    if "speculators_model_type" in fields:
        return speculators.read_speculators(fields, tensors, num_layers)
    if kind == "medusa":
        return read_medusa(fields, tensors)
    if kind == "mlp":
        return read_mlp(fields, tensors)
    read = {"eagle": read_eagle, "dflash": read_dflash}.get(kind, read_eagle3)
    head: Head = read(fields, tensors, num_layers)
    return head


def _fill(head: Head, tensors: Tensors) -> None:
    """Copies the tensors; every one must have its place and be finite."""
    state = head.state_dict()
    found = tensors.all()
    folder = tensors.folder
    missing = [name for name in state if name not in found]
    unknown = [name for name in found if name not in state]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which has no place in it"
        raise ModelError(f"{folder} does not match its config.json: it {what}")
    for name, value in found.items():
        if value.shape != state[name].shape:
            raise ModelError(
                f"{folder} does not match its config.json: {name} has shape {list(value.shape)}, "
                f"not {list(state[name].shape)}"
            )
        if state[name].is_floating_point():
            if not value.is_floating_point() or value.itemsize < 2:
                raise ModelError(
                    f"{name} in {folder} is stored as {value.dtype}; "
                    "use a checkpoint in float32, float16 or bfloat16"
                )
            if not bool(torch.isfinite(value).all()):
                raise ModelError(
                    f"{name} in {folder} has values that are no numbers: it is damaged"
                )
    head.load_state_dict(found)
