"""Steps computed before their turn, where nothing can come between them.

Behind every pass of the target the engine's own code and data have gone from the caches, and a
small model's pass is so short that fetching them again shows. A model that can therefore takes
several whole steps in one call; the engine then catches up with them one by one, as if each had
just been computed. Whatever happens in between (a request that is cancelled, a drafter that fails)
costs no more than the steps not caught up with: K/V of tokens that are not committed means nothing.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch

from outrider.contracts import (
    AheadBatch,
    AheadStep,
    DraftsAhead,
    Proposal,
    RunsAhead,
    Stream,
)
from outrider.engine.drafting import switch_off, taps_for
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduled
from outrider.errors import EngineError
from outrider.layout import stack_tables
from outrider.noise import sequence_key
from outrider.policy.base import Decision
from outrider.sampling import RowLaws, RowParams

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

logger = logging.getLogger(__name__)

LIMIT_S = 0.03  # longer than that neither tokens nor new requests are kept waiting


@dataclass(slots=True)
class Computed:
    """A step up to its verdicts: what was drafted, and what the target said."""

    lines: list[Scheduled]
    proposals: list[Proposal]
    laws: DrawnLaws | RowLaws
    draft_s: float
    verify_s: float
    other_s: float = 0.0
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    failures: dict[str, EngineError] = field(default_factory=dict)  # see forward.Pass


class DrawnLaws:
    """contracts.Laws of which only the draws are left: all that sample-match asks for."""

    def __init__(self, draws: list[list[int]]) -> None:
        self.starts: list[int] = []
        self._draws: list[int] = []
        self._by_sequence = draws
        for some in draws:
            self.starts.append(len(self._draws))
            self._draws += some

    def draw(self) -> list[int]:
        return self._draws

    def probs(self, start: int, stop: int) -> torch.Tensor:
        raise EngineError("only draws were kept of a step computed ahead")

    def logprobs(self, row: int) -> torch.Tensor:
        raise EngineError("only draws were kept of a step computed ahead")

    def select(self, indices: list[int]) -> DrawnLaws:
        return DrawnLaws([self._by_sequence[i] for i in indices])


class Ahead:
    """`most_steps` in one call; 1: every step by itself."""

    def __init__(self, most_steps: int = 1) -> None:
        self.most_steps = most_steps
        self._steps: deque[AheadStep] = deque()
        self._sequences: list[Sequence] = []
        self._name: str | None = None  # who drafts, and for whom
        self._drafts: list[bool] = []
        self._proposer: DraftsAhead | None = None
        self._has_failed = False
        self._stop = ctypes.c_int32()  # where native code looks, too

    def interrupt(self) -> None:
        """From any thread: a call that is under way begins no further step, until `resume`."""
        self._stop.value = 1

    def resume(self) -> None:
        self._stop.value = 0

    @property
    def is_empty(self) -> bool:
        """Whether the next step is yet to be computed."""
        return not self._steps

    def begin(
        self, engine: Engine, lines: list[Scheduled], decision: Decision, started: float
    ) -> Computed | None:
        """Computes this step, which `started` then, and those that follow from it alone.

        None: it cannot be done so.
        """
        budgets = decision.budgets
        most_steps = min(self.most_steps, decision.valid_steps)
        target = engine.runs_ahead if any(budgets) else engine.runs_ahead or engine.plain_loop
        # One step alone, too: what trials cost must compare with what is done for long.
        if self.most_steps < 2 or target is None:
            return None
        if engine.scheduler.waiting and not engine.scheduler.is_full:
            return None
        for line in lines:
            if not _needs_draws_alone(engine, line):
                return None
        sequences = [line.sequence for line in lines]
        names = {s.proposer for s, budget in zip(sequences, budgets, strict=True) if budget}
        # Who reads the target's states hears of no step that is computed ahead, unless it drafts.
        if len(names) > 1 or (taps_for(engine, sequences) and not all(budgets)):
            return None
        self._sequences = sequences
        self._name = next(iter(names), None)
        self._drafts = [budget > 0 for budget in budgets]
        proposer = None if self._name is None else engine.proposers[self._name]
        if proposer is not None and not _can_draft_ahead(type(proposer)):
            return None
        self._proposer = cast("DraftsAhead | None", proposer)
        try:
            batch = self._layout(engine, target, budgets, most_steps)
            if batch is not None:
                self._steps.extend(target.run_ahead(batch, most_steps, LIMIT_S))
        except Exception as error:  # mostly, whoever is to blame fails again in the step by itself
            if not self._has_failed:
                logger.warning("steps cannot be computed ahead: %s", error)
            self._has_failed = True
        if not self._steps:
            self._let_go(engine)
            return None
        passes_s = sum(step.draft_s + step.verify_s for step in self._steps)
        computed = self._next(engine)
        # A device may have begun before it was asked.
        computed.other_s = max(0.0, perf_counter() - started - passes_s)
        return computed

    def take(self, engine: Engine) -> Computed | None:
        """The next step if it has been computed."""
        if not self._steps:
            return None
        if any(s.finish_reason is not None for s in self._sequences) or any(
            s.proposer != self._name
            for s, drafts in zip(self._sequences, self._drafts, strict=True)
            if drafts
        ):
            self._steps.clear()
            self._let_go(engine)
            return None
        return self._next(engine)

    def _next(self, engine: Engine) -> Computed:
        step = self._steps.popleft()
        lines = [Scheduled.of(s, 1) for s in self._sequences]
        proposals = [
            Proposal(chain, _parents(step, i), draw=sequence.draw) if chain else Proposal()
            for i, (sequence, chain) in enumerate(zip(self._sequences, step.chains, strict=True))
        ]
        if step.levels is not None:
            for proposal, levels in zip(proposals, step.levels, strict=True):
                proposal.levels = levels
        if self._proposer is not None:
            drafting = [i for i, drafts in enumerate(self._drafts) if drafts]
            try:
                for i in drafting:
                    source = self._proposer.drafted_ahead(self._sequences[i], step, i)
                    proposals[i].source = source if step.chains[i] else ""
            except Exception:
                switch_off(engine, self._name or "", [self._sequences[i] for i in drafting])
        if not self._steps:
            self._let_go(engine)  # the commit that follows gives back what is not needed
        return Computed(lines, proposals, DrawnLaws(step.draws), step.draft_s, step.verify_s)

    def _layout(
        self, engine: Engine, target: RunsAhead, budgets: list[int], most_steps: int
    ) -> AheadBatch | None:
        """None where KV is short, or the drafter cannot be run so."""
        sequences, drafter = self._sequences, self._proposer
        if drafter is not None and not drafter.goes_ahead(sequences):
            return None
        limit = engine.scheduler.max_positions
        num_left = [
            min(s.params.max_tokens - s.num_output_tokens, limit - len(s.tokens)) for s in sequences
        ]
        spare = target.num_spare_slots if any(budgets) else 0
        for s, left, budget in zip(sequences, num_left, budgets, strict=True):
            furthest = min(left, most_steps * (budget + 1)) + spare
            if not engine.kv.hold(s.id, len(s.tokens) + furthest):
                return None
        batch = AheadBatch(
            last_S=[s.tokens[-1] for s in sequences],
            before_S=[s.tokens[-2:][0] for s in sequences],
            context_S=[s.num_computed for s in sequences],
            tables_SW=stack_tables([engine.kv.table(s.id) for s in sequences]),
            num_drafts_S=list(budgets),
            num_left_S=num_left,
            finish_ids=[s.finish_ids for s in sequences],
            rows=RowParams.of([s.params for s in sequences], [1] * len(sequences)),
            key_S=[sequence_key(s.seed, s.sample_index, Stream.TARGET) for s in sequences],
            stop=self._stop,
        )
        if drafter is not None and not drafter.begin_ahead(sequences, most_steps, batch):
            return None
        return batch

    def _let_go(self, engine: Engine) -> None:
        for sequence in self._sequences:
            engine.kv.hold(sequence.id, 0)
            if self._proposer is not None:
                try:
                    self._proposer.end_ahead(sequence)
                except Exception:
                    switch_off(engine, self._name or "", [sequence])


@cache
def _can_draft_ahead(kind: type) -> bool:
    """Asked of a class once: a protocol's own check goes through all its members each time."""
    return issubclass(kind, DraftsAhead)


def _parents(step: AheadStep, index: int) -> list[int] | None:
    """Of the drafts, where they are a tree."""
    looked_up = step.looked_up[index] if step.looked_up else None
    if looked_up is None or not looked_up.is_taken or looked_up.parents is None:
        return None
    return looked_up.parents[: len(step.chains[index])]


def _needs_draws_alone(engine: Engine, line: Scheduled) -> bool:
    """Whether a sequence decodes, and nothing of the target is asked for but its draws."""
    s = line.sequence
    return (
        line.num_tokens == 1
        and line.is_last_chunk
        and s.edits is None
        and s.params.logprobs is None
        and not s.params.stop
        and not s.scores_prompt
        and engine.verifiers[s.request.speculation.verifier].needs_draws_alone
    )
