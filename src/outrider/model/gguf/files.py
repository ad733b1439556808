"""Which paths are GGUF files, and what the models in them are called."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.errors import ModelError

MAGIC = b"GGUF"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 1 << 10


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file: by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def split_names(name: str) -> list[str]:
    """The names of all parts of the split file that `name` is a part of; just `name` if of none."""
    match = SPLIT.fullmatch(name)
    if match is None:
        return [name]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if not 1 <= number <= count <= _MAX_PARTS:
        raise ModelError(f"{name} is not one of 1 to {_MAX_PARTS} parts; check its name")
    return [f"{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def model_name(path: Path) -> str:
    """What a model is called: its folder's name, or its file's without suffix and part number."""
    match = SPLIT.fullmatch(path.name)
    return match[1] if match else path.name.removesuffix(".gguf")
