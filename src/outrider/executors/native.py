"""Several steps in one call of the native library, which drafts, passes, draws and judges.

After a pass over all weights, the engine's own code has left the processor's caches, and a small
model's pass is so short that fetching it again shows: one call for several steps is much faster.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, chain
from typing import TypeVar, cast

import numpy as np
import torch

from outrider import native
from outrider.contracts import (
    Drafted,
    Draw,
    Found,
    IntArray,
    Model,
    Proposal,
    Proposer,
    StepBatch,
    Verdict,
    Verifier,
)
from outrider.draft_plans import Chain, DraftPlan, EarlyExit, Heads, Lookup, Script
from outrider.executors.base import StepResult
from outrider.executors.planned import Decoding, PlannedExecutor
from outrider.kv.cache import KVCache
from outrider.model.native_decoder import NativeDecoder
from outrider.model.native_model import NativeModel, NativeStopRules
from outrider.native.lookup import NativeLookup

T = TypeVar("T")

_FOUND, _DRAFTED = 1, 2  # source of a draft, in the library's report


class NativeExecutor(PlannedExecutor):
    name = "native"
    returns_taps = True

    def __init__(
        self,
        target: Model,
        kv: KVCache,
        proposers: Mapping[str, Proposer],
        verifiers: Mapping[str, Verifier],
    ) -> None:
        super().__init__(kv, proposers, verifiers)
        assert isinstance(target, NativeDecoder)
        self._target = target

    def decode(self, batch: Decoding, max_steps: int, limit_s: float) -> list[StepResult]:
        drafts = _Drafts(batch)
        if drafts.model is not None and not isinstance(drafts.model, NativeModel):
            return []
        return _Call(self._target, batch, drafts, max_steps, limit_s).results()


class _Drafts:
    """The draft plan as the library reads it, with entries for sequences that do not draft."""

    def __init__(self, batch: Decoding) -> None:
        self._batch = batch
        self.num_sequences = len(batch.last_S)
        self.counts = [0] * self.num_sequences
        self.max_found = [0] * self.num_sequences
        self.source = self.found_source = ""  # of drafts by the model, and of look-ups
        self.chain: Chain | None = None
        self.catch_up: StepBatch | None = None
        self.heads: Heads | None = None
        self.lookup: Lookup | None = None
        self.exit_layer = 0
        self.script_S2L: IntArray | None = None
        self.copies = False
        self.stop_rules: NativeStopRules | None = None
        if batch.plan is not None:
            self._read(batch.plan)
        self.width = max(*self.counts, *self.max_found)

    @property
    def taps(self) -> Seq[int]:
        """Layers whose states the call returns. Medusa's are apart."""
        if self.heads is not None:
            return ()
        return self.chain.taps if self.chain is not None else self._batch.taps

    @property
    def model(self) -> object | None:
        """The model that drafts, if one does."""
        if self.heads is not None:
            return self.heads.model
        return self.chain.model if self.chain is not None and any(self.counts) else None

    @property
    def num_grown(self) -> int:
        """The most rows that a growing tree writes after a text, beyond those of its drafts."""
        tree = None if self.chain is None else self.chain.tree
        return 0 if tree is None else tree.passes * tree.width

    def spread(self, values: Iterable[T], nothing: T) -> list[T]:
        """The values of sequences that draft, and `nothing` for the others."""
        members = self._batch.members
        if len(members) == self.num_sequences:
            return list(values)
        spread = [nothing] * self.num_sequences
        for i, value in zip(members, values, strict=True):
            spread[i] = value
        return spread

    def _read(self, plan: DraftPlan) -> None:
        if isinstance(plan, Lookup):
            self.lookup, self.found_source = plan, plan.source
            self.max_found = self.spread(plan.max_found, 0)
            if plan.otherwise is not None:
                self._read(plan.otherwise)
        elif isinstance(plan, Script):
            if isinstance(plan.clock, Chain | EarlyExit):
                self._read(plan.clock)
            self._read_script(plan)
        elif isinstance(plan, Chain):
            self.chain, self.source = plan, plan.source
            self.counts = self.spread(plan.num_tokens, 0)
            self.catch_up = self._spread_batch(plan.catch_up)
            if plan.stop_rules is not None and any(plan.stop_rules):
                self.stop_rules = NativeStopRules.of(self.spread(plan.stop_rules, None))
        elif isinstance(plan, EarlyExit):
            self.exit_layer, self.source = plan.exit_layer, plan.source
            self.counts = self.spread(plan.num_tokens, 0)
        elif isinstance(plan, Heads):
            self.heads, self.found_source = plan, plan.source
            self.counts = self.spread(plan.num_tokens, 0)

    def _read_script(self, plan: Script) -> None:
        self.source, self.copies = plan.source, plan.copies
        self.counts = self.spread(plan.num_tokens, 0)
        length = max(map(len, plan.texts))
        self.script_S2L = np.zeros((self.num_sequences, 2, length), np.int32)
        for i, text, right in zip(self._batch.members, plan.texts, plan.num_right, strict=True):
            self.script_S2L[i, 0, : len(text)] = text
            self.script_S2L[i, 1, : len(text)] = right

    def _spread_batch(self, batch: StepBatch) -> StepBatch:
        """The drafter's first pass, with empty slices for sequences that do not draft."""
        members, num_seqs = self._batch.members, self.num_sequences
        if len(members) == num_seqs:
            return batch
        context_S, lengths_S = np.zeros((2, num_seqs), np.int32)
        tables_SW = np.full((num_seqs, batch.tables_SW.shape[1]), -1, np.int32)
        context_S[members] = batch.context_S
        lengths_S[members] = np.diff(batch.starts_S1)
        tables_SW[members] = batch.tables_SW
        starts_S1 = np.concatenate([[0], np.cumsum(lengths_S)]).astype(np.int32)
        return StepBatch(
            batch.tokens_T, batch.positions_T, starts_S1, context_S, tables_SW, batch.logit_rows_R
        )


