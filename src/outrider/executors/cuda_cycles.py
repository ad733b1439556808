"""Cycles on the device for the CUDA executor: draft loop, verifying pass, verdict, next inputs.

A cycle of a batch is two graph launches, so that its parts can be timed. The host reads what a
cycle emitted while later cycles run: it decides when to stop, nothing else. A rejected draft costs
no rollback: its slots are written again. If another request or draft length comes between, the
cycles start anew from where the sequences stand.

A pass over sixteen tokens hardly takes longer than one over five. So beside a chain of drafts, the
runners-up of its draws are verified too. For about half of the rejected drafts, a runner-up is the
target's draw, and then the draw after it counts as well.

Shape legend: S sequences, W pages a sequence may have.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from outrider.contracts import IntArray, StepBatch
from outrider.cuda.inputs import MAX_TOKENS, make_event
from outrider.cuda.ops import MAX_WIDTH, Pass
from outrider.draft_plans import Chain
from outrider.executors.planned import Decoding
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.cuda_eagle3 import CudaEagle3

MOST_OTHERS = 2  # runners-up of a draft
IN_FLIGHT = 2  # cycles


@dataclass(slots=True)
class Landed:
    """What a cycle did, by sequence."""

    chains: list[list[int]]  # drafts
    emitted: list[list[int]]  # accepted drafts, and the target's token after them
    num_own: list[int]  # drafts whose K/V the drafter may hold
    draft_s: float
    pass_s: float
    is_sound: bool  # no row was NaN


class _Flight:
    """A cycle in flight: its report, and the times of its parts."""

    features_SKF: torch.Tensor | None = None  # of emitted tokens, if a head drafts

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._events = [make_event(timing=True) for _ in range(3)] if on_gpu else []
        self._times = [0.0] * 3

    def mark(self, part: int) -> None:
        if self._events:
            self._events[part].record()
        else:
            self._times[part] = perf_counter()

    def seconds(self) -> tuple[float, float]:
        """Seconds of drafting and of verifying; waits until both are done."""
        if self._events:
            first, second, third = self._events
            third.synchronize()
            return first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3
        first_s, second_s, third_s = self._times
        return second_s - first_s, third_s - second_s


class Cycles:
    """Cycles of `num_sequences` and `num_drafts`: their buffers, made once.

    Fewer sequences may run in them: the other places compute padding and write no slots.
    """

    def __init__(
        self,
        target: CudaDecoder,
        draft: CudaDecoder | None,
        num_sequences: int,
        num_drafts: int,
        num_others: int,
    ) -> None:
        self.target, self.draft = target, draft
        self.head = draft if isinstance(draft, CudaEagle3) else None
        self.num_sequences, self.num_drafts = num_sequences, num_drafts
        self.num_others = num_others
        self.width = 1 + num_drafts * (1 + num_others)
        size = num_sequences * (2 * num_drafts + 3)
        self._out = torch.zeros(size, dtype=torch.int32, device=target.device)
        self._report, self._chains = self._parts(self._out)
        self._moves = torch.zeros(num_sequences, 2, dtype=torch.int32, device=target.device)
        self._flights = [_Flight(size, target.device) for _ in range(IN_FLIGHT)]
        if self.head is not None:
            rows = self.head.features[: self._head_rows]
            for flight in self._flights:
                flight.features_SKF = torch.empty_like(rows).view(num_sequences, num_drafts + 1, -1)
        self._launched = self._landed = 0
        self._step_s = 0.0
        self._handed: tuple[int, float] | None = None  # steps of the last call, and when it ended
        self.most_steps = 1 << 30  # the most for one call
        self._course: _Course | None = None
        self.empty(2)
        self.launch()  # captures the graphs, off the policy's clock

    @property
    def in_flight(self) -> int:
        return self._launched - self._landed

    @property
    def _head_rows(self) -> int:
        """The rows of the first pass of a head's draft."""
        return self.num_sequences * (self.num_drafts + 1)

    @property
    def _models(self) -> list[CudaDecoder]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def empty(self, length: int) -> None:
        """Padding in place of sequences of `length` tokens."""
        for model in self._models:
            host = self._clear(model)
            host["committed"][: self.num_sequences] = length
            if model is self.head:
                rows, sequences = self._head_rows, slice(self.num_sequences)
                host["tokens"][:rows] = host["masks"][:rows] = 0
                host["positions"][:rows], host["slots"][:rows] = length, -1
                host["contexts"][sequences] = host["lengths"][sequences] = length
            model.inputs.send(self.num_sequences)
        self._course = None

    def _clear(self, model: CudaDecoder) -> dict[str, Any]:
        """A model's inputs, with padding in every place."""
        model.inputs.wait()
        host, size = model.inputs.host, self.num_sequences
        host["tables"].reshape(MAX_TOKENS, -1)[:size] = -1
        host["temperature"][: size * self._num_rows(model)] = 0.0
        host["committed"][:size] = 2
        host["secrets"][:size] = 0
        return host

    def _num_rows(self, model: CudaDecoder) -> int:
        return 1 if model is self.draft else self.width

    def set(self, batch: Decoding) -> None:
        """Sets both models and the state to the sequences' current tokens."""
        count = len(batch.last_S)
        for model in self._models:
            if isinstance(model, CudaEagle3):
                bucket = (self.num_sequences, self.num_drafts + 1)
                model.begin(catch_up_of(batch), bucket, batch.rows, np.array(batch.keys, np.uint64))
                continue
            host, width = self._clear(model), self._num_rows(model)
            tables = _tables(batch, model is self.draft)
            host["tables"].reshape(MAX_TOKENS, -1)[:count, : tables.shape[1]] = tables
            host["temperature"][: count * width] = np.repeat(batch.rows.temperature_R, width)
            host["committed"][:count] = np.array(batch.context_S, np.int32) + 1
            host["secrets"][:count] = np.array(batch.keys, np.uint64).view(np.int64)
            model.inputs.send(self.num_sequences)
        drafter = self.draft or self.target
        newest = np.array([batch.before_S, batch.last_S], np.int32).T.copy()
        drafter.line[:count, :2] = torch.from_numpy(newest).to(drafter.device)
        self._landed = self._launched
        self._course = _Course(batch, [model.inputs.num_changes for model in self._models])

    def resume(self, batch: Decoding) -> bool:
        """Whether the cycles in flight are the batch's next ones, with no change in between.

        Then they are kept, and later ones use the batch's tables. The time since the last call sets
        how many steps a call returns: while the host commits them, the device runs only the cycles
        in flight.
        """
        course, changes = self._course, [model.inputs.num_changes for model in self._models]
        if course is None or not self.in_flight or course.num_changes != changes:
            return False
        first = np.array(batch.context_S) + (self.in_flight - 1) * (self.num_drafts + 1)
        reaches = [
            (first + self.width)[:, None],
            (first + self.num_drafts + 1 - offset_S(batch))[:, None],
        ]
        if not course.leads_to(batch, reaches, self.target.block_size):
            return False
        if self._handed is not None:
            num_steps, ended = self._handed
            host_s = (perf_counter() - ended) / num_steps
            self.most_steps = 1 + int(IN_FLIGHT * self._step_s / host_s)
        for model in self._models:
            tables = _tables(batch, model is self.draft)
            model.inputs.wait()
            own = model.inputs.host["tables"].reshape(MAX_TOKENS, -1)
            own[: len(tables), : tables.shape[1]] = tables
            model.inputs.send_tables(self.num_sequences)
        self._course = _Course(batch, changes)
        return True

    def launch(self) -> None:
        flight = self._flights[self._launched % IN_FLIGHT]
        flight.mark(0)
        name = (self.num_sequences, self.num_drafts, self.num_others, id(self.draft))
        if self.draft is not None:
            self.target.replay(("cycle, draft", *name), self._draft)
        flight.mark(1)
        self.target.replay(("cycle, verify", *name), self._verify)
        flight.host.copy_(self._out, non_blocking=True)
        if self.head is not None and flight.features_SKF is not None:
            flight.features_SKF.flatten(0, 1).copy_(self.head.features[: self._head_rows])
        flight.mark(2)
        self._launched += 1

    def _draft(self) -> None:
        assert self.draft is not None
        draft_part(self.draft, self.num_sequences, self.num_drafts, self.num_others)
        self._chains.copy_(self.draft.line[: self.num_sequences, 2 : 2 + self.num_drafts])

    def _verify(self) -> None:
        where = self.target.inputs.at(self.num_sequences, self.width, self.num_others)
        verify_part(self.target, self.draft, where, self._report, self._moves)

    def _parts(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits a cycle's output into the `report` of `Ops.settle` and the drafts, by sequence."""
        split = self.num_sequences * (self.num_drafts + 3)
        report, chains = out[:split], out[split:]
        return report.view(self.num_sequences, -1), chains.view(self.num_sequences, self.num_drafts)

    def land(self, count: int) -> Landed:
        """Waits for the oldest cycle in flight; its results for the first `count` sequences."""
        flight = self._flights[self._landed % IN_FLIGHT]
        draft_s, pass_s = flight.seconds()
        self._landed += 1
        report, chains = (part[:count].tolist() for part in self._parts(flight.host))
        emitted, num_own = read_report(report, chains)
        self._step_s = draft_s + pass_s
        if self._course is not None:
            self._course.follow(emitted)
        is_sound = all(min(drawn) >= 0 for _, *drawn, _ in report)
        return Landed(chains, emitted, num_own, draft_s, pass_s, is_sound)

    def handed_over(self, num_steps: int) -> None:
        """Called when the host starts to commit `num_steps` steps."""
        self._handed = (num_steps, perf_counter()) if num_steps else None

    def features(self, index: int, num_rows: int) -> torch.Tensor | None:
        """Of a head: the features of what a sequence emitted in the last landed cycle."""
        features_SKF = self._flights[(self._landed - 1) % IN_FLIGHT].features_SKF
        return None if features_SKF is None else features_SKF[index, -num_rows:].clone()

    def abandon(self) -> None:
        """Forgets the cycles in flight: they have written slots that are not committed."""
        self._landed, self._course = self._launched, None


class _Course:
    """The last tokens and slots of a batch after the cycles that have landed."""

    def __init__(self, batch: Decoding, num_changes: list[int]) -> None:
        self.num_changes = num_changes
        self._keys, self._temperature = batch.keys, batch.rows.temperature_R
        # Copies, because tables change in place.
        self._tables = [_tables(batch, of_draft).copy() for of_draft in _sides(batch)]
        self._before, self._last = list(batch.before_S), list(batch.last_S)
        self._contexts = list(batch.context_S)

    def follow(self, emitted: list[list[int]]) -> None:
        for s, tokens in enumerate(emitted):
            self._before[s] = tokens[-2] if len(tokens) > 1 else self._last[s]
            self._last[s] = tokens[-1]
            self._contexts[s] += len(tokens)

    def leads_to(self, batch: Decoding, reaches: list[IntArray], page: int) -> bool:
        """Whether the batch has these tokens and, as far as `reaches`, the same slots.

        `reaches` are in tokens, [S, 1], of the target and of the drafter."""
        return (
            (self._before, self._last, self._contexts)
            == (batch.before_S, batch.last_S, batch.context_S)
            and self._keys == batch.keys
            and np.array_equal(self._temperature, batch.rows.temperature_R)
            and all(
                _same_slots(old_SW, _tables(batch, of_draft), reaches[of_draft], page)
                for old_SW, of_draft in zip(self._tables, _sides(batch), strict=True)
            )
        )


def _sides(batch: Decoding) -> tuple[bool, ...]:
    return (False,) if batch.plan is None else (False, True)


def _tables(batch: Decoding, of_draft: bool) -> IntArray:
    if not of_draft:
        return batch.tables_SW
    return catch_up_of(batch).tables_SW


def catch_up_of(batch: Decoding) -> StepBatch:
    """The batch that the drafter reads first; for batches with a drafter only."""
    assert isinstance(batch.plan, Chain)
    return batch.plan.catch_up


def offset_S(batch: Decoding) -> IntArray:
    """Tokens of each text before the drafter's first."""
    if batch.plan is None:
        return np.zeros(len(batch.last_S), np.int32)
    first = catch_up_of(batch)
    held_S = first.context_S + np.diff(first.starts_S1)
    return np.asarray(first.positions_T[first.logit_rows_R] + 1 - held_S)


def _same_slots(old_SW: IntArray, new_SW: IntArray, reach_S1: IntArray, page: int) -> bool:
    """Whether the first `reach_S1` tokens lie in the same pages, and there are that many."""
    needed_S1 = -(-reach_S1 // page)
    width = min(old_SW.shape[1], new_SW.shape[1])
    if int(needed_S1.max()) > width:
        return False
    old_SW, new_SW = old_SW[:, :width], new_SW[:, :width]
    same_SW = (old_SW == new_SW) & (old_SW >= 0)
    return bool((same_SW | (np.arange(width) >= needed_S1)).all())


def read_report(
    report: list[list[int]], chains: list[list[int]]
) -> tuple[list[list[int]], list[int]]:
    """`Landed.emitted` and `Landed.num_own`, of the rows that `Ops.settle` wrote.

    Changes `chains`: an accepted runner-up takes the place of its draft, and the drafts after it
    count as refused. So a policy that learns acceptance by position sees chains of K.
    """
    emitted, num_own = [], []
    for chain, (num, *drawn, runner_up) in zip(chains, report, strict=True):
        num_own.append(num - 2 if runner_up else len(chain))
        if runner_up:
            chain[: num - 1] = drawn[: num - 1]
            # A refused draft equals no token of the target: it would look accepted.
            if chain[num - 1 : num] == drawn[num - 1 : num]:
                del chain[num - 1 :]
        emitted.append(drawn[:num])
    return emitted, num_own


def num_runners_up(num_sequences: int, num_drafts: int) -> int:
    """Runners-up of each draft that a pass verifies at almost no cost."""
    for num in range(MOST_OTHERS, 0, -1):
        if num_drafts and num_sequences * (1 + num_drafts * (1 + num)) <= MAX_WIDTH:
            return num
    return 0


def draft_part(draft: CudaDecoder, num_sequences: int, num_drafts: int, num_others: int) -> None:
    """Lays out the last two committed tokens of each line and drafts from there.

    After a full accept, the drafter has not read the token before the last. Otherwise that token is
    read a second time.
    """
    if isinstance(draft, CudaEagle3):
        draft.draft(num_sequences, num_drafts + 1, num_drafts, num_others=num_others)
        return
    on = draft.inputs.device
    line, committed = draft.line[:num_sequences], on["committed"][:num_sequences]
    two = draft.inputs.at(num_sequences, 2)
    secrets = on["secrets"][:num_sequences]
    draft.ops.place(line, committed, secrets, 0, draft.block_size, two, on["keys"])
    draft.draft(num_sequences, 2, num_drafts, num_others=num_others)


def verify_part(
    target: CudaDecoder,
    draft: CudaDecoder | None,
    where: Pass,
    report: torch.Tensor,
    moves: torch.Tensor,
) -> None:
    """The target's pass over the newest token and the drafts, its draws, and the verdict.

    A head's next draft is laid out after it.
    """
    head = draft if isinstance(draft, CudaEagle3) else None
    num_sequences = where.num_sequences
    # Where the state lies depends on the drafter; a head numbers its own rows.
    on = (target if draft is None or head is not None else draft).inputs.device
    line, committed = (draft or target).line[:num_sequences], on["committed"][:num_sequences]
    keys = target.inputs.device["keys"]
    secrets = on["secrets"][:num_sequences]
    target.ops.place(line, committed, secrets, 1, target.block_size, where, keys)
    target.compute(where, taps=() if head is None else head.taps)
    target.draw(num_sequences * where.width)
    draws = target.drawn[: num_sequences * where.width].view(num_sequences, -1)
    target.ops.settle(line, committed, draws, where, report, moves)
    if where.num_others:
        target.move(moves)
    if head is not None:
        head.follow(report, where, target.tapped(head.taps).flatten(1))
