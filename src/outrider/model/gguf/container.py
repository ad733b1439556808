"""The GGUF container: metadata and a list of tensors, every number checked before it is used.

The package `gguf` reads the same format, but it builds one array per metadata element (3.4 s for a
vocabulary of 49,152, this module 0.1 s) and trusts the counts in the header, so a hostile file
makes it allocate without bound. Here nothing is allocated that the file itself does not back: a
count is compared with the bytes that are left before a loop over it begins.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from outrider.errors import ModelError
from outrider.model.gguf.files import MAGIC, split_names
from outrider.model.gguf.types import TensorType, tensor_type
from outrider.model.stored import InFile, OpenFile

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: ("B", "u1"),
    1: ("b", "i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMS = 4
_MAX_NAME = 1 << 10

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major: the file's own order reversed."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    file: int  # index among the parts of a split file
    offset: int  # from the beginning of that file
    size: int


@dataclass(frozen=True, slots=True)
class Container:
    """A file, or the parts of a split one, read as a whole."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    maps: tuple[mmap.mmap, ...]
    files: tuple[OpenFile, ...] = ()

    @property
    def file_bytes(self) -> int:
        return sum(len(part) for part in self.maps)

    def raw(self, tensor: TensorInfo) -> Bytes:
        """The tensor's blocks, mapped: [rows, bytes of a row]."""
        if self.maps[tensor.file].size() < tensor.offset + tensor.size:
            raise ModelError(f"{self.path} became shorter while it was read; load it again")
        data = np.frombuffer(self.maps[tensor.file], np.uint8, tensor.size, tensor.offset)
        return data.reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))

    def in_file(self, tensor: TensorInfo) -> InFile:
        """The same, unread."""
        size = tensor.type.row_bytes(tensor.shape[-1])
        return InFile(self.files[tensor.file], tensor.offset, tensor.size // size, size)

    def release(self, tensor: TensorInfo) -> None:
        """Lets the system drop the tensor's pages from this process: they were copied."""
        if hasattr(mmap, "MADV_DONTNEED"):
            page = mmap.PAGESIZE
            first = -(-tensor.offset // page) * page
            size = (tensor.offset + tensor.size - first) // page * page
            if size > 0:
                self.maps[tensor.file].madvise(mmap.MADV_DONTNEED, first, size)


def split_paths(path: Path) -> list[Path]:
    """All parts of the split file that `path` is one of; just `path` if it is no such part."""
    names = split_names(path.name)
    parts = [path] if len(names) == 1 else [path.with_name(name) for name in names]
    for part in parts[1:] and parts:
        if not part.is_file():
            raise ModelError(f"{path.parent} lacks {part.name}; download the missing part")
    return parts


def open_gguf(path: Path) -> Container:
    """The file's metadata and tensors; `ModelError` of one line if it is no sound GGUF file.

    A file is read once, however many parts of the program ask for it, and again when it changed.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error}); check the path") from error
    return _open(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4)
def _open(path: Path, changed: int, size: int) -> Container:
    return read_container(path)


def read_container(path: Path) -> Container:
    """Reads a file, or all parts of a split one. `ModelError` of one line if anything is wrong."""
    paths = split_paths(path)
    tensors: dict[str, TensorInfo] = {}
    maps, files = [], []
    metadata: dict[str, Any] = {}
    for index, part in enumerate(paths):
        header = _Header(part, index)
        if index == 0:
            metadata = header.metadata
        if len(paths) > 1 and (
            header.metadata.get("split.no") != index
            or header.metadata.get("split.count") != len(paths)
        ):
            raise ModelError(f"{part} is not part {index + 1} of {len(paths)}; download it again")
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelError(f"{part} repeats the tensor {tensor.name}; download it again")
            tensors[tensor.name] = tensor
        maps.append(header.data)
        files.append(header.file)
    if len(paths) == 1 and metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path} is one part of {metadata['split.count']}; give it the name NAME-00001-of-"
            "0000N.gguf it was published under, beside the other parts"
        )
    return Container(path, metadata, tensors, tuple(maps), tuple(files))


class _Header:
    """One pass over a file's header. Every read goes through `take`, which checks its extent."""

    def __init__(self, path: Path, index: int) -> None:
        self._path = path
        try:
            self.file = OpenFile(path)
            self.data = mmap.mmap(self.file.descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read ({error}); download the file again") from error
        self._at = 0
        if bytes(self._take(4)) != MAGIC:
            self._refuse("is not a GGUF file")
        version = self._number("I")
        if version & 0xFFFF == 0:
            self._refuse("is stored for big-endian processors", "convert it to little-endian")
        if version not in _VERSIONS:
            self._refuse(f"has GGUF version {version}, not 2 or 3", "convert the model again")
        num_tensors, num_keys = self._number("q"), self._number("q")
        if not 0 <= num_keys <= min(_MAX_KEYS, self._left() // 13):
            self._refuse(f"claims {num_keys} metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name()
            if key in self.metadata:
                self._refuse(f"repeats the metadata entry {key!r}")
            self.metadata[key] = self._value(self._number("I"))
        self.tensors = self._tensors(num_tensors, index)

    def _refuse(self, what: str, then: str = "download the file again") -> NoReturn:
        raise ModelError(f"{self._path} {what}; {then}")

    def _left(self) -> int:
        return len(self.data) - self._at

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= self._left():
            self._refuse("is cut short or damaged")
        start, self._at = self._at, self._at + size
        return memoryview(self.data)[start : self._at]

    def _number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self._take(size))[0]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8", "replace")

    def _name(self) -> str:
        """One that error messages can show."""
        name = self._string()
        if len(name) > _MAX_NAME or not name.isprintable():
            self._refuse("has a name that is too long or no text")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                self._refuse(f"has metadata of the unknown type {kind}")
            return self._number(_SCALARS[kind][0])
        element, count = self._number("I"), self._number("Q")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:  # arrays of arrays among them
            self._refuse(f"has a metadata array of the type {element}, which is not supported")
        dtype = np.dtype(_SCALARS[element][1])
        if count > self._left() // dtype.itemsize:
            self._refuse("is cut short or damaged")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).copy()

    def _strings(self, count: int) -> list[str]:
        if count > self._left() // 8:
            self._refuse("is cut short or damaged")
        data, at, end = memoryview(self.data), self._at, len(self.data)
        found = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                self._refuse("is cut short or damaged")
            found.append(str(data[start:at], "utf-8", "replace"))
        self._at = at
        return found

    def _tensors(self, count: int, index: int) -> list[TensorInfo]:
        if not 0 <= count <= min(_MAX_TENSORS, self._left() // 24):
            self._refuse(f"claims {count} tensors")
        entries = [self._entry() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not (8 <= alignment <= 1 << 20):
            self._refuse(f"has the alignment {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = []
        for name, shape, kind, offset in entries:
            size = prod(shape[:-1]) * kind.row_bytes(shape[-1])
            if offset % alignment:
                self._refuse(f"has {name} at an unaligned place")
            if not start + offset + size <= len(self.data):
                self._refuse(f"ends before the tensor {name}")
            tensors.append(TensorInfo(name, kind, shape, index, start + offset, size))
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"has {tensor.name} where another tensor lies")
            end = tensor.offset + tensor.size
        return tensors

    def _entry(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._name()
        dims = self._number("I")
        if not 1 <= dims <= _MAX_DIMS:
            self._refuse(f"gives {name} {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))[::-1]
        kind = tensor_type(self._number("I"), f"{name} in {self._path}")
        if any(not 1 <= size < 1 << 40 for size in shape) or shape[-1] % kind.values:
            self._refuse(f"gives {name} the shape {list(shape)}, which {kind.name} cannot have")
        return name, shape, kind, self._number("Q")
