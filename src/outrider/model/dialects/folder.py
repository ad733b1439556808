"""The files of a published drafter: config.json and tensors, of which nothing is lost silently.

A dialect takes fields and tensors one by one. What remains is refused by name in the end, unless it
is known not to change what the drafter computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelError
from outrider.model.gguf.files import is_gguf
from outrider.model.weights import Checkpoint, read_json

# Fields of config.json that change nothing in a draft.
NEUTRAL = frozenset(
    (
        *("architectures", "auto_map", "model_type", "torch_dtype", "dtype"),
        *("transformers_version", "_name_or_path", "name_or_path", "use_cache"),
        *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("max_position_embeddings", "max_window_layers", "pretraining_tp"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
        *("dropout", "return_dict", "output_hidden_states", "output_attentions", "id2label"),
        *("label2id", "chunk_size_feed_forward", "is_encoder_decoder", "problem_type"),
        *("task_specific_params", "base_model_name_or_path", "version", "tokenizer_class"),
        *("is_decoder", "use_bfloat16", "torchscript", "num_anchors", "target_model_type"),
        *("decoder_sparse_step", "_attn_implementation", "attn_implementation"),
        *("speculators_model_type",),
    )
)
# Tensors that only training uses.
LEFTOVERS = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")


class Fields:
    """The fields of a JSON object. `where` names the object inside config.json."""

    def __init__(self, values: Mapping[str, Any], folder: Path, where: str = "") -> None:
        self.values = dict(values)
        self.folder = folder
        self._where = where
        self._seen: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The field; `default` where it is absent or null."""
        self._seen.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "a whole number")
        return value

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> tuple[int, ...] | None:
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(name, "a list of whole numbers")
        return tuple(value)

    def inner(self, name: str) -> Fields:
        """The object `name`; empty where it is absent. It has to be finished by itself."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, self.folder, f"{self._where}{name}.")

    def ignore(self, *names: str) -> None:
        """Fields that change nothing for this dialect."""
        self._seen.update(names)

    def must_be(self, name: str, *allowed: object) -> None:
        """Refuses a field that is there with another value."""
        value = self.get(name)
        if value is not None and value not in allowed:
            raise ModelError(
                f"{self.folder}: config.json has {self._where}{name} = {value!r}, "
                f"which is not supported (only {' or '.join(map(repr, allowed))})"
            )

    def wrong(self, name: str, wanted: str) -> ModelError:
        return ModelError(
            f"{self.folder}: {self._where}{name} of config.json must be {wanted}, "
            f"not {self.values.get(name)!r}"
        )

    def finish(self) -> None:
        """Refuses the fields that were not read; null and false are how configs say "not used"."""
        left = [
            name
            for name, value in self.values.items()
            if name not in self._seen | NEUTRAL and value is not None and value is not False
        ]
        if left:
            name = left[0]
            raise ModelError(
                f"{self.folder}: config.json has {self._where}{name} = {self.values[name]!r}, "
                "which this version does not know; its drafts would not be those of its authors"
            )


class Tensors:
    """The tensors of a drafter, however they are stored; `model.` in front is dropped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stored = _open(folder)
        self._names = {name: name for name in self._stored}
        self.rename("model.", "")

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._names))

    def rename(self, old: str, new: str) -> None:
        """Renames every tensor that starts with `old`; refuses two of one name."""
        for name in list(self._names):
            if name.startswith(old):
                renamed = new + name.removeprefix(old)
                if renamed in self._names:
                    raise ModelError(f"{self.folder} has both {renamed} and {name}")
                self._names[renamed] = self._names.pop(name)

    def drop(self, *names: str) -> None:
        """Forgets tensors that are known not to matter."""
        for name in names:
            self._names.pop(name, None)

    def drop_leftovers(self) -> None:
        """Forgets what only training uses."""
        for name in list(self._names):
            if name.endswith(LEFTOVERS):
                del self._names[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ModelError where the tensor is missing."""
        return tuple(self.get(name).shape)

    def get(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelError(f"{self.folder} lacks the tensor {name}; is the download complete?")
        return self._stored[self._names[name]]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the first floating-point tensor."""
        return next(t.dtype for t in self._stored.values() if t.is_floating_point())

    def all(self) -> dict[str, Tensor]:
        """Everything that is left, by name."""
        return {name: self.get(name) for name in self._names}

    def replace(self, name: str, value: Tensor) -> None:
        self._stored[name] = value
        self._names[name] = name


def stored_names(folder: Path) -> frozenset[str]:
    """The names of the tensors in a folder, without `model.`; empty if nothing can be read.

    A pickle has to be unpickled for it, safetensors only have their table read.
    """
    if any((folder / name).is_file() for name in _PICKLES) and not _has_safetensors(folder):
        names = list(_open(folder))
    else:
        try:
            names = Checkpoint(folder).names()
        except ModelError:
            return frozenset()
    return frozenset(name.removeprefix("model.") for name in names)


def _has_safetensors(folder: Path) -> bool:
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((folder / name).is_file() for name in names)


def _open(folder: Path) -> dict[str, Tensor]:
    """The tensors by their stored names: of safetensors (also sharded), of a pickle, of a GGUF."""
    if is_gguf(folder):
        from outrider.model.dialects.gguf import head_tensors

        return head_tensors(folder)
    if not _has_safetensors(folder):
        single = folder / "medusa_lm_head.safetensors"
        if single.is_file():
            return _read_safetensors(single)
        for name in _PICKLES:
            if (folder / name).is_file():
                return _read_pickle(folder / name)
        index = folder / "pytorch_model.bin.index.json"
        if index.is_file():
            files = sorted(set(read_json(index).get("weight_map", {}).values()))
            return {k: v for file in files for k, v in _read_pickle(folder / file).items()}
    return Checkpoint(folder).all_tensors()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short; download the file again") from error
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """A pickled state dict. Only tensors are unpickled: no code can run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        raise ModelError(
            f"{path} is damaged or holds more than tensors ({what}); download the file again"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds {type(found).__name__}, not tensors by name")
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if len(tensors) != len(found):
        other = next(name for name in found if name not in tensors)
        raise ModelError(f"{path} holds {other!r}, which is no tensor")
    return tensors
