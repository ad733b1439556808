"""Runs a model without the engine: a few sequences, their block tables, one ragged pass at a time.

It neither shares nor evicts blocks and has no scheduler, so that every error and every measured
time belongs to the model. The self-check and the tests of models use it.

Shape legend: T tokens of the pass, n tokens of one sequence in it, V vocabulary, H hidden.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.contracts import IntArray, Model, StepBatch


@dataclass(slots=True)
class Pass:
    """The results of one pass, by sequence."""

    logits: dict[str, torch.Tensor]  # [n, V]
    taps: dict[int, dict[str, torch.Tensor]]  # layer -> [n, H]


class Driver:
    """Sequences by name over a model's KV store, which it allocates.

    `seed` shuffles the order in which blocks are allocated; None keeps the blocks of a single
    sequence contiguous.
    """

    def __init__(
        self, model: Model, *, num_blocks: int = 64, block_size: int = 4, seed: int | None = None
    ) -> None:
        self.model = model
        self.block_size = block_size
        self._free = list(range(num_blocks))[::-1]
        if seed is not None:
            random.Random(seed).shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        model.allocate(num_blocks, block_size)

    def forward(
        self,
        tokens: Mapping[str, Sequence[int]],
        parents: Mapping[str, Sequence[int]] | None = None,
        *,
        taps: tuple[int, ...] = (),
        exit_layer: int | None = None,
    ) -> Pass:
        """One pass over new tokens of some sequences, with logits for all tokens.

        `parents` gives the trees, as in `StepBatch.parents_T`; sequences without parents are
        chains. Call `keep` to commit tokens.
        """
        batch = self.batch(tokens, parents, taps=taps, exit_layer=exit_layer)
        output = self.model.forward(batch)
        spans = {
            name: slice(int(batch.starts_S1[i]), int(batch.starts_S1[i + 1]))
            for i, name in enumerate(tokens)
        }
        return Pass(
            logits={name: output.logits_RV[span].clone() for name, span in spans.items()},
            taps={
                layer: {name: tap_TH[span].clone() for name, span in spans.items()}
                for layer, tap_TH in output.taps.items()
            },
        )

    def batch(
        self,
        tokens: Mapping[str, Sequence[int]],
        parents: Mapping[str, Sequence[int]] | None = None,
        *,
        taps: tuple[int, ...] = (),
        exit_layer: int | None = None,
    ) -> StepBatch:
        """The StepBatch of such a pass; allocates the blocks it needs."""
        flat: list[int] = []
        positions: list[int] = []
        above: list[int] = []
        starts = [0]
        for name, new in tokens.items():
            own = list((parents or {}).get(name) or range(-1, len(new) - 1))
            self._reserve(name, len(new))
            depths: list[int] = []
            for parent in own:
                depths.append(0 if parent < 0 else depths[parent] + 1)
            flat += new
            positions += [self._lengths[name] + depth for depth in depths]
            above += own
            starts.append(len(flat))
        width = max(len(self._tables[name]) for name in tokens)
        tables = [self._tables[n] + [-1] * (width - len(self._tables[n])) for n in tokens]
        return StepBatch(
            tokens_T=_int32(flat),
            positions_T=_int32(positions),
            starts_S1=_int32(starts),
            context_S=_int32([self._lengths[name] for name in tokens]),
            tables_SW=_int32(tables),
            logit_rows_R=_int32(list(range(len(flat)))),
            parents_T=_int32(above) if parents else None,
            taps=taps,
            exit_layer=exit_layer,
        )

    def skip(self, name: str, num_tokens: int) -> None:
        """Commits tokens with whatever keys and values are stored: to measure long texts."""
        self._reserve(name, num_tokens)
        self._lengths[name] += num_tokens

    def keep(self, name: str, path: Sequence[int]) -> None:
        """Commits nodes `path` of the sequence's last pass, root first; drops the others."""
        length = self._lengths[name]
        if list(path) != list(range(len(path))):
            slots = [length + node for node in path]
            self.model.copy_slots(
                self._physical(name, slots),
                self._physical(name, range(length, length + len(slots))),
            )
        self._lengths[name] = length + len(path)

    def release(self, name: str) -> None:
        """Forgets a sequence and frees its blocks."""
        self._free += self._tables.pop(name)
        del self._lengths[name]

    def _physical(self, name: str, slots: Sequence[int]) -> IntArray:
        table, size = self._tables[name], self.block_size
        return _int32([table[slot // size] * size + slot % size for slot in slots])

    def _reserve(self, name: str, num_new: int) -> None:
        table = self._tables.setdefault(name, [])
        need = self._lengths.setdefault(name, 0) + num_new
        while len(table) * self.block_size < need:
            table.append(self._free.pop())


def _int32(values: Sequence[int] | list[list[int]]) -> IntArray:
    return np.array(values, dtype=np.int32)


def one_token() -> StepBatch:
    """The smallest pass: token 0 at position 0 of block 0."""
    zero = _int32([0])
    return StepBatch(
        tokens_T=zero,
        positions_T=zero,
        starts_S1=_int32([0, 1]),
        context_S=zero,
        tables_SW=_int32([[0]]),
        logit_rows_R=zero,
    )
