"""Cycles for the engine: several steps of a batch one after another, some of them in flight.

The device goes on while the host catches up with what has landed; what comes between (another
request, another draft length) makes it start anew from where the sequences stand.

Shape legend: S sequences, W pages a sequence may have.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import torch

from outrider.contracts import AheadBatch, AheadStep, IntArray
from outrider.cuda.cycle import draft_part, verify_part
from outrider.cuda.inputs import MAX_TOKENS, make_event
from outrider.cuda.ops import MAX_WIDTH
from outrider.model.cuda_decoder import CudaDecoder, padded_batch
from outrider.model.cuda_eagle3 import CudaEagle3, Steps

MOST_OTHERS = 2  # runners-up of a draft
_CLOCKED = 3  # runs of a cycle whose time is asked for
_IN_FLIGHT = 2  # cycles


class _Flight:
    """A cycle under way: what comes back of it, and when its parts were done."""

    features_SKF: torch.Tensor | None = None  # of what it emitted, where a head drafts

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
        """Of drafting and of verifying; waits for them."""
        if self._events:
            first, second, third = self._events
            third.synchronize()
            return first.elapsed_time(second) / 1e3, second.elapsed_time(third) / 1e3
        first_s, second_s, third_s = self._times
        return second_s - first_s, third_s - second_s


class Ahead:
    """Cycles of so many sequences and drafts, by these models: their buffers, made once.

    Fewer sequences may run in them: the other places compute for nobody and write no slots.
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
        self._flights = [_Flight(size, target.device) for _ in range(_IN_FLIGHT)]
        if self.head is not None:
            rows = self.head.features[: self._head_rows]
            for flight in self._flights:
                flight.features_SKF = torch.empty_like(rows).view(num_sequences, num_drafts + 1, -1)
        self._launched = self._landed = 0
        self._step_s = 0.0
        self._handed: tuple[int, float] | None = None  # steps of the last call, and when it ended
        self.most_steps = 1 << 30  # a call should take
        self._course: _Course | None = None
        self.empty(2)
        self.launch()  # captures: nobody is to learn a price from that

    @property
    def in_flight(self) -> int:
        return self._launched - self._landed

    @property
    def _head_rows(self) -> int:
        """Of a head's first pass of a draft."""
        return self.num_sequences * (self.num_drafts + 1)

    @property
    def _models(self) -> list[CudaDecoder]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def empty(self, length: int) -> None:
        """Nobody's sequences, of so many tokens."""
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
        """A model's inputs, with nobody in any place."""
        model.inputs.wait()
        host, size = model.inputs.host, self.num_sequences
        host["tables"].reshape(MAX_TOKENS, -1)[:size] = -1
        host["temperature"][: size * self._num_laws(model)] = 0.0
        host["committed"][:size] = 2
        host["secrets"][:size] = 0
        return host

    def _num_laws(self, model: CudaDecoder) -> int:
        return 1 if model is self.draft else self.width

    def set(self, batch: AheadBatch) -> None:
        """Brings both models and the state to where the sequences stand."""
        count = len(batch.last_S)
        for model in self._models:
            if isinstance(model, CudaEagle3):
                assert batch.catch_up is not None
                bucket = (self.num_sequences, self.num_drafts + 1)
                model.begin(batch.catch_up, bucket, batch.rows, np.array(batch.key_S, np.uint64))
                continue
            host, width = self._clear(model), self._num_laws(model)
            tables = _tables(batch, model is self.draft)
            host["tables"].reshape(MAX_TOKENS, -1)[:count, : tables.shape[1]] = tables
            host["temperature"][: count * width] = np.repeat(batch.rows.temperature_R, width)
            host["committed"][:count] = np.array(batch.context_S, np.int32) + 1
            host["secrets"][:count] = np.array(batch.key_S, np.uint64).view(np.int64)
            model.inputs.send(self.num_sequences)
        drafter = self.draft or self.target
        newest = np.array([batch.before_S, batch.last_S], np.int32).T.copy()
        drafter.line[:count, :2] = torch.from_numpy(newest).to(drafter.device)
        self._landed = self._launched
        self._course = _Course(batch, [model.inputs.num_changes for model in self._models])

    def resume(self, batch: AheadBatch) -> bool:
        """Whether the cycles in flight are the batch's next ones: nothing has come between.

        Then they are kept, and later ones reach as far as the batch's tables do. How long the host
        took to come back says how many steps it should be given at once: while it catches up with
        them, the device has no more to do than what is in flight.
        """
        course, changes = self._course, [model.inputs.num_changes for model in self._models]
        if course is None or not self.in_flight or course.num_changes != changes:
            return False
        first = np.array(batch.context_S) + (self.in_flight - 1) * (self.num_drafts + 1)
        reaches = [
            (first + self.width)[:, None],
            (first + self.num_drafts + 1 - _offset_S(batch))[:, None],
        ]
        if not course.leads_to(batch, reaches, self.target.block_size):
            return False
        if self._handed is not None:
            num_steps, ended = self._handed
            host_s = (perf_counter() - ended) / num_steps
            self.most_steps = 1 + int(_IN_FLIGHT * self._step_s / host_s)
        for model in self._models:
            tables = _tables(batch, model is self.draft)
            model.inputs.wait()
            own = model.inputs.host["tables"].reshape(MAX_TOKENS, -1)
            own[: len(tables), : tables.shape[1]] = tables
            model.inputs.send_tables(self.num_sequences)
        self._course = _Course(batch, changes)
        return True

    def launch(self) -> None:
        flight = self._flights[self._launched % _IN_FLIGHT]
        flight.mark(0)
        name = (self.num_sequences, self.num_drafts, self.num_others, id(self.draft))
        if self.draft is not None:
            self.target.replay(("ahead, draft", *name), self._draft)
        flight.mark(1)
        self.target.replay(("ahead, verify", *name), self._verify)
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
        """Of what a cycle brings: `report` of `Ops.settle`, and the drafts, by sequence."""
        split = self.num_sequences * (self.num_drafts + 3)
        report, chains = out[:split], out[split:]
        return report.view(self.num_sequences, -1), chains.view(self.num_sequences, self.num_drafts)

    def land(self, count: int) -> tuple[AheadStep, list[int]]:
        """Waits for the oldest cycle in flight. Returns it as a step of the first `count`
        sequences, and how many tokens it emitted of each.

        Where a runner-up was right, it is told as the draft whose place it took, and the drafts
        behind that one stay, to be refused: whoever learns from the step how far drafts survive
        learns it of chains of K. `num_own` counts the drafts before it.
        """
        flight = self._flights[self._landed % _IN_FLIGHT]
        seconds = flight.seconds()
        self._landed += 1
        report, chains = (part[:count].tolist() for part in self._parts(flight.host))
        draws, num_own = [], []
        for s, (num, *drawn, runner_up) in enumerate(report):
            own = self.num_drafts
            if runner_up:
                # Behind the runner-up's own draw come draws of the text that it is not: a draft
                # that equals it would lead the verdict there.
                own, rest = num - 2, chains[s][num - 1 :]
                if rest and rest[0] == drawn[num - 1]:
                    rest, drawn = [], drawn[:num]
                chains[s] = drawn[: num - 1] + rest
            draws.append(drawn)
            num_own.append(own)
        self._step_s = sum(seconds)
        step = AheadStep(chains, draws, *seconds, num_own=num_own)
        emitted = [row[0] for row in report]
        if self._course is not None:
            self._course.follow(step.draws, emitted)
        return step, emitted

    def hand_over(
        self,
        steps: list[AheadStep],
        contexts: list[int],
        emitted: list[int],
        batch: AheadBatch,
        *,
        is_sound: bool = True,
    ) -> None:
        """The steps are the caller's. Leaves what a head needs to go on from them by itself; not
        `is_sound`: another one has landed since."""
        self._handed = (len(steps), perf_counter()) if steps else None
        if self.head is None or not steps:
            return
        totals = [end - start for start, end in zip(batch.context_S, contexts, strict=True)]
        features = self._flights[(self._landed - 1) % _IN_FLIGHT].features_SKF
        self.head.steps = Steps(len(steps), totals, emitted, features if is_sound else None)

    def abandon(self) -> None:
        """What is in flight is nobody's: it has written slots that nobody has committed."""
        self._landed, self._course = self._launched, None


