"""One step of the engine: the whole of speculative decoding on one page.

    plan      which sequences, how many of their tokens               (scheduler)
    decide    how many tokens to draft for each                       (policy)
    run       drafts, ONE pass of the target, verdicts                (executors)
    commit    append what the verdicts accept, keep its K/V           (finish conditions, kv)
    observe   what became of the drafts, and what the step cost       (proposers, policy)

Plain decoding is this same step with empty drafts. Where nothing can come between a step and the
next, an executor may run several in one call; later calls of `run_step` then only commit them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.engine.commit import (
    commit,
    commit_prompt,
    drop_proposer,
    observe,
    release_drafts,
)
from outrider.engine.request import Sequence
from outrider.events import StepReport, StepTiming
from outrider.executors.base import Line, StepPlan, StepResult
from outrider.executors.forward import TurnedAway

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

LIMIT_S = 0.03  # of one call: neither tokens nor new requests wait longer


@dataclass(slots=True)
class ReadySteps:
    """Steps that have run and wait for their commit, all of the same sequences."""

    plan: StepPlan
    lines: list[Line[Sequence]]  # of the next step
    proposers: list[str | None]  # of the sequences, when the steps ran
    results: deque[StepResult]

    @property
    def can_go_on(self) -> bool:
        """Whether the next result still holds: no sequence ended, no proposer failed."""
        return bool(self.results) and all(
            line.sequence.finish_reason is None and line.sequence.proposer == proposer
            for line, proposer in zip(self.lines, self.proposers, strict=True)
        )

    def take(self) -> tuple[list[Line[Sequence]], StepResult]:
        lines, result = self.lines, self.results.popleft()
        if not self.results:
            self.plan.let_go()  # the commit that follows gives back what is not needed
        return lines, result

    def drop(self) -> None:
        """K/V of steps that are not committed means nothing."""
        self.results.clear()
        self.plan.let_go()


def run_step(engine: Engine) -> StepReport | None:
    """Advances every planned sequence; reports what each confirmed. None: nothing to do.

    Requests named in the report's `failures` made no progress: the caller ends them.
    """
    started = perf_counter()
    ready, computed_s = engine.ready_steps, 0.0
    if ready is None or not ready.can_go_on:
        if ready is not None:
            ready.drop()
        try:
            ready = engine.ready_steps = compute(engine)
        except TurnedAway as refused:
            engine.ready_steps = None
            return StepReport(
                [], StepTiming(0, 0, perf_counter() - started, 0, 0), refused.failures
            )
        if ready is None:
            return None
        computed_s = sum([result.draft_s + result.pass_s for result in ready.results])
    lines, result = ready.take()
    ends = [line.sequence for line in lines if line.is_last_chunk]
    num_tokens = sum([line.num_tokens for line in lines])
    num_tokens += sum([len(proposal.tokens) for proposal in result.proposals])
    commit_prompt(engine, lines)
    events = [
        commit(engine, sequence, i, result)
        for i, sequence in enumerate(ends)
        if sequence.request_id not in result.failures
    ]
    observe(engine, lines, result)
    timing = StepTiming(
        draft_s=result.draft_s,
        verify_s=result.pass_s,
        other_s=max(0.0, perf_counter() - started - computed_s),  # a device may have begun earlier
        num_sequences=len(lines),
        num_tokens=num_tokens,
    )
    engine.policy.observe(ends, result.proposals, result.verdicts, timing)
    for sequence in ends:
        if sequence.finish_reason is not None:
            engine.scheduler.remove(sequence)
            release_drafts(engine, sequence)
    if ready.results:
        ready.lines = [Line.of(line.sequence, 1) for line in lines]
    return StepReport(events, timing, result.failures)


def compute(engine: Engine) -> ReadySteps | None:
    """Plans the step, decides what to draft and runs it, alone or with steps that follow."""
    lines, preempted = engine.scheduler.plan()
    for sequence in preempted:
        release_drafts(engine, sequence)
    if not lines:
        return None
    ends = [line for line in lines if line.is_last_chunk]
    if engine.thin_passes is not None:
        most = engine.thin_passes.most_drafts(len(ends))
        for line in ends:
            line.draft_limit = min(line.draft_limit, most)
    decision = engine.policy.decide(
        [line.sequence for line in ends],
        [line.draft_limit for line in ends],
        sum([line.num_tokens for line in lines]),
    )
    for line, rule in zip(ends, decision.stop_rules, strict=True):
        line.sequence.stop_rule = rule if _follows_stop_rules(engine, line.sequence) else None
    plan = StepPlan(lines, decision.budgets, engine.scheduler.max_positions, engine.interrupted)
    max_steps = min(engine.max_steps, decision.valid_steps)
    if engine.scheduler.waiting and not engine.scheduler.is_full:
        max_steps = 1  # a request may be admitted before the next
    if not all(line.sequence.num_output_tokens for line in ends):
        max_steps = 1  # first tokens do not wait, and most drafters begin after them
    executors = engine.executors
    run = executors.run if engine.max_steps > 1 else executors.python.run
    try:
        results = run(plan, max_steps, LIMIT_S)
    except TurnedAway:
        for line in lines:
            release_drafts(engine, line.sequence)  # its drafts were for a step that did not happen
        raise
    for line in ends:
        if line.sequence.proposer in plan.broken:
            drop_proposer(engine, line.sequence)
    return ReadySteps(plan, lines, [line.sequence.proposer for line in lines], deque(results))


def _follows_stop_rules(engine: Engine, sequence: Sequence) -> bool:
    """Whether the policy may let the sequence's drafter stop early."""
    name = sequence.proposer if sequence.adaptive else None
    return name is not None and engine.proposers[name].needs.stop_rules
