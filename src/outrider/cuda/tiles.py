"""Tile sizes of the products: measured on an H200, cut down to the shared memory of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WIDE = 16384  # outputs; the inputs of a product with more outputs are never split


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is split: weight rows and inputs per step, programs that share a tile."""

    rows: int
    inputs: int
    split: int = 1
    warps: int = 4
    stages: int = 4


class Shape(NamedTuple):
    """The shape of a product; `rounded`: with int8 weights."""

    outputs: int
    inputs: int
    gated: bool = False
    rounded: bool = False


def usual_tiles(shape: Shape) -> Tiles:
    """About one program per processor of an H200, if the shape is large enough for that.

    Measured by `benchmarks/gpu_decode.py`. Too large tiles cost less than too many programs.
    """
    num_outputs, num_inputs, gated, rounded = shape
    inputs = min(256, max(16, power_of_two(num_inputs // 2)))
    if rounded:
        if num_outputs > WIDE:
            return Tiles(64, inputs, stages=3)
        if gated:
            return Tiles(32, inputs, stages=3)
        if num_outputs > 5000:
            return Tiles(32, min(512, 2 * inputs), 2, stages=3)
        return Tiles(32, inputs, 4, stages=3 if num_inputs <= 4096 else 4)
    if gated:
        return Tiles(128, min(128, inputs), stages=3)
    if num_outputs > WIDE:
        return Tiles(128, inputs, stages=3)
    if num_outputs > 5000:
        return Tiles(64, inputs)
    if num_inputs <= 4096:
        return Tiles(64 if num_outputs > 2048 else 32, min(512, 2 * inputs), 2, stages=3)
    return Tiles(64 if num_outputs > 2048 else 32, inputs, 2)


def fitting(
    tiles: Tiles, block: int, gated: bool, itemsize: int, memory: int, *, rounded: bool = False
) -> tuple[int, int]:
    """The inputs per step and the stages that fit the shared memory of a processor."""
    inputs, stages = tiles.inputs, tiles.stages if block == 16 else 3
    rows = tiles.rows * (1 + gated)

    def need() -> int:
        wide = block >= 64
        buffers = stages if wide else stages - 1  # wide instructions read them later
        size = (rows * (1 if rounded else itemsize) + block * itemsize) * buffers
        if rounded and wide:
            size += rows * itemsize  # ... and read them from shared memory only
        return size * inputs

    while need() > memory and inputs > 16:
        if inputs > 64 or stages == 2:
            inputs //= 2
        else:
            stages -= 1
    return inputs, stages


def power_of_two(x: int) -> int:
    """The smallest power of two that is at least x."""
    return 1 << (x - 1).bit_length() if x > 1 else 1