class _Course:
    """Where the sequences of a batch stand after the cycles that have landed."""

    def __init__(self, batch: AheadBatch, num_changes: list[int]) -> None:
        self.num_changes = num_changes
        self._keys, self._temperature = batch.key_S, batch.rows.temperature_R
        # Copies: what a sequence holds changes in place.
        self._tables = [_tables(batch, of_draft).copy() for of_draft in _sides(batch)]
        self._before, self._last = list(batch.before_S), list(batch.last_S)
        self._contexts = list(batch.context_S)

    def follow(self, draws: list[list[int]], emitted: list[int]) -> None:
        for s, num in enumerate(emitted):
            self._before[s] = draws[s][num - 2] if num > 1 else self._last[s]
            self._last[s] = draws[s][num - 1]
            self._contexts[s] += num

    def leads_to(self, batch: AheadBatch, reaches: list[IntArray], page: int) -> bool:
        """Whether the batch stands there, with the same slots as far as `reaches` say, [S, 1] of
        the target and of the drafter."""
        return (
            (self._before, self._last, self._contexts)
            == (batch.before_S, batch.last_S, batch.context_S)
            and self._keys == batch.key_S
            and np.array_equal(self._temperature, batch.rows.temperature_R)
            and all(
                _same_slots(old_SW, _tables(batch, of_draft), reaches[of_draft], page)
                for old_SW, of_draft in zip(self._tables, _sides(batch), strict=True)
            )
        )


