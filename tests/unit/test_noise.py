"""Noise is a pure function of its key: same bits in every implementation, batch and order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.contracts import Stream
from outrider.noise import GAMMA, draw_key, gumbel, mix, uniform, uniforms, uniforms_numpy

CPU = torch.device("cpu")
keys = st.integers(0, 2**64 - 1)


@given(keys, st.integers(1, 300))
def test_scalar_numpy_and_torch_give_the_same_bits(key: int, size: int) -> None:
    expected = uniforms_numpy(key, size)
    assert np.array_equal(uniforms([key], size, CPU)[0].numpy(), expected)
    i = size - 1
    bits = mix(key + (i + 1) * GAMMA) >> 32
    scalar = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32)
    assert expected[i] == min(scalar, np.float32(1 - 2.0**-24))


@given(st.lists(keys, min_size=1, max_size=5))
def test_a_row_does_not_depend_on_its_batch(batch: list[int]) -> None:
    together = gumbel(batch, 50, CPU)
    for row, key in enumerate(batch):
        assert torch.equal(together[row], gumbel([key], 50, CPU)[0])


def test_every_part_of_the_key_matters() -> None:
    base = (7, 0, 100, Stream.TARGET)
    others = [
        (8, 0, 100, Stream.TARGET),
        (7, 1, 100, Stream.TARGET),
        (7, 0, 101, Stream.TARGET),
        *((7, 0, 100, stream) for stream in Stream if stream is not Stream.TARGET),
    ]
    assert len({draw_key(*k) for k in [base, *others]}) == len(others) + 1


def test_negative_and_huge_seeds_are_keys_too() -> None:
    assert draw_key(-1, 0, 0, Stream.TARGET) == draw_key(2**64 - 1, 0, 0, Stream.TARGET)


def test_gumbels_are_finite_whatever_the_bits() -> None:
    # The largest uniform is capped below 1 and the smallest is above 0.
    extremes = torch.tensor([0.5 * 2.0**-32, 1 - 2.0**-24])
    assert torch.isfinite(-torch.log(-torch.log1p(-extremes))).all()


@pytest.mark.parametrize("stream", list(Stream))
def test_uniform_law_over_tokens_and_over_positions(stream: Stream) -> None:
    over_tokens = uniforms_numpy(draw_key(1, 0, 5, stream), 50_000)
    over_positions = [uniform(draw_key(1, 0, position, stream)) for position in range(20_000)]
    for sample in (over_tokens, over_positions):
        assert stats.kstest(sample, "uniform").pvalue > 1e-3


def test_gumbel_argmax_draws_the_law() -> None:
    p = np.array([0.5, 0.25, 0.15, 0.1])
    noise = gumbel([draw_key(3, 0, i, Stream.TARGET) for i in range(20_000)], 4, CPU)
    draws = (torch.from_numpy(np.log(p)) + noise).argmax(dim=1).numpy()
    observed = np.bincount(draws, minlength=4)
    assert stats.chisquare(observed, p * len(draws)).pvalue > 1e-3
