"""Counter-based noise: the same number for the same (seed, sample, position, stream), always.

A draw must not depend on the batch, the step width or how often anything was drawn before, so
there is no generator state. A *key* names one draw, and element i of its noise is output i of
the SplitMix64 sequence that starts at the key: random access, eight integer operations, and
trivially the same in NumPy, torch, C++ and Triton.

    sequence_key = mix(mix(mix(seed) + sample_index) + stream)     once per sequence
    key          = mix(sequence_key + position)                    once per draw
    bits(i)      = mix(key + (i + 1) * GAMMA)                      once per token id
    u(i)         = min(((bits(i) >> 32) + 0.5) * 2^-32, 1 - 2^-24)  in float32
    gumbel(i)    = -log(-log1p(-u(i)))                             in float32

u resolves the interesting end (small u: large Gumbel) to 2^-32, and the cap keeps every Gumbel
finite, so that a token with finite logit always beats a masked one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import Stream

_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def mix(x: int) -> int:
    """SplitMix64's output function on one 64-bit integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _M1) & _MASK
    x = ((x ^ (x >> 27)) * _M2) & _MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=4096)
def sequence_key(seed: int, sample_index: int, stream: Stream) -> int:
    return mix(mix(mix(seed) + sample_index) + int(stream))


def draw_key(seed: int, sample_index: int, position: int, stream: Stream) -> int:
    return mix(sequence_key(seed, sample_index, stream) + position)


def uniform(key: int, lane: int = 0) -> float:
    """One uniform in [0, 1) with 53 bits; `lane` separates several decisions of one key."""
    return (mix(key + (lane + 1) * GAMMA) >> 11) * 2.0**-53


def uniforms_numpy(key: int, size: int) -> npt.NDArray[np.float32]:
    """u(0..size-1) as defined above; the reference for every other implementation."""
    x = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    x = (x ^ (x >> np.uint64(31))) >> np.uint64(32)
    u = (x.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    capped: npt.NDArray[np.float32] = np.minimum(u, np.float32(1 - 2.0**-24))
    return capped


def _signed(x: int) -> int:
    """The int64 with the same bits: torch has no full uint64 arithmetic."""
    return x - (1 << 64) if x >= 1 << 63 else x


@lru_cache(maxsize=16)
def _offsets(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(GAMMA)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """`mix` of int64 tensors, which wrap around like unsigned ones."""
    x = (x ^ _shift(x, 30)) * _signed(_M1)
    x = (x ^ _shift(x, 27)) * _signed(_M2)
    return x ^ _shift(x, 31)


def draw_keys(sequence_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`draw_key` for tensors: int64 with the bits of the keys."""
    return _mixed(sequence_keys + positions)


def as_signed(keys: list[int], device: torch.device) -> torch.Tensor:
    """Keys as int64 with the same bits."""
    return torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)


def uniforms(keys: list[int], size: int, device: torch.device) -> torch.Tensor:
    """[len(keys), size] float32: row r holds u of keys[r]."""
    return _uniforms(as_signed(keys, device), size)


def _uniforms(keys: torch.Tensor, size: int) -> torch.Tensor:
    x = _shift(_mixed(_offsets(size, keys.device) + keys[:, None]), 32)
    return x.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def gumbel(keys: list[int], size: int, device: torch.device) -> torch.Tensor:
    """[len(keys), size] float32 standard Gumbel noise."""
    return gumbel_of(as_signed(keys, device), size)


def gumbel_of(keys: torch.Tensor, size: int) -> torch.Tensor:
    """The same for keys on the device, as int64."""
    return _uniforms(keys, size).neg_().log1p_().neg_().log_().neg_()
