"""Whole speculative cycles on the device: draft loop, verifying pass, verdict, next inputs.

A cycle of a batch is one graph launch, or two where its parts are to be timed. The host learns what
was emitted through a small asynchronous copy, and reads a cycle's while the next one runs: it
decides when to stop, nothing else. Coupled sample-match, temperature without filters; without a
draft model the same cycle is plain decoding. A rejected draft costs no rollback: its slots are
written again.

A pass over sixteen tokens hardly takes longer than one over five. So beside a chain of drafts those
tokens are verified that nearly were drafted: one of these is the target's draw about every other
time that a draft is not, and then the draw behind it counts as well.

Shape legend: S sequences, L places of a line (two committed tokens, drafts, runners-up).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from time import perf_counter
from typing import Any

import numpy as np
import torch

from outrider.contracts import AheadBatch, AheadStep, IntArray, StepBatch, Stream
from outrider.cuda.decoder import MAX_TOKENS, CudaDecoder, make_event, padded_batch
from outrider.cuda.ops import MAX_WIDTH, Pass
from outrider.noise import as_signed, sequence_key

MOST_OTHERS = 2  # runners-up of a draft
_CHUNK = 512  # of a prompt
_CLOCKED = 3  # runs of a cycle whose time is asked for


class Cycle:
    """Owns both models' KV stores while it lives."""

    def __init__(
        self,
        target: CudaDecoder,
        draft: CudaDecoder | None,
        *,
        num_drafts: int,
        num_others: int = 0,
        num_sequences: int = 1,
        max_length: int = 2048,
        page: int = 16,
    ) -> None:
        """`num_others`: runners-up of every draft that are verified too; `max_length`: tokens of a
        sequence, prompt and output together."""
        self.num_drafts = num_drafts if draft is not None else 0
        self.num_others = num_others if draft is not None else 0
        self.num_sequences = num_sequences
        self.max_length = max_length
        self.target = target
        self.draft = draft
        width = 1 + self.num_drafts * (1 + self.num_others)
        assert width <= MAX_WIDTH
        assert num_sequences * width <= MAX_TOKENS
        # Two cycles may run ahead of what the host has seen.
        self._pages = -(-(max_length + 3 * width) // page)
        models = [target] if draft is None else [target, draft]
        table = np.arange(num_sequences * self._pages, dtype=np.int32).reshape(num_sequences, -1)
        for model in models:
            model.allocate(num_sequences * self._pages, page)
            tables = model.inputs.at(num_sequences, 1).tables_SW
            tables.fill_(-1)
            tables[:, : self._pages] = torch.from_numpy(table).to(model.device)
        self._table = table
        on = models[-1].inputs.device  # the state lies where drafting needs it
        self._line = models[-1].line[:num_sequences]
        self._committed = on["committed"][:num_sequences]
        self._secrets = on["secrets"][:num_sequences]
        shape = (num_sequences, self.num_drafts + 3)
        device = target.device
        pinned = device.type == "cuda"
        self._report = torch.zeros(shape, dtype=torch.int32, device=device)
        self._moves = torch.zeros(num_sequences, 2, dtype=torch.int32, device=device)
        self._seen = [
            (
                torch.zeros(shape, dtype=torch.int32, pin_memory=pinned),
                make_event() if pinned else None,
            )
            for _ in range(2)
        ]
        self._number = 0

    @torch.no_grad()
    def start(self, prompts: Seq[list[int]], *, temperature: float = 0.0, seed: int = 0) -> None:
        """Computes the prompts, of at least two tokens each, all but their last token."""
        assert len(prompts) == self.num_sequences
        for model in (self.target, self.draft):
            if model is None:
                continue
            for s, prompt in enumerate(prompts):
                assert 2 <= len(prompt) < self.max_length
                known = prompt[:-1]
                for at in range(0, len(known), _CHUNK):
                    model.forward(self._chunk(s, known[at : at + _CHUNK], at))
            tables = model.inputs.at(self.num_sequences, 1).tables_SW
            tables.fill_(-1)  # prompts of a few tokens used the same inputs
            tables[:, : self._pages] = torch.from_numpy(self._table).to(model.device)
            model.inputs.device["temperature"].fill_(temperature)
        last = torch.tensor([prompt[-2:] for prompt in prompts], dtype=torch.int32)
        self._line[:, :2] = last.to(self._line.device)
        self._committed.copy_(torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32))
        keys = [sequence_key(seed, s, Stream.TARGET) for s in range(self.num_sequences)]
        self._secrets.copy_(as_signed(keys, self._secrets.device))
        self._number = 0

    def _chunk(self, s: int, tokens: list[int], at: int) -> StepBatch:
        count = len(tokens)
        return StepBatch(
            tokens_T=np.array(tokens, np.int32),
            positions_T=np.arange(at, at + count, dtype=np.int32),
            starts_S1=np.array([0, count], np.int32),
            context_S=np.array([at], np.int32),
            tables_SW=self._table[s : s + 1],
            logit_rows_R=np.array([count - 1], np.int32),
        )

    @torch.no_grad()
    def launch(self) -> None:
        """One cycle, without waiting for it."""
        key = ("cycle", self.num_sequences, self.num_drafts, self.num_others, id(self))
        self.target.replay(key, self._run)
        host, event = self._seen[self._number % 2]
        host.copy_(self._report, non_blocking=True)
        if event is not None:
            event.record()
        self._number += 1

    def emitted(self, behind: int = 0) -> list[list[int]]:
        """What the last cycle emitted (or the one before it), by sequence; waits for it."""
        host, event = self._seen[(self._number - 1 - behind) % 2]
        if event is not None:
            event.synchronize()
        return [row[1 : 1 + row[0]] for row in host.tolist()]

    def generate(self, max_tokens: int) -> tuple[list[list[int]], int]:
        """At least `max_tokens` new tokens for each sequence, cut to that; and the cycles it took.

        Must follow `start`.
        """
        outputs: list[list[int]] = [[] for _ in range(self.num_sequences)]
        cycles = 0
        self.launch()
        while min(map(len, outputs)) < max_tokens:
            self.launch()
            for output, tokens in zip(outputs, self.emitted(behind=1), strict=True):
                output += tokens
            cycles += 1
        return [output[:max_tokens] for output in outputs], cycles

    def _run(self) -> None:
        if self.draft is not None and self.num_drafts:
            draft_part(self.draft, self.num_sequences, self.num_drafts, self.num_others)
        where = self.target.inputs.at(
            self.num_sequences, 1 + self.num_drafts * (1 + self.num_others), self.num_others
        )
        verify_part(self.target, self.draft, where, self._report, self._moves)