def _sides(batch: AheadBatch) -> tuple[bool, ...]:
    return (False,) if batch.drafter is None else (False, True)


def _tables(batch: AheadBatch, of_draft: bool) -> IntArray:
    if not of_draft:
        return batch.tables_SW
    assert batch.catch_up is not None
    return batch.catch_up.tables_SW


def _offset_S(batch: AheadBatch) -> IntArray:
    """Tokens of each text that come before what the drafter holds of it."""
    if batch.catch_up is None:
        return np.zeros(len(batch.last_S), np.int32)
    last_S = batch.catch_up.logit_rows_R
    held_S = batch.catch_up.context_S + np.diff(batch.catch_up.starts_S1)
    return np.asarray(batch.catch_up.positions_T[last_S] + 1 - held_S)


def _same_slots(old_SW: IntArray, new_SW: IntArray, reach_S1: IntArray, page: int) -> bool:
    """Whether the first `reach_S1` tokens lie in the same pages, and there are that many."""
    needed_S1 = -(-reach_S1 // page)
    width = min(old_SW.shape[1], new_SW.shape[1])
    if int(needed_S1.max()) > width:
        return False
    old_SW, new_SW = old_SW[:, :width], new_SW[:, :width]
    same_SW = (old_SW == new_SW) & (old_SW >= 0)
    return bool((same_SW | (np.arange(width) >= needed_S1)).all())


@torch.no_grad()
def cycle_s(
    target: CudaDecoder, draft: CudaDecoder | None, num_sequences: int, num_drafts: int, length: int
) -> tuple[float, float] | None:
    """Prepares such cycles, and clocks them: seconds of drafting and of the pass.

    None: they are too wide. Nobody's tokens are computed, at nobody's slots.
    """
    cycles = prepared_cycles(target, draft if num_drafts else None, num_sequences, num_drafts)
    if cycles is None:
        return None
    took = []
    for _ in range(_CLOCKED):
        cycles.abandon()
        cycles.empty(length)
        cycles.launch()
        step, _ = cycles.land(0)
        took.append((step.draft_s, step.verify_s))
    return min(took, key=sum)


def prepared_cycles(
    target: CudaDecoder, draft: CudaDecoder | None, num_sequences: int, num_drafts: int
) -> Ahead | None:
    """The buffers and graphs of such cycles, made now if they are new; None: they are too wide."""
    padded = padded_batch(num_sequences)
    if num_drafts >= MAX_WIDTH or padded * (num_drafts + 1) > MAX_TOKENS:
        return None
    key = (padded, num_drafts, id(draft))
    if key not in target.cycles:
        num_others = num_runners_up(padded, num_drafts)
        target.cycles[key] = Ahead(target, draft, padded, num_drafts, num_others)
    cycles: Ahead = target.cycles[key]
    return cycles


@torch.no_grad()
def run_ahead(
    target: CudaDecoder, batch: AheadBatch, most_steps: int, limit_s: float
) -> list[AheadStep]:
    """See `contracts.RunsAhead`. Nothing where it needs more than these cycles can do.

    Where the steps ended for no reason of the sequences', more cycles stay in flight: mostly the
    next call is about what they compute.
    """
    count, num_drafts = len(batch.last_S), max(batch.num_drafts_S)
    draft = batch.drafter if num_drafts else None
    if (
        not all(
            num == num_drafts or 0 < num == left - 1  # it ends: what is too much is cut off
            for num, left in zip(batch.num_drafts_S, batch.num_left_S, strict=True)
        )
        or (num_drafts and not isinstance(draft, CudaDecoder))
        or batch.rows.filters
        or batch.script_S2L is not None
        or batch.lookups is not None
        or batch.exit_layer is not None
        or batch.heads is not None
        or min(batch.context_S) < 1
    ):
        return []
    assert draft is None or isinstance(draft, CudaDecoder)
    furthest = int(max(batch.context_S)) + (most_steps + 2) * (num_drafts + 1) + MAX_WIDTH
    if any(not model.can_reach(furthest) for model in (target, draft) if model is not None):
        return []
    cycles = prepared_cycles(target, draft, count, num_drafts)
    if cycles is None:
        return []
    # Every sequence ends where its slots do, or earlier.
    ends_S = _reach(batch.tables_SW, target.block_size) - (cycles.width - num_drafts - 1)
    if draft is not None:
        assert batch.catch_up is not None
        # Drafts beyond that are of no use, and find no slots: only a text's end comes so close.
        reach_S = _reach(batch.catch_up.tables_SW, draft.block_size) + _offset_S(batch)
        ends_S = np.minimum(ends_S, reach_S + 1 + num_drafts)
        if cycles.head is None and int(np.diff(batch.catch_up.starts_S1).max()) > 2:
            draft.forward(batch.catch_up)
    if not cycles.resume(batch):
        cycles.set(batch)
    left, contexts, ends = list(batch.num_left_S), list(batch.context_S), ends_S.tolist()
    began = perf_counter()
    steps: list[AheadStep] = []
    emitted: list[int] = []
    is_sound = True
    while True:
        if any(context + num_drafts >= end for context, end in zip(contexts, ends, strict=True)):
            break
        is_ending = max(left) <= num_drafts + 1
        is_late = steps and not is_ending and perf_counter() - began > limit_s
        is_unwanted = steps and batch.stop is not None and batch.stop.value
        if len(steps) == min(most_steps, cycles.most_steps) or is_late or is_unwanted:
            cycles.hand_over(steps, contexts, emitted, batch)
            return steps
        # One more than has landed, so that the device does not wait for the host; a trial alone.
        while cycles.in_flight < (_IN_FLIGHT if most_steps > 1 and not is_ending else 1):
            cycles.launch()
        step, nums = cycles.land(count)
        if any(draw < 0 for draws in step.draws for draw in draws):
            is_sound = False
            break  # a row that is not a number: the caller finds out by itself
        steps.append(step)
        emitted = [min(num, some) for num, some in zip(nums, left, strict=True)]
        finished = False
        for s, num in enumerate(emitted):
            del step.chains[s][max(0, left[s] - 1) :], step.draws[s][left[s] :]
            left[s] -= num
            contexts[s] += num
            finished |= left[s] <= 0 or not batch.finish_ids[s].isdisjoint(step.draws[s][:num])
        if finished:
            break
    cycles.hand_over(steps, contexts, emitted, batch, is_sound=is_sound)
    cycles.abandon()
    return steps


def num_runners_up(num_sequences: int, num_drafts: int) -> int:
    """Runners-up of each draft that a pass takes along for next to nothing."""
    for num in range(MOST_OTHERS, 0, -1):
        if num_drafts and num_sequences * (1 + num_drafts * (1 + num)) <= MAX_WIDTH:
            return num
    return 0


def _reach(tables_SW: IntArray, block_size: int) -> IntArray:
    """Slots that each block table holds."""
    return np.asarray((tables_SW >= 0).sum(axis=1) * block_size)
