"""The native sampler and noise against their definitions in NumPy, on every instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from native_models import ISAS, needs_native
from outrider import native
from outrider.noise import gumbel, mix, uniforms_numpy
from outrider.proposers.trees import best_children
from outrider.sampling import RowParams

pytestmark = needs_native
Floats = npt.NDArray[np.float32]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_ISA", request.param)
    return str(request.param)


def kept(row: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, spelled out: who survives top-k, then top-p, then min-p."""
    z = (row / np.float32(temperature)).astype(np.float64)
    greater = z[None, :] > z[:, None] if top_k > 0 or top_p < 1 else np.zeros((1, 1), bool)
    alive = greater.sum(1) < top_k if top_k > 0 else np.ones(len(z), bool)
    mass = np.where(alive, np.exp(z - z.max()), 0.0)
    if top_p < 1:
        alive &= greater @ mass < top_p * mass.sum()
    peak = mass[alive].max()
    return set(np.flatnonzero(alive & (mass >= min_p * peak)).tolist())


def draw(row: Floats, key: int, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    noise = gumbel([key], len(row), torch.device("cpu"))[0].numpy()
    score = row / np.float32(temperature) + noise
    alive = sorted(kept(row, temperature, top_k, top_p, min_p))
    return alive[int(np.argmax(score[alive]))]


def sample(
    rows: Floats,
    keys: list[int],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    **options: int,
) -> list[int]:
    count = len(rows)
    return native.sample_rows(
        torch.from_numpy(rows),
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
        np.full(count, min_p, np.float32),
        np.array(keys, np.uint64),
        **options,
    )


@pytest.mark.parametrize("size", [1, 15, 16, 17, 100, 523])
def test_definition(size: int) -> None:
    rng = np.random.default_rng(size)
    rows = (rng.standard_normal((12, size)) * 3).astype(np.float32)
    rows[3] = np.round(rows[3])  # many ties
    keys = [mix(int(k)) for k in rng.integers(0, 1 << 62, size=12)]
    for temperature, top_k, top_p, min_p in [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (0.8, 0, 0.3, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.5, 40, 0.95, 0.02),
        (1.0, 7, 0.8, 0.3),
        (1.0, 10_000, 0.999, 1.0),
    ]:
        got = sample(rows, keys, temperature, top_k, top_p, min_p)
        expected = [
            draw(row, key, temperature, top_k, top_p, min_p)
            for row, key in zip(rows, keys, strict=True)
        ]
        assert got == expected, (temperature, top_k, top_p, min_p)


def test_exactly_the_kept_tokens_can_be_drawn() -> None:
    """With many keys every survivor comes up, and nothing else."""
    row = np.array([2.0, 1.0, 1.0, 0.5, 0.0, -1.0], np.float32)
    rows = np.repeat(row[None], 4000, axis=0)
    keys = [mix(i) for i in range(4000)]
    for filters in [
        (2, 1.0, 0.0),
        (3, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.45, 0.0),
        (0, 0.9, 0.0),
        (0, 1.0, 0.3),
        (4, 0.8, 0.2),
    ]:
        assert set(sample(rows, keys, 1.0, *filters)) == kept(row, 1.0, *filters), filters


def test_greedy_takes_the_first_of_equals() -> None:
    rng = np.random.default_rng(0)
    rows = np.round(rng.standard_normal((20, 300)) * 2).astype(np.float32)
    assert sample(rows, [0] * 20, 0.0) == rows.argmax(-1).tolist()


def test_padding_and_banned_tokens_are_never_drawn() -> None:
    rows = np.zeros((500, 40), np.float32)
    rows[:, 33:] = 50.0
    rows[:, :20] = -np.inf
    keys = [mix(i) for i in range(500)]
    drawn = set(sample(rows, keys, 1.0, num_tokens=33))
    assert drawn == set(range(20, 33))
    assert set(sample(rows, keys, 1.0, 5, 0.9, 0.1, num_tokens=33)) <= drawn
    assert sample(rows[:1], keys[:1], 0.0, num_tokens=33) == [20]


def test_law() -> None:
    """Frequencies over many keys agree with the softmax."""
    row = np.array([1.0, 0.0, -1.0, 2.0, 0.5], np.float32)
    count = 40_000
    tokens = sample(np.repeat(row[None], count, axis=0), [mix(i) for i in range(count)], 0.9)
    z = np.exp(row.astype(np.float64) / 0.9)
    expected = z / z.sum() * count
    chi2 = float((((np.bincount(tokens, minlength=5)) - expected) ** 2 / expected).sum())
    assert chi2 < 23.5  # four degrees of freedom, one in ten thousand


def test_large_and_hostile_rows() -> None:
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((9, 40_000)) * 4).astype(np.float32)  # split over the pool
    keys = [mix(i) for i in range(9)]
    for key, row, token in zip(keys, rows, sample(rows, keys, 1.0), strict=True):
        assert token == draw(row, key, 1.0, 0, 1.0, 0.0)
    for fill in (np.inf, -np.inf, 3e38, -3e38, 0.0):
        bad = np.full((1, 50), fill, np.float32)
        for filters in [(0, 1.0, 0.0), (3, 0.5, 0.1)]:
            assert 0 <= sample(bad, [7], 0.5, *filters)[0] < 50


