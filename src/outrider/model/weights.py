"""Models on disk: finds them and reads their configs and tensors.

A model is a Hugging Face folder or a GGUF file, which `outrider.model.gguf` reads.

Only data is read: safetensors or pickled tensors, and never Python code inside a folder. Every
problem with a folder is a `ModelError` of one line that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.errors import ModelError, NoSuchModel
from outrider.model.gguf.files import is_gguf
from outrider.model.pickled import PickledFile
from outrider.native import STORED_KINDS

if TYPE_CHECKING:
    from outrider.model.stored import Blocks

# The file or the index of shards, the preferred form first.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def resolve_folder(path_or_name: str | Path) -> Path:
    """The local folder or GGUF file of a model: the path itself, or what a hub name means.

    A hub name (see `hub`) is looked up only when no such local folder exists.
    """
    path = Path(path_or_name).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    from outrider.model.hub import HubName

    name = str(path_or_name)
    if path.exists():
        raise ModelError(f"{name} is neither a folder with a config.json nor a GGUF file; give one")
    found = None if path.is_absolute() or name.startswith((".", "~")) else HubName.parse(name)
    if found is None:
        raise NoSuchModel(
            f"no folder {name}; give a folder with config.json and model.safetensors, "
            "a GGUF file, a hub name like owner/model, 'bundled' or 'smollm2'"
        )
    return found.find_cached() or found.download()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `ModelError` if the file is unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NoSuchModel(f"{path.parent} has no {path.name}; is it a model folder?") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} is not readable JSON ({_line(error)}); download the file again"
        ) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download the file again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, or the metadata of a GGUF file in that form.

    Raises `ModelError` if it names no model type.
    """
    if is_gguf(folder):
        from outrider.model.gguf.config import read_gguf_config
        from outrider.model.gguf.container import open_gguf

        return read_gguf_config(open_gguf(folder))
    config = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} names no model_type; use a folder that transformers' "
            "save_pretrained wrote"
        )
    if config.get("quantization_config"):
        return config | {"dtype": "bfloat16"}  # what dequantised weights become
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """generation_config.json, or what a GGUF file says of sampling; nothing if there is none."""
    if is_gguf(folder):
        from outrider.model.gguf.config import sampling
        from outrider.model.gguf.container import open_gguf

        return sampling(open_gguf(folder))
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def read_eos_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, from generation_config.json, else from config.json."""
    eos = read_generation_config(folder).get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"eos_token_id in {folder} is {eos!r}; it must be an id or a list of ids")
    return tuple(ids)


def count_tokens(folder: Path, vocab_size: int) -> int:
    """All ids of the model's tokenizer are below this number; at most `vocab_size`."""
    if is_gguf(folder):
        from outrider.model.gguf.config import num_used
        from outrider.model.gguf.container import open_gguf

        return min(num_used(open_gguf(folder)) or vocab_size, vocab_size)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    digest = sha1(path.read_bytes(), usedforsecurity=False).digest()
    if digest not in _NUM_TOKENS:
        _NUM_TOKENS[digest] = _count_tokens(read_json(path))
    return min(_NUM_TOKENS[digest] or vocab_size, vocab_size)


_NUM_TOKENS: dict[bytes, int] = {}  # by digest of tokenizer.json: a pair often has the same


def _count_tokens(content: dict[str, Any]) -> int:
    """One more than the highest id in a tokenizer.json; 0 if it lists none."""
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        ids = list(vocab.values())
    elif isinstance(vocab, list):  # unigram: the id is the index
        ids = [len(vocab) - 1]
    else:
        return 0
    ids += [token["id"] for token in content.get("added_tokens") or []]
    return max(ids, default=-1) + 1


class Checkpoint:
    """The tensors of a folder, by name. Files are mapped: only tensors that are used are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for only, index in _WEIGHTS:
            if (folder / only).is_file():
                self._file_of = dict.fromkeys(self._open(only).keys(), only)
                return
            if (folder / index).is_file():
                weight_map = read_json(folder / index).get("weight_map")
                if not isinstance(weight_map, dict):
                    raise ModelError(f"{folder / index} has no weight_map; download the file again")
                self._file_of = weight_map
                return
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = (
            "its weights are pickles of another form; convert them to safetensors"
            if pickled
            else "download the weights"
        )
        raise ModelError(f"{folder} has no model.safetensors: {hint}")

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return list(self._file_of)

    def kind_of(self, name: str) -> int:
        """The type to keep a matrix in, as outrider.h numbers it."""
        return self._kind

    @cached_property
    def _kind(self) -> int:
        """The type of all tensors; float32 if they differ."""
        kinds = {self._stored(name) for name in self._file_of}
        return STORED_KINDS.get("".join(kinds), STORED_KINDS["F32"])

    def _stored(self, name: str) -> str:
        return str(self._open(self._file_of[name]).get_slice(name).get_dtype())

    def blocks(
        self, name: str, shape: Sequence[int]
    ) -> AbstractContextManager[tuple[Blocks, bool]]:
        """See `GgufCheckpoint.blocks`: of what `kind_of` calls packed."""
        raise AssertionError(f"{name} is not packed")

    def tensor(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` in its stored type; `ModelError` if it has another shape."""
        if name not in self._file_of:
            raise ModelError(
                f"{self.folder} lacks the tensor {name} that its config.json implies; "
                "the two do not belong together or the download is incomplete"
            )
        tensor = self._read(name)
        if list(tensor.shape) != list(shape):
            raise ModelError(
                f"{name} in {self.folder} has shape {list(tensor.shape)} where config.json implies "
                f"{list(shape)}; the two do not belong together"
            )
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(
                f"{name} in {self.folder} is stored as {tensor.dtype}; "
                "use a checkpoint in float32, float16 or bfloat16"
            )
        return tensor

    def all_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, in its stored type."""
        return {name: self._read(name) for name in self._file_of}

    def _read(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._open(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(
                f"{self.folder / self._file_of[name]} has no readable {name} ({_line(error)}); "
                "download the file again"
            ) from error
        return tensor

    def _open(self, filename: str) -> Any:
        if filename not in self._files:
            path = self.folder / filename
            if Path(filename).name != filename or not path.is_file():
                raise ModelError(f"{self.folder} lacks {filename}; download the missing file")
            if path.suffix == ".bin":
                self._files[filename] = PickledFile(path)
                return self._files[filename]
            try:
                self._files[filename] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is damaged or cut short ({_line(error)}); download the file again"
                ) from error
        return self._files[filename]


def _line(error: BaseException) -> str:
    """The error's message as one line."""
    return " ".join(str(error).split())
