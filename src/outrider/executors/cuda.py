"""Several steps on the device in a row; some are in flight while the host commits earlier ones.

Coupled sample-match over chains, temperature without filters: see `cuda_cycles`.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np
import torch

from outrider.contracts import Drafted, Draw, IntArray, Model, Proposal, Proposer, Verdict, Verifier
from outrider.cuda.inputs import MAX_TOKENS
from outrider.cuda.ops import MAX_WIDTH
from outrider.draft_plans import Chain
from outrider.executors.base import StepResult
from outrider.executors.cuda_cycles import (
    IN_FLIGHT,
    Cycles,
    Landed,
    catch_up_of,
    num_runners_up,
    offset_S,
)
from outrider.executors.planned import Decoding, PlannedExecutor
from outrider.kv.cache import KVCache
from outrider.model.cuda_decoder import CudaDecoder, padded_batch

_CLOCKED = 3  # timed runs of a cycle


class CudaExecutor(PlannedExecutor):
    name = "cuda"
    num_spare_slots = MAX_WIDTH  # runners-up lie there

    def __init__(
        self,
        target: Model,
        kv: KVCache,
        proposers: Mapping[str, Proposer],
        verifiers: Mapping[str, Verifier],
    ) -> None:
        super().__init__(kv, proposers, verifiers)
        assert isinstance(target, CudaDecoder)
        self._target = target
        # Buffers of graphs, by (sequences, drafts, id of the drafter).
        self.cycles: dict[tuple[int, int, int], Cycles] = {}

    @torch.no_grad()
    def measure(
        self, drafter: object | None, num_sequences: int, num_drafts: int, length: int
    ) -> tuple[float, float] | None:
        """Prepares cycles of sequences of `length` tokens; seconds of drafting and of the pass.

        `drafter` None: another proposer drafts. None: the cycles are too wide. Runs on padding and
        writes no KV slot.
        """
        draft = drafter if num_drafts else None
        if draft is not None and not isinstance(draft, CudaDecoder):
            return None
        cycles = self.prepared(draft, num_sequences, num_drafts)
        if cycles is None:
            return None
        took = []
        for _ in range(_CLOCKED):
            cycles.abandon()
            cycles.empty(length)
            cycles.launch()
            landed = cycles.land(0)
            took.append((landed.draft_s, landed.pass_s))
        return min(took, key=sum)

    def prepared(
        self, draft: CudaDecoder | None, num_sequences: int, num_drafts: int
    ) -> Cycles | None:
        """The buffers and graphs of such cycles, made now if they are new; None: too wide."""
        padded = padded_batch(num_sequences)
        if num_drafts >= MAX_WIDTH or padded * (num_drafts + 1) > MAX_TOKENS:
            return None
        key = (padded, num_drafts, id(draft))
        if key not in self.cycles:
            num_others = num_runners_up(padded, num_drafts)
            self.cycles[key] = Cycles(self._target, draft, padded, num_drafts, num_others)
        return self.cycles[key]

    @torch.no_grad()
    def decode(self, batch: Decoding, max_steps: int, limit_s: float) -> list[StepResult]:
        """See `PlannedExecutor.decode`.

        If the steps end before any sequence does, more cycles stay in flight: the next call mostly
        needs their results.
        """
        cycles = self._cycles_for(batch, max_steps)
        if cycles is None:
            return []
        self._catch_up(batch, cycles)
        steps = _Steps(batch, cycles, self._ends(batch, cycles))
        is_sound = True
        began = perf_counter()
        while not steps.is_blocked:
            is_ending = max(steps.left) <= cycles.num_drafts + 1
            is_late = steps.results and not is_ending and perf_counter() - began > limit_s
            is_unwanted = steps.results and batch.interrupt is not None and batch.interrupt.value
            is_full = len(steps.results) == min(max_steps, cycles.most_steps)
            if is_full or is_late or is_unwanted:
                return steps.hand_over()
            # One more than has landed: the device does not wait for the host. A trial runs alone.
            while cycles.in_flight < (IN_FLIGHT if max_steps > 1 and not is_ending else 1):
                cycles.launch()
            landed = cycles.land(len(batch.last_S))
            if not landed.is_sound:  # NaN: the caller runs the step alone and finds the request
                is_sound = False
                break
            if steps.add(landed):
                break
        results = steps.hand_over(with_states=is_sound)
        cycles.abandon()
        return results

    def _cycles_for(self, batch: Decoding, max_steps: int) -> Cycles | None:
        plan, count = batch.plan, len(batch.last_S)
        num_drafts, draft = 0, None
        if plan is not None:
            if not isinstance(plan, Chain) or len(batch.members) < count:
                return None
            if not isinstance(plan.model, CudaDecoder):
                return None
            num_drafts, draft = max(plan.num_tokens), plan.model
            if not all(
                num == num_drafts or 0 < num == left - 1  # it ends: what is too much is cut off
                for num, left in zip(plan.num_tokens, batch.num_left_S, strict=True)
            ):
                return None
        if batch.rows.filters or min(batch.context_S) < 1:
            return None
        furthest = max(batch.context_S) + (max_steps + 2) * (num_drafts + 1) + MAX_WIDTH
        models = [self._target] if draft is None else [self._target, draft]
        if any(not model.can_reach(furthest) for model in models):
            return None
        return self.prepared(draft, count, num_drafts)

    def _catch_up(self, batch: Decoding, cycles: Cycles) -> None:
        """Sets the cycles to the sequences' current tokens, unless they are there already."""
        if cycles.draft is not None and cycles.head is None:
            first = catch_up_of(batch)
            if int(np.diff(first.starts_S1).max()) > 2:
                cycles.draft.forward(first)
        if not cycles.resume(batch):
            cycles.set(batch)

    def _ends(self, batch: Decoding, cycles: Cycles) -> list[int]:
        """The length at which each sequence ends: its slots, or fewer."""
        spare = cycles.width - cycles.num_drafts - 1
        ends_S = _reach(batch.tables_SW, self._target.block_size) - spare
        if cycles.draft is not None:
            # Drafts beyond the end have no slots; this happens only at the end of a text.
            tables_SW = catch_up_of(batch).tables_SW
            reach_S = _reach(tables_SW, cycles.draft.block_size) + offset_S(batch)
            ends_S = np.minimum(ends_S, reach_S + 1 + cycles.num_drafts)
        ends: list[int] = ends_S.tolist()
        return ends


