"""Any ragged pass of the compact decoder equals plain passes over each sequence alone."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.model.driver import Driver
from outrider.model.torch_decoder import TorchDecoder
from tiny_models import SMALL, path_to, worst, write


@functools.cache
def model() -> TorchDecoder:
    config = transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=11, max_window_layers=2
    )
    with tempfile.TemporaryDirectory() as folder:
        return TorchDecoder.load(write(Path(folder), config))


@functools.cache
def plain(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits of the last token, from one pass over all of them."""
    return Driver(model(), block_size=16).forward({"only": list(tokens)}).logits["only"][-1]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A context, new tokens and their parents (a chain, or any tree)."""
    token = st.integers(0, 63)
    context = draw(st.lists(token, max_size=20))
    new = draw(st.lists(token, min_size=1, max_size=9))
    if draw(st.booleans()):
        return context, new, list(range(-1, len(new) - 1))
    return context, new, [draw(st.integers(-1, i - 1)) for i in range(len(new))]


@settings(max_examples=25)
@given(
    batch=st.lists(sequences(), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 8, 16]),
    seed=st.integers(0, 9) | st.none(),
)
def test_ragged_pass(
    batch: list[tuple[list[int], list[int], list[int]]], block_size: int, seed: int | None
) -> None:
    expected = [
        torch.stack(
            [plain((*context, *(new[i] for i in path_to(parents, n)))) for n in range(len(new))]
        )
        for context, new, parents in batch
    ]
    driver = Driver(model(), num_blocks=200, block_size=block_size, seed=seed)
    contexts = {str(i): context for i, (context, _, _) in enumerate(batch) if context}
    if contexts:
        driver.forward(contexts)
        for name, context in contexts.items():
            driver.keep(name, range(len(context)))
    got = driver.forward(
        {str(i): new for i, (_, new, _) in enumerate(batch)},
        {str(i): parents for i, (_, _, parents) in enumerate(batch)},
    )
    for i, rows in enumerate(expected):
        assert worst(got.logits[str(i)], rows) < 1e-4