class _Call:
    """One call of the library: its arguments, which must live until it returns, and its report."""

    def __init__(
        self,
        target: NativeDecoder,
        batch: Decoding,
        drafts: _Drafts,
        max_steps: int,
        limit_s: float,
    ) -> None:
        self._batch = batch
        self._drafts = drafts
        self._num_seqs = num_seqs = len(batch.last_S)
        self._stride = 5 * drafts.width + 7
        self._out = (ctypes.c_int32 * (max_steps * num_seqs * self._stride))()
        self._seconds = (ctypes.c_double * (2 * max_steps))()
        self._states: torch.Tensor | None = None
        self._features: torch.Tensor | None = None
        longest = max(batch.context_S) + max_steps * (drafts.width + 1) + 1
        target.extend_positions(longest)
        drafter = cast("NativeModel | None", drafts.model)
        if drafter is not None and drafts.heads is None:
            drafter.extend_positions(longest + drafts.num_grown)
        catch_up = drafts.catch_up
        num_rows = sum(map(max, drafts.counts, drafts.max_found)) + num_seqs
        self._cycles = native.Cycles(
            drafter=None if drafter is None else drafter.handle,
            logits=target.logits_address(num_rows),
            out=ctypes.addressof(self._out),
            seconds=ctypes.addressof(self._seconds),
            limit_s=limit_s,
            num_seqs=num_seqs,
            table_width=batch.tables_SW.shape[1],
            draft_table_width=0 if catch_up is None else catch_up.tables_SW.shape[1],
            width=drafts.width,
            most_cycles=max_steps,
            threads=target.threads,
            exit_layer=drafts.exit_layer,
        )
        if batch.interrupt is not None:
            self._cycles.stop = ctypes.addressof(batch.interrupt)
        self._describe_drafts(target, max_steps)
        target.run_cycles(self._packed(), self._parameters(), self._cycles)

    def _describe_drafts(self, target: NativeDecoder, max_steps: int) -> None:
        drafts, cycles = self._drafts, self._cycles
        if drafts.script_S2L is not None:
            script = drafts.script_S2L
            cycles.script, cycles.script_length = script.ctypes.data, script.shape[2]
            cycles.copies = drafts.copies
        if drafts.lookup is not None:
            found = cast("list[NativeLookup | None]", drafts.lookup.indexes)
            indexes = drafts.spread(found, None)
            self._indexes = (ctypes.c_void_p * self._num_seqs)(
                *(None if index is None else index.handle for index in indexes)
            )
            cycles.lookups = ctypes.addressof(self._indexes)
        if drafts.stop_rules is not None:
            drafts.stop_rules.fill_in(cycles.stop_rules)
        if drafts.taps:
            self._note_features(target, max_steps)
        heads = drafts.heads
        if heads is not None:
            hidden = target.spec.hidden_size
            self._states = torch.empty(max_steps + 1, self._num_seqs, hidden)
            self._states[0, self._batch.members] = heads.states_SH
            cycles.states = self._states.data_ptr()
            cycles.children, cycles.floor = heads.children, heads.floor

    def _note_features(self, target: NativeDecoder, max_steps: int) -> None:
        drafts, cycles, taps = self._drafts, self._cycles, self._drafts.taps
        room, width = max_steps * (drafts.width + 1), len(taps) * target.spec.hidden_size
        self._features = torch.empty(self._num_seqs, room, width)
        self._num_seen = [0] * self._num_seqs
        self._taps = (ctypes.c_int32 * len(taps))(*taps)
        cycles.taps, cycles.num_taps = ctypes.addressof(self._taps), len(taps)
        cycles.features_out = self._features.data_ptr()
        chain = drafts.chain
        if chain is None or chain.features_nF is None:
            return
        self._known = chain.features_nF.contiguous()
        cycles.features = self._known.data_ptr()
        if chain.tree is not None:
            cycles.passes, cycles.breadth, cycles.children = chain.tree

    def _packed(self) -> bytes:
        """The integers in the order of `OutriderCycles`."""
        batch, drafts = self._batch, self._drafts
        fed, starts = bytes(4 * self._num_seqs), bytes(4 * self._num_seqs + 4)
        tokens = tables = b""
        shifts = bytes(4 * self._num_seqs)
        if drafts.catch_up is not None:
            first = drafts.catch_up
            fed, starts = first.context_S.tobytes(), first.starts_S1.tobytes()
            shifts = _shifts(first).tobytes()
            tokens, tables = first.tokens_T.tobytes(), first.tables_SW.tobytes()
        finish = [sorted(ids) for ids in batch.finish_ids]
        takes: list[Seq[int]] = [()] * self._num_seqs
        if drafts.lookup is not None:
            takes = drafts.spread(drafts.lookup.take, ())
        return b"".join(
            (
                array("i", [*batch.last_S, *batch.context_S, *batch.num_left_S]).tobytes(),
                fed,
                shifts,
                array("i", drafts.max_found).tobytes(),
                batch.tables_SW.tobytes(),
                tables,
                starts,
                tokens,
                array("i", [*accumulate(map(len, finish), initial=0)]).tobytes(),
                array("i", [*chain.from_iterable(finish)]).tobytes(),
                *(_padded(take, drafts.width + 1) for take in takes),
            )
        )

    def _parameters(self) -> bytes:
        batch, rows = self._batch, self._batch.rows
        return b"".join(
            (
                array("Q", batch.keys),
                rows.temperature_R.tobytes(),
                array("i", self._drafts.counts),
                rows.top_k_R.tobytes(),
                rows.top_p_R.tobytes(),
                rows.min_p_R.tobytes(),
            )
        )

    def results(self) -> list[StepResult]:
        size = self._num_seqs * self._stride
        members = set(self._batch.members)
        results = []
        for cycle in range(self._cycles.cycles):
            out = self._out[cycle * size : (cycle + 1) * size]
            draft_s, pass_s = self._seconds[2 * cycle : 2 * cycle + 2]
            taps: dict[int, torch.Tensor] = {}
            if not members:
                nexts = out[6 :: self._stride]
                proposals = [Proposal() for _ in nexts]
                verdicts = [Verdict([], token) for token in nexts]
                if self._features is not None and not self._batch.late_states:
                    found = self._features[:, cycle].chunk(len(self._taps), dim=1)
                    taps = dict(zip(self._taps, found, strict=True))
            else:
                times = (draft_s, pass_s, sum(out[1 :: self._stride]) + self._num_seqs)
                reports = [self._report(out, s, times, s in members) for s in range(self._num_seqs)]
                proposals = [proposal for proposal, _ in reports]
                verdicts = [verdict for _, verdict in reports]
            results.append(StepResult(proposals, verdicts, draft_s, pass_s, taps=taps))
        if self._states is not None and results:
            self._add_states(results[-1], self._states[len(results)])
        if self._batch.late_states and not members and self._features is not None and results:
            self._add_late_states(results[-1], self._features[:, : len(results)])
        return results

    def _add_late_states(self, last: StepResult, states_SNF: torch.Tensor) -> None:
        """Those of all steps: what happens between two steps is slow."""
        for s in self._batch.readers:
            last.proposals[s].drafted = Drafted(
                0.0, last.pass_s, self._num_seqs, states_nF=states_SNF[s]
            )

    def _add_states(self, last: StepResult, states_SH: torch.Tensor) -> None:
        """The states that Medusa continues from."""
        for s in self._batch.members:
            proposal = last.proposals[s]
            assert proposal.drafted is not None
            proposal.drafted = proposal.drafted._replace(states_nF=states_SH[s : s + 1])

    def _report(
        self, out: list[int], sequence: int, times: tuple[float, float, int], drafts_here: bool
    ) -> tuple[Proposal, Verdict]:
        """One sequence's share of a cycle; see `OutriderCycles`."""
        drafts, width, at = self._drafts, self._drafts.width, sequence * self._stride
        source, count, num_found, is_tree, num_levels, num_accepted, next_token = out[at : at + 7]
        first, found, above, levels, path = (at + 7 + i * width for i in range(5))
        parents = out[above : above + num_found] if is_tree else None
        proposal, grows = Proposal(), drafts.chain is not None and drafts.chain.tree is not None
        if count:
            proposal.tokens = out[first : first + count]
            if source == _FOUND:
                proposal.parents = parents[:count] if parents else None
            elif grows:
                proposal.parents = out[levels : levels + count]
            proposal.draw = Draw.COUPLED
            proposal.source = drafts.found_source if source == _FOUND else drafts.source
        if drafts.stop_rules is not None:
            proposal.levels = out[levels : levels + num_levels]
        states_nF = None
        if self._features is not None:
            start = self._num_seen[sequence]
            self._num_seen[sequence] = stop = start + num_accepted + 1
            states_nF = self._features[sequence, start:stop]
        if drafts_here or sequence in self._batch.readers:
            looked_up = None
            if drafts.lookup is not None:
                looked_up = Found(out[found : found + num_found], parents, source == _FOUND)
            num_fed = max(count, num_levels) - 1 if source == _DRAFTED else None
            proposal.drafted = Drafted(*times, num_fed, looked_up, states_nF)
        return proposal, Verdict(out[path : path + num_accepted], next_token)


def _shifts(batch: StepBatch) -> IntArray:
    """By how much the positions of each sequence's tokens exceed their indices in the cache."""
    shifts_S = np.zeros(len(batch.context_S), np.int32)
    some = np.diff(batch.starts_S1) > 0
    first_S = batch.starts_S1[:-1][some]
    shifts_S[some] = batch.positions_T[first_S] - batch.context_S[some]
    return shifts_S


def _padded(take: Seq[int], length: int) -> bytes:
    return array("i", take).tobytes() + bytes(4 * (length - len(take)))