class _Steps:
    """Landed cycles as steps, and the sequences' state after them."""

    def __init__(self, batch: Decoding, cycles: Cycles, ends: list[int]) -> None:
        self._batch = batch
        self._cycles = cycles
        self._ends = ends
        self._contexts = list(batch.context_S)
        self.left = list(batch.num_left_S)
        self.results: list[StepResult] = []

    @property
    def is_blocked(self) -> bool:
        """Whether a sequence has no slots for another cycle."""
        num_drafts = self._cycles.num_drafts
        return any(
            context + num_drafts >= end
            for context, end in zip(self._contexts, self._ends, strict=True)
        )

    def add(self, landed: Landed) -> bool:
        """Adds a cycle; returns whether a sequence ends with it."""
        proposals, verdicts = [], []
        pass_tokens = sum(map(len, landed.chains)) + len(landed.chains)
        finished = False
        for s, (chain, emitted) in enumerate(zip(landed.chains, landed.emitted, strict=True)):
            left = self.left[s]
            del chain[max(0, left - 1) :], emitted[left:]
            proposal = Proposal()
            if self._cycles.num_drafts:
                num_fed = min(landed.num_own[s], len(chain) - 1) if chain else None
                proposal.drafted = Drafted(landed.draft_s, landed.pass_s, pass_tokens, num_fed)
            if chain:
                assert isinstance(self._batch.plan, Chain)
                proposal.tokens, proposal.draw = chain, Draw.COUPLED
                proposal.source = self._batch.plan.source
            proposals.append(proposal)
            verdicts.append(Verdict(list(range(len(emitted) - 1)), emitted[-1]))
            self.left[s] = left - len(emitted)
            self._contexts[s] += len(emitted)
            is_end = not self._batch.finish_ids[s].isdisjoint(emitted)
            finished = finished or self.left[s] <= 0 or is_end
        self.results.append(StepResult(proposals, verdicts, landed.draft_s, landed.pass_s))
        return finished

    def hand_over(self, *, with_states: bool = True) -> list[StepResult]:
        """The results; `with_states`: the last one has the states that a head continues from."""
        self._cycles.handed_over(len(self.results))
        if self._cycles.head is not None and self.results and with_states:
            last = self.results[-1]
            for s, (proposal, verdict) in enumerate(
                zip(last.proposals, last.verdicts, strict=True)
            ):
                assert proposal.drafted is not None
                states_nF = self._cycles.features(s, len(verdict.path) + 1)
                proposal.drafted = proposal.drafted._replace(states_nF=states_nF)
        return self.results


def _reach(tables_SW: IntArray, block_size: int) -> IntArray:
    """Slots that each block table holds."""
    return np.asarray((tables_SW >= 0).sum(axis=1) * block_size)