def test_a_row_with_a_nan_has_no_draw() -> None:
    rows = np.array([[0.0, 1.0, 2.0], [np.nan, 1.0, 5.0], [3.0, 1.0, np.nan]], np.float32)
    for temperature in (0.0, 1.0):
        tokens = sample(rows, [7, 8, 9], temperature)
        assert tokens[0] >= 0
        assert tokens[1:] == [-1, -1]


def test_wrong_arguments() -> None:
    rows = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="temperature"):
        sample(rows, [1, 2], -1.0)
    with pytest.raises(ValueError, match="temperature"):
        sample(rows, [1, 2], float("nan"))
    with pytest.raises(ValueError, match="vocabulary"):
        sample(rows, [1, 2], 1.0, num_tokens=9)
    with pytest.raises(ValueError, match="rows"):
        sample(rows, [1], 1.0)
    assert sample(rows[:0], [], 1.0) == []


def test_noise() -> None:
    for key in (0, 1, mix(5), (1 << 64) - 1):
        assert np.array_equal(native.uniforms(key, 5000), uniforms_numpy(key, 5000))
        u = uniforms_numpy(key, 5000)
        inner = (-np.log1p(-u.astype(np.float64))).astype(np.float32)
        exact = (-np.log(inner.astype(np.float64))).astype(np.float32)
        assert np.array_equal(native.gumbel(key, 5000), exact)
        theirs = gumbel([key], 5000, torch.device("cpu"))[0].numpy()
        assert np.abs(native.gumbel(key, 5000) - theirs).max() < 1e-5


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_guesses_are_the_likeliest_draws(
    isa: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition in torch, filters included; fewer left than asked for: -1."""
    count, vocab = 9, 1003
    generator = np.random.default_rng(3)
    logits = torch.from_numpy((generator.standard_normal((count, vocab)) * 3).astype(np.float32))
    rows = RowParams(
        np.full(count, temperature, np.float32),
        np.array([0, 0, 0, 3, 40, 1, 0, 0, 0], np.int32),
        np.array([1, 0.9, 1, 1, 0.5, 1, 1, 0.3, 1], np.float32),
        np.array([0, 0, 0.05, 0, 0, 0, 0.3, 0, 0], np.float32),
    )
    keys = [mix(i) for i in range(count)]
    tokens, scores = best_children(logits, rows, keys, 5)
    monkeypatch.setattr(native, "available", lambda: False)
    expected, logs = best_children(logits, rows, keys, 5)
    for row in range(count):
        size = sum(log > -np.inf for log in logs[row])
        assert tokens[row][:size] == expected[row][:size]
        assert np.allclose(scores[row][:size], logs[row][:size], atol=1e-3)
        if temperature:
            assert tokens[row][size:] == [-1] * (5 - size)
