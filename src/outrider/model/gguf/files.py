"""Which paths are GGUF files, and what the models in them are called."""

from __future__ import annotations

import re
from pathlib import Path

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file: by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def model_name(path: Path) -> str:
    """What a model is called: its folder's name, or its file's without suffix and part number."""
    match = SPLIT.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(".gguf")
