"""Files that llama.cpp's converter wrote of many architectures, against transformers."""

from __future__ import annotations

import functools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf_files
from gguf_conversions import ARCHIVE, CONFIGS, build
from outrider.errors import ModelError
from outrider.model.driver import Driver
from outrider.model.gguf.container import read_container
from outrider.model.load import load_model

TOKENS = [int(t) for t in np.random.default_rng(1).integers(0, 48, size=24)]


@functools.cache
def archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(ARCHIVE)


def converted(name: str, folder: Path) -> Path:
    return Path(archive().extract(f"{name}.gguf", folder))


def logits(path: Path, **options: Any) -> torch.Tensor:
    return Driver(load_model(path, **options)).forward({"a": TOKENS}).logits["a"].clone()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # transformers' GPT-BigCode
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_logits_as_transformers(name: str, tmp_path: Path) -> None:
    path = converted(name, tmp_path)
    with torch.no_grad():
        expected = build(name)(torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.1
    for backend in ("torch", "native"):
        found = logits(path, backend=backend, dtype="float32")
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def in_blocks(path: Path, kind: str) -> Path:
    """The file with its large tensors quantised by the package that owns the format."""
    gguf = pytest.importorskip("gguf")
    old = read_container(path)
    tensors = {}
    for name, info in old.tensors.items():
        data = np.frombuffer(old.raw(info).tobytes(), np.float32).reshape(info.shape)
        stored = gguf_files.Stored(info.type, info.shape, data.tobytes())
        kept = name.endswith(".bias") or "gate_inp" in name or "norm" in name
        if len(info.shape) > 1 and not kept:
            blocks = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
            stored = gguf_files.Stored(gguf_files.BY_NAME[kind], info.shape, blocks.tobytes())
        tensors[name] = stored
    metadata = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in old.metadata.items()}
    return gguf_files.write(path.with_name(f"{kind}.gguf"), metadata, tensors)


# Experts, with biases and beside a shared one; fused and partly rotated heads; all norms.
@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "qwen2_moe", "glm", "glm4_moe", "phi3", "gpt2", "gemma2", "olmo"]
)
def test_blocks_are_computed_as_they_are(name: str, tmp_path: Path) -> None:
    path = in_blocks(converted(name, tmp_path), "Q8_0")
    model: Any = load_model(path, backend="native")
    assert model.dtype == "packed"
    whole = Driver(model).forward({"a": TOKENS}).logits["a"].clone()
    exact = logits(path, backend="native", dtype="float32")
    assert (whole - exact).std() < 0.02 * exact.std()  # activations are rounded
    driver = Driver(model)
    for at in range(0, 24, 3):
        piece = driver.forward({"a": TOKENS[at : at + 3]}).logits["a"]
        driver.keep("a", range(3))
        assert torch.equal(piece, whole[at : at + 3])


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "glm4_moe", "ernie4_5_moe", "phi3 longrope"])
def test_hostile_metadata_is_refused_or_harmless(name: str, tmp_path: Path) -> None:
    old = read_container(converted(name, tmp_path))
    tensors = {
        key: gguf_files.Stored(info.type, info.shape, old.raw(info).tobytes())
        for key, info in old.tensors.items()
    }
    metadata = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in old.metadata.items()}
    entries = [key for key in metadata if not key.startswith(("general.", "tokenizer."))]
    lines = []
    for key in entries:
        for value in ("x", -1, 0, [1, 2], (1 << 31) - 1, 1e30, True):
            path = gguf_files.write(tmp_path / "h.gguf", metadata | {key: value}, tensors)
            try:
                logits(path, backend="native", dtype="float32")
            except ModelError as error:
                lines.append(str(error))
    assert len(lines) > len(entries)
    assert not [line for line in lines if "\n" in line]
