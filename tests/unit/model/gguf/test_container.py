"""The container: what is sound is read, what is not is refused in one line, quickly."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf_files
from gguf_files import BY_NAME, Stored, entry, header, text
from outrider import native
from outrider.errors import ModelError
from outrider.model.capabilities import PacksLater
from outrider.model.driver import Driver
from outrider.model.gguf.checkpoint import GgufCheckpoint
from outrider.model.gguf.container import open_gguf, read_container
from outrider.model.gguf.files import model_name
from outrider.model.load import load_model
from outrider.model.tokenizer import Tokenizer
from outrider.model.weights import read_config
from outrider.testing import write_tiny_llama

NUM_MUTATIONS = 10_000 if "OUTRIDER_EXPLORE" in os.environ else 300


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"), num_layers=1, vocab_size=300)
    return gguf_files.from_folder(folder, folder / "tiny.gguf")


def ones(*shape: int) -> Stored:
    return Stored(BY_NAME["F32"], shape, np.ones(shape, "<f4").tobytes())


def test_everything_written_is_read(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "a.flag": True,
        "a.number": 7,
        "a.negative": -7,
        "a.float": 0.5,
        "a.text": "grüße\0",
        "a.texts": ["x", "", "ł"],
        "a.numbers": [1, -2, 3],
        "a.floats": [0.25, -1.0],
    }
    path = gguf_files.write(tmp_path / "m.gguf", metadata, {"t": ones(2, 3), "u": ones(5)})
    found = read_container(path)
    assert {
        key: list(v) if isinstance(v, np.ndarray) else v for key, v in found.metadata.items()
    } == metadata
    assert found.tensors["t"].shape == (2, 3)
    assert found.raw(found.tensors["u"]).view("<f4").tolist() == [[1.0] * 5]


def test_agrees_with_the_package(tiny: Path) -> None:
    gguf = pytest.importorskip("gguf")
    ours, theirs = read_container(tiny), gguf.GGUFReader(tiny)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            mine = ours.metadata[key]
            assert (list(mine) if isinstance(mine, np.ndarray) else mine) == field.contents()
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.type.id == tensor.tensor_type
        assert mine.shape == tuple(tensor.shape[::-1])
        assert ours.raw(mine).tobytes() == tensor.data.tobytes()


def test_a_split_file_is_read_as_a_whole_from_any_part(tmp_path: Path) -> None:
    for i in range(2):
        metadata = {"split.no": i, "split.count": 2, f"only.{i}": 1}
        name = f"big-{i + 1:05}-of-00002.gguf"
        gguf_files.write(tmp_path / name, metadata, {f"t{i}": ones(4)})
    for part in sorted(tmp_path.iterdir()):
        found = read_container(part)
        assert list(found.tensors) == ["t0", "t1"]
        assert "only.1" not in found.metadata
        assert model_name(part) == "big"
    (tmp_path / "big-00001-of-00002.gguf").rename(tmp_path / "alone.gguf")
    with pytest.raises(ModelError, match="lacks big-00001-of-00002"):
        read_container(tmp_path / "big-00002-of-00002.gguf")
    with pytest.raises(ModelError, match="one part of 2"):
        read_container(tmp_path / "alone.gguf")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", {"a": 1}, {})
    assert open_gguf(path) is open_gguf(path)
    gguf_files.write(tmp_path / "new", {"a": 2, "b": 3}, {})
    (tmp_path / "new").replace(path)
    assert open_gguf(path).metadata["a"] == 2


def test_a_file_that_shrinks_while_it_is_mapped_is_noticed(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    container = read_container(path)
    last = max(container.tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(path, last.offset)
    with pytest.raises(ModelError, match="became shorter"):
        container.raw(last)


def test_a_file_that_is_lost_after_packing_is_harmless(quantised: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(quantised.read_bytes())
    model = load_model(path)
    before = Driver(model).forward({"a": [1, 2, 3]}).logits["a"].clone()
    if isinstance(model, PacksLater):
        model.pack()
    os.truncate(path, 0)
    assert torch.equal(Driver(model).forward({"a": [1, 2, 3]}).logits["a"], before)


START = b"GGUF" + struct.pack("<I", 3)
HUGE = (1 << 63) - 1


def counts(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return START + struct.pack("<qq", tensors, keys) + rest


def one_key(kind: int, value: bytes) -> bytes:
    return counts(0, 1, text("k") + struct.pack("<I", kind) + value)


def one_tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, size: int = 64) -> bytes:
    info = text("t") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    head = counts(1, 0, info + struct.pack("<IQ", kind, offset))
    return head + bytes(-len(head) % 32) + bytes(size)


HOSTILE = {
    "empty": b"",
    "wrong magic": b"GGML" + bytes(60),
    "only the magic": b"GGUF",
    "old version": b"GGUF" + struct.pack("<Iqq", 1, 0, 0),
    "big-endian": b"GGUF" + struct.pack(">Iqq", 3, 0, 0),
    "negative tensors": counts(-1, 0),
    "negative keys": counts(0, -1),
    "huge tensors": counts(HUGE, 0),
    "huge keys": counts(0, HUGE),
    "many keys": counts(0, 60_000, bytes(100)),
    "cut key": counts(0, 1, struct.pack("<Q", 1 << 40) + bytes(20)),
    "huge text": one_key(8, struct.pack("<Q", HUGE)),
    "huge array": one_key(9, struct.pack("<IQ", 5, HUGE)),
    "huge array of texts": one_key(9, struct.pack("<IQ", 8, HUGE)),
    "cut array of texts": one_key(9, struct.pack("<IQ", 8, 2) + text("a") + b"\xff" * 8),
    "array of arrays": one_key(9, struct.pack("<IQIQ", 9, 1, 9, 1)),
    "unknown type": one_key(77, bytes(16)),
    "unknown element": one_key(9, struct.pack("<IQ", 77, 1) + bytes(16)),
    "repeated key": counts(0, 2, (text("k") + entry(1)) * 2),
    "odd alignment": counts(0, 1, text("general.alignment") + entry(0)),
    "no dimensions": one_tensor(()),
    "five dimensions": one_tensor((1, 1, 1, 1, 1)),
    "empty dimension": one_tensor((0, 4)),
    "overflowing shape": one_tensor((1 << 39, 1 << 39, 1 << 39)),
    "broken rows": one_tensor((33,), kind=8),
    "behind the end": one_tensor((16,), offset=1 << 40),
    "cut data": one_tensor((17,)),
    "unaligned": one_tensor((4,), offset=4),
    "unread type": one_tensor((256,), kind=19),
    "unheard-of type": one_tensor((256,), kind=4096),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            read_container(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_an_unread_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(HOSTILE["unread type"])
    with pytest.raises(ModelError, match="stored as IQ1_S, which we do not read; use a file"):
        read_container(path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    tensors = {"t": ones(16), "u": ones(16)}
    raw = bytearray(header({}, tensors) + bytes(256))
    raw[raw.index(b"u") + 1 + 4 + 8 + 4 :][:8] = bytes(8)
    at = raw.index(text("u")) + len(text("u")) + 4 + 8 + 4
    raw[at : at + 8] = bytes(8)
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match="where another tensor lies"):
        read_container(tmp_path / "m.gguf")


def test_every_cut_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(1, len(whole) - 64, len(whole) // 150):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            read_container(path)


@pytest.fixture(scope="module")
def quantised(tiny: Path) -> Path:
    """The same file with its matrices in blocks."""
    old = read_container(tiny)
    tensors = {
        name: gguf_files.random_blocks(("Q4_1", "Q8_0", "MXFP4")[i % 3], info.shape)
        if len(info.shape) == 2 and info.shape[1] % 32 == 0
        else Stored(info.type, info.shape, old.raw(info).tobytes())
        for i, (name, info) in enumerate(old.tensors.items())
    }
    return gguf_files.write(tiny.with_name("quantised.gguf"), old.metadata, tensors)


def use(path: Path) -> None:
    """Everything that reads a header, up to one pass of the model."""
    read_config(path)
    Tokenizer(path)
    checkpoint = GgufCheckpoint(open_gguf(path))
    for name in checkpoint.names():
        checkpoint.tensor(name, open_gguf(path).tensors[gguf_files.file_name_of(name)].shape)
    model = load_model(path, dtype="auto" if native.available() else "float32")
    Driver(model).forward({"a": [1, 2, 3]})


def test_mutated_headers_load_or_are_refused(quantised: Path, tmp_path: Path) -> None:
    whole = quantised.read_bytes()
    use(quantised)
    length = len(whole) - sum(t.size for t in read_container(quantised).tensors.values())
    rng = np.random.default_rng(int(os.environ.get("OUTRIDER_EXPLORE_SEED", "0")))
    refused, lines = 0, set()
    for i in range(NUM_MUTATIONS):
        raw = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, length))
            if rng.random() < 0.5:
                raw[at] ^= 1 << int(rng.integers(0, 8))
            else:
                size = int(rng.choice([1, 4, 8]))
                raw[at : at + size] = rng.choice([b"\xff", b"\0", b"\x7f"]).item() * size
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(raw)
        try:
            use(path)
        except ModelError as error:
            refused += 1
            lines.add(str(error))
        finally:
            path.unlink()
    assert 0 < refused < NUM_MUTATIONS
    assert not [line for line in lines if "\n" in line]
