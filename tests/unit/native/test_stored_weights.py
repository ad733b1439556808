"""Blocks that are multiplied while they are still in their file: the same bits as packed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gguf_files import write_model
from native_models import ISAS, needs_native, random_tokens
from outrider.errors import ModelError
from outrider.model.driver import Driver
from outrider.model.gguf.types import TYPES
from outrider.model.native_decoder import NativeDecoder

pytestmark = needs_native
BLOCK_TYPES = sorted(kind.name for kind in TYPES.values() if kind.values > 1)
VOCAB = 96
TOKENS = random_tokens(41, VOCAB)
PACKS_ALL = 300  # tokens of a pass that packs everything before


def load(path: Path, threads: int = 2, *, packs: bool = False) -> NativeDecoder:
    model = NativeDecoder.load(path, threads=threads)
    if packs:
        model.pack()
    return model


def logits(driver: Driver, tokens: list[int]) -> torch.Tensor:
    found = driver.forward({"a": tokens}).logits["a"]
    driver.keep("a", range(len(tokens)))
    return found


def same(path: Path, first: int, threads: int) -> bool:
    """Passes while weights are in the file, while they are packed, and after that."""
    stored, packed = Driver(load(path, threads)), Driver(load(path, packs=True))
    pieces = [TOKENS[:first], *([token] for token in TOKENS[first : first + 6]), TOKENS[30:]]
    return all(torch.equal(logits(stored, piece), logits(packed, piece)) for piece in pieces)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_bits_are_those_of_packed_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", kind, tied=kind > "Q4", hidden=256, inner=768)
    for isa in ISAS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        for first, threads in ((1, 1), (5, 3), (17, 2)):
            assert same(path, first, threads), (isa, first)


def test_an_odd_number_of_blocks(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0", hidden=96, inner=160, arch="qwen2")
    assert all(same(path, first, threads) for first in (1, 17) for threads in (1, 2))


def test_a_file_that_is_cut_fails_the_next_pass(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0")
    driver = Driver(load(path))
    logits(driver, TOKENS[:3])
    os.truncate(path, path.stat().st_size // 2)
    for _ in range(2):
        with pytest.raises(ModelError, match="the file of the weights has changed"):
            logits(driver, TOKENS[3:4])


def test_a_file_that_is_overwritten_fails_the_next_pass(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0")
    driver = Driver(load(path))
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match="the file of the weights has changed"):
        logits(driver, TOKENS[:3])


@pytest.mark.parametrize("how", ["one by one", "in a wide pass", "at once"])
def test_what_is_packed_needs_no_file(how: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0")
    model = load(path)
    driver, expected = Driver(model, num_blocks=128), Driver(load(path, packs=True), num_blocks=128)
    if how == "one by one":
        for token in TOKENS[:5]:
            assert torch.equal(logits(driver, [token]), logits(expected, [token]))
    elif how == "in a wide pass":
        tokens = random_tokens(PACKS_ALL, VOCAB)
        model.extend_positions(PACKS_ALL + 1)
        assert torch.equal(logits(driver, tokens), logits(expected, tokens))
    else:
        model.pack()
    os.truncate(path, 0)
    assert torch.equal(logits(driver, [7]), logits(expected, [7]))


def test_a_file_that_is_replaced_stays_the_model_s(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0")
    driver, expected = Driver(load(path)), Driver(load(path, packs=True))
    write_model(tmp_path / "other.gguf", "Q4_0").replace(path)
    for token in TOKENS[:7]:
        assert torch.equal(logits(driver, [token]), logits(expected, [token]))


MEASURE = """
import sys
from pathlib import Path
from outrider.model.driver import Driver
from outrider.model.gguf.types import TYPES
from outrider.model.native_decoder import NativeDecoder

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def passes(path, count):
    driver = Driver(NativeDecoder.load(path))
    for token in range(count):
        driver.forward({"a": [token]})
        driver.keep("a", [0])
    return driver

passes(sys.argv[1], 8)
before = status("VmRSS")
for count in (1, 8):
    open("/proc/self/clear_refs", "w").write("5")
    driver = passes(sys.argv[2], count)
    print(status("VmHWM") - before)
    del driver
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_the_weights_are_in_memory_once(kind: str, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small.gguf", kind)
    large = write_model(tmp_path / "large.gguf", kind, hidden=2048, inner=8192, vocab=4096)
    size = large.stat().st_size
    assert size > 70e6
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, check=True, env=env)
    first, all_packed = map(int, done.stdout.split())
    assert first < 0.1 * size + 16e6
    assert 0.9 * size < all_packed < 1.15 * size + 16e6
