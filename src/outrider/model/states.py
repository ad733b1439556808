"""The states of recurrent layers in torch: one store for a model, one plan for a pass.

`outrider.kv.states` explains which states are kept, and where. This module has the tensors, finds
for each token of a pass the state before it, and runs convolutions and recurrences of all
sequences of a pass together, token by token: results do not depend on how a text is cut in passes,
apart from the rounding of the products around them. Nodes of a tree start from the state of their
parent.

Shape legend: S sequences, T tokens of the pass, n tokens of one level (at the same depth of their
sequences), R rows of the store, C channels of a convolution, W its width, M.. the shape of a
recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from outrider.contracts import IntArray, StepBatch
from outrider.kv.states import ZEROS, StateRows
from outrider.model.families.mixers import Mixer

MOST_KEPT = 64  # states of one sequence's pass: those of its last tokens with logits
_LEAST_BYTES = 1 << 28  # of checkpoints
_RECENT_BYTES = 1 << 26  # of the last passes, if these are not more
_REPLAYED = 512  # tokens of one pass that computes lost states again

Advance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Level:
    """The tokens of a pass at one depth."""

    tokens: torch.Tensor  # [n]
    parents: torch.Tensor | None  # [n]: rows of the level above; None: the same rows
    kept: torch.Tensor | None  # rows of this level whose state is kept,
    rows: torch.Tensor | None  # and where in the store


class StatePass:
    """One pass: what its recurrent layers read and write. `at` counts the recurrent layers."""

    def __init__(
        self,
        tails: torch.Tensor,
        matrices: torch.Tensor,
        starts: list[int],
        owners: list[int],
        parents: list[int],
        kept: dict[int, int],
    ) -> None:
        """`starts`: a row for each sequence. For each token its sequence, and its parent as an
        index in the pass (-1: the sequence's start). `kept`: token -> row for its state.
        """
        self._tails, self._matrices = tails, matrices
        self._device = tails.device
        self._starts = self._index(starts)
        before = tails.shape[2]
        first = len(starts) * before  # the tails of the starts come before the tokens
        windows = np.empty((len(parents), before + 1), np.int64)
        for t, (owner, parent) in enumerate(zip(owners, parents, strict=True)):
            if parent < 0:
                windows[t, :-1] = range(owner * before, (owner + 1) * before)
            else:
                windows[t, :-1] = windows[parent, 1:]
            windows[t, -1] = first + t
        self._windows_WT = torch.from_numpy(windows.T.copy()).to(self._device)
        self._kept = self._index(list(kept))
        self._rows = self._index(list(kept.values()))
        self._levels = list(self._by_depth(owners, parents, kept))

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _by_depth(
        self, owners: list[int], parents: list[int], kept: dict[int, int]
    ) -> Iterator[_Level]:
        if not self._matrices.numel():
            return
        depths: list[int] = []
        levels: list[list[int]] = []
        places: list[int] = []
        for t, parent in enumerate(parents):
            depth = 0 if parent < 0 else depths[parent] + 1
            depths.append(depth)
            if depth == len(levels):
                levels.append([])
            places.append(len(levels[depth]))
            levels[depth].append(t)
        width = len(self._starts)
        for tokens in levels:
            above = [owners[t] if parents[t] < 0 else places[parents[t]] for t in tokens]
            keeps = [i for i, t in enumerate(tokens) if t in kept]
            yield _Level(
                self._index(tokens),
                None if above == list(range(width)) else self._index(above),
                self._index(keeps) if keeps else None,
                self._index([kept[tokens[i]] for i in keeps]) if keeps else None,
            )
            width = len(tokens)

    def convolve(
        self, at: int, x_TC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, C] float32: each channel's weights times its last W inputs, the newest last."""
        tails_RWC = self._tails[at]
        all_C = torch.cat([tails_RWC[self._starts].flatten(0, 1), x_TC.float()])
        sums = torch.zeros_like(x_TC, dtype=torch.float32)
        for index_T, weight_C in zip(self._windows_WT, weight_CW.t(), strict=True):
            sums.addcmul_(all_C[index_T], weight_C)
        if len(self._kept):
            tails_RWC[self._rows] = all_C[self._windows_WT[1:, self._kept].t()]
        return sums if bias_C is None else sums.add_(bias_C)

    def recur(self, at: int, advance: Advance, out: torch.Tensor) -> torch.Tensor:
        """Fills `out`, [T, ...]: `advance(state, tokens)` changes [n, M..] in place by the tokens
        and returns their output.
        """
        store_RM = self._matrices[at]
        state_nM = store_RM[self._starts]
        for level in self._levels:
            if level.parents is not None:
                state_nM = state_nM[level.parents]
            out[level.tokens] = advance(state_nM, level.tokens)
            if level.rows is not None:
                store_RM[level.rows] = state_nM[level.kept]
        return out


class States:
    """The state store of a decoder with `num_layers` layers that have a state."""

    def __init__(
        self,
        mixer: Mixer,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_bytes: int,
        device: torch.device,
    ) -> None:
        """`kv_bytes`: those of a token; checkpoints take about as much memory as the KV."""
        self._tail = (mixer.width - 1, mixer.channels)
        self._matrix = mixer.matrix
        self._num_layers, self._device, self._block_size = num_layers, device, block_size
        numbers = mixer.channels * (mixer.width - 1) + int(np.prod(self._matrix or (0,)))
        self.bytes_per_state = 4 * num_layers * numbers
        room = max(kv_bytes * num_blocks * block_size, _LEAST_BYTES)
        num_checkpoints = 2 + min(num_blocks, room // self.bytes_per_state)
        # Only every so many-th block end of a text is a checkpoint, and the last one.
        self._stride = -(-num_blocks // num_checkpoints)
        least = min(64, 2 + _RECENT_BYTES // self.bytes_per_state)
        self.rows = StateRows(num_checkpoints + least, block_size, least)
        self.tails, self.matrices = self._empty(self.rows.num_rows)
        self.tails[:, ZEROS] = 0
        self.matrices[:, ZEROS] = 0
        self._tokens = np.zeros(num_blocks * block_size, np.int32)
        self.poison = False  # in tests: rows are NaN until a pass writes them
        self.num_replayed = 0  # tokens computed again because their state was gone

    def _empty(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory that the system provides when it is first written."""
        shapes = (self._num_layers, num_rows, *self._tail), (self._num_layers, num_rows)
        tails = torch.empty(shapes[0], device=self._device)
        return tails, torch.empty((*shapes[1], *(self._matrix or (0,))), device=self._device)

    def has_state(self, slot: int) -> bool:
        return slot in self.rows

    def copy_slots(self, source: IntArray, target: IntArray) -> None:
        self._tokens[target] = self._tokens[source]
        self.rows.move(source.tolist(), target.tolist())

    def begin(self, batch: StepBatch, run: Callable[[StepBatch], object]) -> StatePass:
        """The plan of a pass; `run` computes passes over texts whose state is gone."""
        contexts: list[int] = batch.context_S.tolist()
        owners, parents, slots, kept = self._layout(batch, contexts)
        missing = self.rows.num_missing(len(contexts), len(kept))
        if missing:
            self._grow(missing)
        befores = {s: self._slot(batch, s, contexts[s] - 1) for s in set(owners) if contexts[s] > 0}
        while lost := [s for s, slot in befores.items() if slot not in self.rows]:
            self._replay(batch, lost[0], contexts[lost[0]], run)
        self.rows.forget(slots)
        self._tokens[slots] = batch.tokens_T
        starts = [
            self.rows.row(befores[s]) if s in befores else ZEROS for s in range(len(contexts))
        ]
        taken = {t: self.rows.take(slots[t]) for t in kept}
        if self.poison:
            rows = list(taken.values())
            self.tails[:, rows] = torch.nan
            self.matrices[:, rows] = torch.nan
        return StatePass(self.tails, self.matrices, starts, owners, parents, taken)

    def _slot(self, batch: StepBatch, s: int, index: int) -> int:
        """The physical slot of a token of sequence s."""
        block, offset = divmod(index, self._block_size)
        return int(batch.tables_SW[s, block]) * self._block_size + offset

    def _layout(
        self, batch: StepBatch, contexts: list[int]
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Sequence, parent and slot of each token, and the tokens whose states are kept."""
        bounds: list[int] = batch.starts_S1.tolist()
        above = None if batch.parents_T is None else batch.parents_T.tolist()
        owners: list[int] = []
        parents: list[int] = []
        slots: list[int] = []
        kept: list[int] = []
        wanted = set(batch.logit_rows_R.tolist())
        size, stride = self._block_size, self._stride * self._block_size
        for s, context in enumerate(contexts):
            first, stop = bounds[s : s + 2]
            if first == stop:
                continue
            end = context + stop - first
            owners += [s] * (stop - first)
            slots += [self._slot(batch, s, i) for i in range(context, end)]
            own = range(-1, stop - first - 1) if above is None else above[first:stop]
            parents += [p if p < 0 else first + p for p in own]
            # A commit ends at a token with logits.
            keep = {stop - 1, *[t for t in range(first, stop) if t in wanted][-MOST_KEPT:]}
            # A repeat of this text continues from the last end of a block before its last token.
            ends = [*range(context // stride * stride + stride, end + 1, stride)]
            ends += [end // size * size, (end - 1) // size * size]
            keep |= {first + i - context - 1 for i in ends if i > context}
            kept += sorted(keep)
        return owners, parents, slots, kept

    def _grow(self, num_rows: int) -> None:
        old = self.rows.num_rows
        tails, matrices = self._empty(old + num_rows)
        tails[:, :old], matrices[:, :old] = self.tails, self.matrices
        self.tails, self.matrices = tails, matrices
        self.rows.add(num_rows)

    def _replay(
        self, batch: StepBatch, s: int, context: int, run: Callable[[StepBatch], object]
    ) -> None:
        """Computes the text before `context` again, from the last token with a state on."""
        slots = [self._slot(batch, s, i) for i in range(context)]
        found = self.rows.latest(slots)
        done = 0 if found is None else found + 1
        self.num_replayed += context - done
        while done < context:
            stop = min(context, done + _REPLAYED)
            run(
                StepBatch(
                    tokens_T=self._tokens[slots[done:stop]],
                    positions_T=np.arange(done, stop, dtype=np.int32),
                    starts_S1=np.array([0, stop - done], np.int32),
                    context_S=np.array([done], np.int32),
                    tables_SW=batch.tables_SW[s : s + 1],
                    logit_rows_R=np.array([stop - done - 1], np.int32),
                )
            )
            done = stop
