"""Random ragged steps: the native engine against the torch decoder, and against itself.

Histories of several sequences with trees, partial commits and shuffled blocks of any size go
through both models; logits agree to 1e-4 and pick the same token wherever the choice is clear.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from native_models import ODD, needs_native
from outrider.model.driver import Driver
from outrider.model.native_decoder import NativeDecoder
from outrider.model.torch_decoder import TorchDecoder
from tiny_models import path_to, write

pytestmark = needs_native
VOCAB = ODD["vocab_size"]
History = list[dict[str, tuple[list[int], list[int], int]]]
token = st.integers(0, VOCAB - 1)


@lru_cache(maxsize=1)
def models() -> tuple[NativeDecoder, TorchDecoder]:
    config = transformers.Qwen2Config(
        **ODD, use_sliding_window=True, sliding_window=11, max_window_layers=1
    )
    folder = write(Path(mkdtemp()), config)
    return NativeDecoder.load(folder, threads=2), TorchDecoder.load(folder)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """New tokens of one sequence and their parents."""
    tokens = draw(st.lists(token, min_size=1, max_size=14))
    if draw(st.booleans()):
        return tokens, list(range(-1, len(tokens) - 1))
    return tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))]


@st.composite
def steps(draw: st.DrawFn) -> History:
    """A history: per step, some sequences with nodes and the node whose path is then kept."""
    history = []
    for _ in range(draw(st.integers(1, 5))):
        names = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
        step = {}
        for name in names:
            tokens, parents = draw(nodes())
            step[name] = (tokens, parents, draw(st.integers(-1, len(tokens) - 1)))
        history.append(step)
    return history


def run(
    model: NativeDecoder | TorchDecoder, history: History, block_size: int, seed: int
) -> list[torch.Tensor]:
    driver = Driver(model, num_blocks=240 // block_size + 3, block_size=block_size, seed=seed)
    results = []
    for step in history:
        trees = any(parents != list(range(-1, len(parents) - 1)) for _, parents, _ in step.values())
        out = driver.forward(
            {name: tokens for name, (tokens, _, _) in step.items()},
            {name: parents for name, (_, parents, _) in step.items()} if trees else None,
            taps=(1,),
        )
        results += [*out.logits.values(), *out.taps[1].values()]
        for name, (_, parents, kept) in step.items():
            driver.keep(name, path_to(parents, kept) if kept >= 0 else [])
    return results


@settings(max_examples=60)
@given(steps(), st.sampled_from([1, 2, 5, 8, 16, 24]), st.integers(0, 9))
def test_agrees_with_the_torch_decoder(history: History, block_size: int, seed: int) -> None:
    ours, theirs = models()
    for a, b in zip(
        run(ours, history, block_size, seed), run(theirs, history, 4, seed + 1), strict=True
    ):
        assert float((a - b).abs().max()) < 1e-4
        top = b.topk(2).values
        clear = top[:, 0] - top[:, 1] > 1e-4
        assert torch.equal(a.argmax(-1)[clear], b.argmax(-1)[clear])


@settings(max_examples=40)
@given(steps(), st.sampled_from([1, 3, 16]), st.sampled_from([4, 7, 32]), st.integers(0, 9))
def test_layout_cannot_be_seen(history: History, first: int, second: int, seed: int) -> None:
    ours, _ = models()
    for a, b in zip(
        run(ours, history, first, seed), run(ours, history, second, seed + 1), strict=True
    ):
        assert torch.equal(a, b)
