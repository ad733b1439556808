"""The base of the native and CUDA executors: the layout of decoding sequences, the draft plan."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import IntArray, Proposer, Stream, Verifier
from outrider.draft_plans import Chain, DraftPlan, Lookup, Propose, Script, planner
from outrider.executors.base import RunningSequence, StepPlan, StepResult, taps_for
from outrider.kv.cache import KVCache
from outrider.layout import stack_tables
from outrider.noise import sequence_key
from outrider.sampling import RowParams


@dataclass(slots=True)
class Decoding:
    """S sequences in the middle of decoding, of which `members` draft by `plan`."""

    last_S: list[int]  # the newest token, which the target has not computed
    before_S: list[int]  # the token before it; the same where there is none
    context_S: list[int]  # tokens before the newest
    tables_SW: IntArray  # padded with -1; the slots suffice for all steps
    num_left_S: list[int]  # tokens that may still be emitted
    finish_ids: Seq[frozenset[int]]
    rows: RowParams  # one per sequence
    keys: list[int]  # sequence keys of the target's noise
    plan: DraftPlan | None  # None: plain decoding
    members: list[int]
    readers: Seq[int] = ()  # sequences whose proposers read the target's states of every step
    taps: Seq[int] = ()  # after these layers
    late_states: bool = False  # see `Needs`: of all readers
    interrupt: ctypes.c_int32 | None = None


class PlannedExecutor(ABC):
    """Runs several steps of decoding sequences in one call; a proposer's plan drafts."""

    name: str
    num_spare_slots = 0  # of a sequence, after those of the drafts
    returns_taps = False  # of several steps, for drafters that read the target's states

    def __init__(
        self, kv: KVCache, proposers: Mapping[str, Proposer], verifiers: Mapping[str, Verifier]
    ) -> None:
        self._kv = kv
        self._proposers = proposers
        self._verifiers = verifiers

    def can_run(self, plan: StepPlan) -> bool:
        """No prompts, edits, log-probabilities, stop strings or ratio rules; at most one proposer
        that drafts, with plans."""
        if not plan.needs_draws_only(self._verifiers):
            return False
        sequences = [line.sequence for line in plan.lines]
        names = {s.proposer for s, k in zip(sequences, plan.budgets, strict=True) if k}
        if len(names) > 1 or any(not self._has_plans(name) for name in names):
            return False
        # A drafter that reads the target's states needs those of each step, drafted by it or not.
        readers = {sequences[i].proposer for i in self._readers(sequences)}
        if all(plan.budgets) or not readers:
            return True
        return self.returns_taps and (not names or names == readers)

    def _readers(self, sequences: Seq[RunningSequence]) -> list[int]:
        return [i for i, s in enumerate(sequences) if taps_for(self._proposers, [s])]

    def _has_plans(self, name: str | None) -> bool:
        return name is not None and planner(self._proposers[name]) is not None

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        batch = self._lay_out(plan, max_steps)
        return [] if batch is None else self.decode(batch, max_steps, limit_s)

    @abstractmethod
    def decode(self, batch: Decoding, max_steps: int, limit_s: float) -> list[StepResult]:
        """See `Executor.run`; empty for a plan that this executor does not know."""

    def measure(
        self, drafter: object | None, num_sequences: int, num_drafts: int, length: int
    ) -> tuple[float, float] | None:
        """Prepares such steps; the seconds of draft and pass of one. None: nothing to prepare."""
        return None

    def _lay_out(self, plan: StepPlan, max_steps: int) -> Decoding | None:
        """None where KV is short or the proposer drafts by itself."""
        sequences = [line.sequence for line in plan.lines]
        num_left = plan.num_left()
        spare = self.num_spare_slots if any(plan.budgets) else 0
        for s, left, budget in zip(sequences, num_left, plan.budgets, strict=True):
            furthest = min(left, max_steps * (budget + 1)) + spare
            if not plan.hold(self._kv, s.id, len(s.tokens) + furthest):
                return None
        members = [i for i, budget in enumerate(plan.budgets) if budget]
        drafts = self._plan_drafts(plan, sequences, members, max_steps) if members else None
        if isinstance(drafts, Propose):
            return None
        chain = chain_of(drafts)
        if chain is not None and chain.max_emitted is not None:
            for i, most in zip(members, chain.max_emitted, strict=True):
                num_left[i] = min(num_left[i], most)
        readers = self._readers(sequences)
        reading = {name for i in readers if (name := sequences[i].proposer) is not None}
        return Decoding(
            last_S=[s.tokens[-1] for s in sequences],
            before_S=[s.tokens[-2:][0] for s in sequences],
            context_S=[s.num_computed for s in sequences],
            tables_SW=stack_tables([self._kv.table(s.id) for s in sequences]),
            num_left_S=num_left,
            finish_ids=[s.finish_ids for s in sequences],
            rows=RowParams.of([s.params for s in sequences], [1] * len(sequences)),
            keys=[sequence_key(s.seed, s.sample_index, Stream.TARGET) for s in sequences],
            plan=drafts,
            members=members,
            readers=readers,
            taps=taps_for(self._proposers, sequences),
            late_states=all(self._proposers[name].needs.late_states for name in reading),
            interrupt=plan.interrupt,
        )

    def _plan_drafts(
        self, plan: StepPlan, sequences: list[RunningSequence], members: list[int], max_steps: int
    ) -> DraftPlan:
        views = [sequences[i] for i in members]
        name = views[0].proposer
        assert name is not None
        make_plan = planner(self._proposers[name])
        assert make_plan is not None
        try:
            drafts = make_plan(views, [plan.budgets[i] for i in members], max_steps)
        except Exception:
            plan.note_broken(name)
            return Propose()
        chain = chain_of(drafts)
        if chain is not None:
            for view in views:
                plan.holds(chain.kv, view.id)
        return drafts


def chain_of(drafts: DraftPlan | None) -> Chain | None:
    """The chain that a plan is or contains."""
    if isinstance(drafts, Script):
        drafts = drafts.clock
    if isinstance(drafts, Lookup):
        drafts = drafts.otherwise
    return drafts if isinstance(drafts, Chain) else None