def draft_part(draft: CudaDecoder, num_sequences: int, num_drafts: int, num_others: int) -> None:
    """Lays out the last two committed tokens of each line and drafts from there.

    Twice the same token at times: after a full accept one is new to the drafter.
    """
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
    """The target's pass over the newest token and the drafts, its draws, and the verdict."""
    drafter, num_sequences = draft or target, where.num_sequences
    on = drafter.inputs.device  # the state lies where drafting needs it
    line, committed = drafter.line[:num_sequences], on["committed"][:num_sequences]
    keys = target.inputs.device["keys"]
    secrets = on["secrets"][:num_sequences]
    target.ops.place(line, committed, secrets, 1, target.block_size, where, keys)
    target.compute(where)
    target.draw(num_sequences * where.width)
    draws = target.drawn[: num_sequences * where.width].view(num_sequences, -1)
    target.ops.settle(line, committed, draws, where, report, moves)
    if where.num_others:
        target.move(moves)


class _Flight:
    """A cycle under way: what comes back of it, and when its parts were done."""

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


class _Ahead:
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
        self.num_sequences, self.num_drafts = num_sequences, num_drafts
        self.num_others = num_others
        self.width = 1 + num_drafts * (1 + num_others)
        size, split = num_sequences * (2 * num_drafts + 3), num_sequences * (num_drafts + 3)
        self._out = torch.zeros(size, dtype=torch.int32, device=target.device)
        self._report = self._out[:split].view(num_sequences, -1)
        self._chains = self._out[split:].view(num_sequences, num_drafts)
        self._moves = torch.zeros(num_sequences, 2, dtype=torch.int32, device=target.device)
        self._flights = [_Flight(size, target.device) for _ in range(2)]
        self._launched = self._landed = 0
        self._course: _Course | None = None
        self.empty(2)
        self.launch()  # captures: nobody is to learn a price from that

    @property
    def in_flight(self) -> int:
        return self._launched - self._landed

    @property
    def _models(self) -> list[CudaDecoder]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def empty(self, length: int) -> None:
        """Nobody's sequences, of so many tokens."""
        for model in self._models:
            self._clear(model)["committed"][: self.num_sequences] = length
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

        Then they are kept, and later ones reach as far as the batch's tables do.
        """
        course, changes = self._course, [model.inputs.num_changes for model in self._models]
        if course is None or not self.in_flight or course.num_changes != changes:
            return False
        first = np.array(batch.context_S) + (self.in_flight - 1) * (self.num_drafts + 1)
        reaches = [(first + width)[:, None] for width in (self.width, self.num_drafts + 1)]
        if not course.leads_to(batch, reaches, self.target.block_size):
            return False
        for model in self._models:
            tables = _tables(batch, model is self.draft)
            model.inputs.wait()
            own = model.inputs.host["tables"].reshape(MAX_TOKENS, -1)
            own[: len(tables), : tables.shape[1]] = tables
            model.inputs.send_tables(self.num_sequences)
        self._course = _Course(batch, changes)
        return True

    def launch(self) -> None:
        flight = self._flights[self._launched % 2]
        flight.mark(0)
        name = (self.num_sequences, self.num_drafts, self.num_others, id(self.draft))
        if self.draft is not None:
            self.target.replay(("ahead, draft", *name), self._draft)
        flight.mark(1)
        self.target.replay(("ahead, verify", *name), self._verify)
        flight.host.copy_(self._out, non_blocking=True)
        flight.mark(2)
        self._launched += 1

    def _draft(self) -> None:
        assert self.draft is not None
        draft_part(self.draft, self.num_sequences, self.num_drafts, self.num_others)
        self._chains.copy_(self.draft.line[: self.num_sequences, 2 : 2 + self.num_drafts])

    def _verify(self) -> None:
        where = self.target.inputs.at(self.num_sequences, self.width, self.num_others)
        verify_part(self.target, self.draft, where, self._report, self._moves)

    def land(self, count: int) -> tuple[AheadStep, list[int]]:
        """The first step in flight, and how many tokens each sequence emitted; waits for it.

        Where a runner-up was right, the chain is told as if it had been the draft.
        """
        flight = self._flights[self._landed % 2]
        seconds = flight.seconds()
        self._landed += 1
        split = self.num_sequences * (self.num_drafts + 3)
        report = flight.host[:split].view(self.num_sequences, -1)[:count].tolist()
        chains = flight.host[split:].view(self.num_sequences, self.num_drafts)[:count].tolist()
        draws = []
        for s, (num, *drawn, hit) in enumerate(report):
            draws.append(drawn[:num] if hit else drawn)
            if hit:
                chains[s] = drawn[: num - 1]
        step, emitted = AheadStep(chains, draws, *seconds), [row[0] for row in report]
        if self._course is not None:
            self._course.follow(step.draws, emitted)
        return step, emitted

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
    cycles = _cycles(target, draft if num_drafts else None, num_sequences, num_drafts)
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


def _cycles(
    target: CudaDecoder, draft: CudaDecoder | None, num_sequences: int, num_drafts: int
) -> _Ahead | None:
    """The buffers and graphs of such cycles, made now if they are new; None: they are too wide."""
    padded = padded_batch(num_sequences)
    if num_drafts >= MAX_WIDTH or padded * (num_drafts + 1) > MAX_TOKENS:
        return None
    key = (padded, num_drafts, id(draft))
    if key not in target.cycles:
        num_others = _others(padded, num_drafts)
        target.cycles[key] = _Ahead(target, draft, padded, num_drafts, num_others)
    cycles: _Ahead = target.cycles[key]
    return cycles


@torch.no_grad()
def run_ahead(
    target: CudaDecoder, batch: AheadBatch, most_steps: int, limit_s: float
) -> list[AheadStep]:
    """See `contracts.RunsAhead`. Nothing where it needs more than these cycles can do.

    Where the steps ended for no reason of the sequences', more cycles stay in flight: mostly the
    next call is about what they compute.
    """
    count, num_drafts = len(batch.last_S), batch.num_drafts_S[0]
    draft = batch.drafter if num_drafts else None
    if (
        any(other != num_drafts for other in batch.num_drafts_S)
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
    cycles = _cycles(target, draft, count, num_drafts)
    if cycles is None:
        return []
    # Every sequence ends where its slots do, or earlier.
    ends = _reach(batch.tables_SW, target.block_size) - (cycles.width - num_drafts - 1)
    if draft is not None:
        assert batch.catch_up is not None
        ends = np.minimum(ends, _reach(batch.catch_up.tables_SW, draft.block_size) + 1)
        if int(np.diff(batch.catch_up.starts_S1).max()) > 2:
            draft.forward(batch.catch_up)
    if not cycles.resume(batch):
        cycles.set(batch)
    left, contexts = list(batch.num_left_S), list(batch.context_S)
    began = perf_counter()
    steps: list[AheadStep] = []
    while True:
        fits = all(
            some > num_drafts and context + num_drafts < end
            for some, context, end in zip(left, contexts, ends.tolist(), strict=True)
        )
        if not fits:
            break
        if len(steps) == most_steps or (steps and perf_counter() - began > limit_s):
            return steps
        # One more than has landed, so that the device does not wait for the host; a trial alone.
        while cycles.in_flight < (2 if most_steps > 1 else 1):
            cycles.launch()
        step, emitted = cycles.land(count)
        if any(draw < 0 for draws in step.draws for draw in draws):
            break  # a row that is not a number: the caller finds out by itself
        steps.append(step)
        finished = False
        for s, num in enumerate(emitted):
            left[s] -= num
            contexts[s] += num
            finished |= left[s] <= 0 or not batch.finish_ids[s].isdisjoint(step.draws[s][:num])
        if finished:
            break
    cycles.abandon()
    return steps


def _others(num_sequences: int, num_drafts: int) -> int:
    """Runners-up of each draft that a pass takes along for next to nothing."""
    for num in range(MOST_OTHERS, 0, -1):
        if num_drafts and num_sequences * (1 + num_drafts * (1 + num)) <= MAX_WIDTH:
            return num
    return 0


def _reach(tables_SW: IntArray, block_size: int) -> IntArray:
    """Slots that each block table holds."""
    return np.asarray((tables_SW >= 0).sum(axis=1) * block_size)
