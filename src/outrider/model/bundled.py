"""The models that ship with Outrider, and the folder of a model name."""

from __future__ import annotations

from pathlib import Path

from outrider.errors import ModelError
from outrider.model.weights import resolve_folder

_ROOT = Path(__file__).resolve().parent.parent / "bundled"
DEFAULT = "target"


def bundled_names() -> list[str]:
    """The names of the bundled models in this installation."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


def bundled_path(name: str = DEFAULT) -> Path:
    """The folder of a bundled model; `ModelError` if this installation does not have it."""
    if name in bundled_names():
        return _ROOT / name
    known = ", ".join(bundled_names()) or "none in this installation"
    raise ModelError(f"no bundled model {name!r} (there are: {known}); give a model folder instead")


def find_folder(path_or_name: str | Path) -> Path:
    """The folder of a model: a path, a hub name, `bundled` (the target) or `bundled:NAME`."""
    name = str(path_or_name)
    if name == "bundled":
        return bundled_path()
    if name.startswith("bundled:"):
        return bundled_path(name.removeprefix("bundled:"))
    return resolve_folder(path_or_name)
