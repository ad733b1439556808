"""The models that ship with Outrider, and the folder of a model name."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelError
from outrider.model.named import BUNDLED, PACKAGED, bundled_names, packaged_file
from outrider.model.weights import resolve_folder

__all__ = ["DEFAULT", "bundled_names", "bundled_path", "find_folder"]

DEFAULT = "target"


def bundled_path(name: str = DEFAULT) -> Path:
    """The folder of a bundled model; `ModelError` if this installation does not have it."""
    if name in bundled_names():
        return BUNDLED / name
    known = ", ".join(bundled_names()) or "none in this installation"
    raise ModelError(f"no bundled model {name!r} (there are: {known}); give a model folder instead")


def find_folder(path_or_name: str | Path) -> Path:
    """The folder or GGUF file of a model: a path, a hub name, `smollm2`, `bundled` (the target) or
    `bundled:NAME`. A local path goes before a short name."""
    name = str(path_or_name)
    if name == "bundled":
        return bundled_path()
    if name.startswith("bundled:"):
        return bundled_path(name.removeprefix("bundled:"))
    if name in PACKAGED and not Path(name).exists():
        return packaged_file(name)
    return resolve_folder(path_or_name)
