"""Weights that stay in the blocks of a GGUF file, on every instruction set.

The same model in float32 is the reference: weights are exact, activations are rounded to int8 in
blocks of 32, so logits may differ by 3 % of their spread (measured: 0.2 % to 1.8 %, most for
MXFP4). Embeddings are exact.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gguf_files
from gguf_files import Stored, write_model
from native_models import ISAS, needs_native, random_tokens
from outrider import LLM, Speculation
from outrider.errors import ModelError
from outrider.model.driver import Driver
from outrider.model.gguf.container import read_container
from outrider.model.gguf.types import TYPES
from outrider.model.native_decoder import NativeDecoder
from outrider.testing import write_tiny_llama

pytestmark = needs_native
BLOCK_TYPES = sorted(kind.name for kind in TYPES.values() if kind.values > 1)
SMALL_BLOCKS = [name for name in BLOCK_TYPES if gguf_files.BY_NAME[name].values == 32]
TOLERANCE = 0.03
VOCAB = 96
TOKENS = random_tokens(40, VOCAB)
# Q4_K_M has more precise values and outputs of MLPs; other mixtures vary everything.
MIXTURES: dict[str, dict[str, str]] = {
    "Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"},
    "everything": {
        "attn_q": "Q8_0",
        "attn_k": "F16",
        "attn_v": "BF16",
        "attn_output": "F32",
        "ffn_gate": "Q5_0",
        "ffn_up": "Q2_K",
        "ffn_down": "IQ4_XS",
        "output": "F16",
        "token_embd": "F16",
    },
}


def passes(model: NativeDecoder, *pieces: list[int], num_blocks: int = 32) -> torch.Tensor:
    """The logits of all tokens, computed piece by piece."""
    driver, found = Driver(model, num_blocks=num_blocks, seed=5), []
    for piece in pieces:
        found.append(driver.forward({"a": piece}).logits["a"])
        driver.keep("a", range(len(piece)))
    return torch.cat(found)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.std())


def check(path: Path, monkeypatch: pytest.MonkeyPatch, isas: list[str] = ISAS) -> None:
    reference = Driver(NativeDecoder.load(path, dtype="float32"))
    expected = reference.forward({"a": TOKENS}, taps=(0,))
    for isa in isas:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        model = NativeDecoder.load(path)
        found = Driver(model).forward({"a": TOKENS}, taps=(0,))
        assert torch.equal(found.taps[0]["a"], expected.taps[0]["a"])
        assert 0 < error_of(found.logits["a"], expected.logits["a"]) < TOLERANCE, isa
        one_by_one = passes(model, *([token] for token in TOKENS))
        assert torch.equal(one_by_one, found.logits["a"]), isa
        assert torch.equal(passes(model, TOKENS[:17], TOKENS[17:19], TOKENS[19:]), one_by_one)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_every_type(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(write_model(tmp_path / "m.gguf", kind, tied=kind > "Q4"), monkeypatch)


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(write_model(tmp_path / "m.gguf", "Q4_K", mixture=MIXTURES[name]), monkeypatch)


@pytest.mark.parametrize("kind", SMALL_BLOCKS)
def test_an_odd_number_of_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", kind, hidden=96, inner=160, arch="qwen2")
    check(path, monkeypatch, ISAS[:1])


def test_many_rows(tmp_path: Path) -> None:
    model = NativeDecoder.load(
        write_model(tmp_path / "m.gguf", "Q4_K", inner=2048, mixture=MIXTURES["Q4_K_M"])
    )
    tokens = random_tokens(300, VOCAB)
    whole = passes(model, tokens, num_blocks=80)
    assert torch.equal(passes(model, tokens[:7], tokens[7:], num_blocks=80), whole)


@pytest.mark.parametrize(("kind", "code"), [("Q8_0", 0x80), ("Q6_K", 0xFF), ("Q5_1", 0xFF)])
def test_the_largest_products_do_not_saturate(
    kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", kind, mixture={"token_embd": "F32"})
    old = read_container(path)
    tensors = {}
    for name, info in old.tensors.items():
        raw = old.raw(info).copy()
        if name == "token_embd.weight":
            signs = np.where(np.arange(VOCAB) % 2, 1, -1).astype("<f4")
            raw = np.repeat(signs, 256).view(np.uint8)
        elif info.type.name == kind:
            blocks = raw.reshape(-1, info.type.size)
            first, last = {"Q8_0": (2, 34), "Q6_K": (0, 192), "Q5_1": (4, 24)}[kind]
            blocks[:, first:last] = code
        tensors[name] = Stored(info.type, info.shape, raw.tobytes())
    gguf_files.write(path, old.metadata, tensors)
    expected = passes(NativeDecoder.load(path, dtype="float32"), TOKENS)
    for isa in ISAS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        assert 0 < error_of(passes(NativeDecoder.load(path), TOKENS), expected) < TOLERANCE, isa


def test_what_is_not_finite_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", "Q8_0", mixture={"token_embd": "F32"})
    data = bytearray(path.read_bytes())
    embedding = read_container(path).tensors["token_embd.weight"]
    for token, value in ((1, np.inf), (2, np.nan)):
        at = embedding.offset + token * 256 * 4
        data[at + 40 : at + 44] = np.float32(value).tobytes()
    path.write_bytes(data)
    for isa in ISAS:
        monkeypatch.setenv("OUTRIDER_ISA", isa)
        model = NativeDecoder.load(path)
        for token in (1, 2):
            assert passes(model, [token]).isnan().all(), isa
        assert passes(model, [3]).isfinite().all()


def test_drafts_do_not_change_the_output(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tokenizer", vocab_size=300)
    path = write_model(tmp_path / "m.gguf", "Q4_1", vocab=300)
    with_tokenizer(path, folder)
    given: dict[str, Any] = {"max_tokens": 40, "seed": 3, "ignore_eos": True}
    for temperature in (0.0, 0.8):
        off = Speculation(num_draft_tokens=0)
        expected = LLM(str(path)).generate("a", temperature=temperature, speculation=off, **given)
        for proposer, count in (("early-exit", 3), ("ngram", 8), ("quantized", 2)):
            llm = LLM(str(path), proposer=proposer, num_draft_tokens=count)
            found = llm.generate("a", temperature=temperature, **given)
            assert found.tokens == expected.tokens, proposer
            assert found.stats.num_drafted > 0 or proposer == "ngram"


def with_tokenizer(path: Path, folder: Path) -> None:
    old = read_container(path)
    tensors = {
        name: Stored(t.type, t.shape, old.raw(t).tobytes()) for name, t in old.tensors.items()
    }
    gguf_files.write(path, dict(old.metadata) | gguf_files.tokenizer_of(folder), tensors)


def test_a_type_that_does_not_suit_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "Q4_K", hidden=256, inner=256)
    model = NativeDecoder.load(path)
    blocks = np.zeros((256, 144), np.uint8)
    with pytest.raises(ModelError, match="a type that its matrix is not made of"):
        model.set_blocks(7, 0, blocks, 64 + 14, 256)
    with pytest.raises(ModelError, match="unexpected shape"):
        model.set_blocks(7, 0, blocks[:3], 64 + 12, 256)
