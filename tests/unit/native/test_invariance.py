"""A row's bits depend on its own path alone: not on width, batch, tree, layout or threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from native_models import ISAS, ODD, batch_of, needs_native, random_tokens
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from tiny_models import path_to, write

pytestmark = needs_native
VOCAB = ODD["vocab_size"]
SIZES = {"a": 33, "b": 1, "c": 7, "d": 20}
DTYPES = ("float32", "bfloat16", "int8", "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen2Config(
        **ODD | {"hidden_size": 138},
        use_sliding_window=True,
        sliding_window=30,
        max_window_layers=2,
    )
    return write(tmp_path_factory.mktemp("invariance"), config)


@pytest.fixture(
    scope="module",
    params=[(isa, dtype) for isa in ISAS for dtype in DTYPES],
    ids=lambda p: "-".join(p),
)
def model(request: pytest.FixtureRequest, folder: Path) -> NativeDecoder:
    isa, dtype = request.param
    patch = pytest.MonkeyPatch()
    patch.setenv("OUTRIDER_ISA", isa)
    loaded = NativeDecoder.load(folder, dtype=dtype, threads=2)
    patch.undo()
    return loaded


def one_by_one(model: NativeDecoder, tokens: list[int]) -> torch.Tensor:
    """Plain decoding: each token in a step of its own. [n, V]"""
    driver = Driver(model, block_size=16)
    rows = []
    for token in tokens:
        rows.append(driver.forward({"a": [token]}).logits["a"])
        driver.keep("a", [0])
    return torch.cat(rows)


def test_any_width(model: NativeDecoder) -> None:
    tokens = random_tokens(60, VOCAB)
    plain = one_by_one(model, tokens)
    for width in (2, 3, 4, 5, 7, 9, 12, 13, 17, 25, 60):
        driver = Driver(model, block_size=16)
        for start in range(0, len(tokens), width):
            piece = tokens[start : start + width]
            got = driver.forward({"a": piece}).logits["a"]
            assert torch.equal(got, plain[start : start + width]), (width, start)
            driver.keep("a", range(len(piece)))


def test_many_rows(model: NativeDecoder) -> None:
    """Enough rows for several row blocks of one task."""
    tokens = random_tokens(256, VOCAB, seed=5)
    plain = one_by_one(model, tokens)
    assert torch.equal(Driver(model, block_size=16).forward({"a": tokens}).logits["a"], plain)


def test_any_batch_and_block_layout(model: NativeDecoder) -> None:
    texts = {name: random_tokens(n, VOCAB, seed=n) for name, n in SIZES.items()}
    plain = {name: one_by_one(model, text) for name, text in texts.items()}
    for block_size, seed in ((1, 1), (3, 2), (8, 3), (16, 4), (48, 5)):
        driver = Driver(model, num_blocks=80, block_size=block_size, seed=seed)
        got = driver.forward(texts).logits
        for name in texts:
            assert torch.equal(got[name], plain[name]), (block_size, name)


def test_trees_equal_chains(model: NativeDecoder) -> None:
    prefix, nodes = random_tokens(37, VOCAB), random_tokens(12, VOCAB, seed=1)
    parents = [-1, 0, 0, 1, 3, 2, -1, 4, 6, 8, 5, 7]
    driver = Driver(model, block_size=4, seed=9)
    driver.forward({"a": prefix})
    driver.keep("a", range(37))
    got = driver.forward({"a": nodes, "b": nodes}, {"a": parents}).logits["a"]
    for node in range(12):
        path = [nodes[i] for i in path_to(parents, node)]
        expected = one_by_one(model, prefix + path)[-1]
        assert torch.equal(got[node], expected), node


def test_committed_path_of_a_tree(model: NativeDecoder) -> None:
    """After the accepted path's slots close ranks, decoding goes on as if nothing had happened."""
    prefix, nodes = random_tokens(21, VOCAB), random_tokens(6, VOCAB, seed=2)
    parents, kept = [-1, 0, 0, 2, 1, 3], [0, 2, 3, 5]
    driver = Driver(model, block_size=3, seed=4)
    driver.forward({"a": prefix})
    driver.keep("a", range(21))
    driver.forward({"a": nodes}, {"a": parents})
    driver.keep("a", kept)
    got = driver.forward({"a": [5]}).logits["a"]
    expected = one_by_one(model, prefix + [nodes[i] for i in kept] + [5])[-1:]
    assert torch.equal(got, expected)


def test_any_number_of_threads(folder: Path) -> None:
    tokens = random_tokens(40, VOCAB)
    results = []
    for threads in (1, 2, 3, 7):
        model = NativeDecoder.load(folder, threads=threads)
        model.allocate(16, 16)
        prefill = model.forward(batch_of(tokens, context=0, width=16)).logits_RV.clone()
        step = model.forward(batch_of(tokens[:5], context=40, width=16)).logits_RV.clone()
        results.append(torch.cat([prefill, step]))
    assert all(torch.equal(results[0], other) for other in results[1:])
