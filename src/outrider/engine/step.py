"""One step of the engine: the whole of speculative decoding on one page.

    plan      which sequences, how many of their tokens            (scheduler)
    draft     a few guessed tokens for those that reach their end  (controller, proposers)
    forward   ONE pass of the target over everything               (model)
    verify    which guesses stand, and one token more              (sampling, verifiers)
    commit    keep the K/V of what stands, roll back the rest      (kv, finish conditions)

Plain decoding is this same step with empty drafts: there is no other path. Where nothing can come
between a step and the next, a model may have computed it ahead, and the first three are done.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from outrider.engine.ahead import Computed
from outrider.engine.commit import commit, verify
from outrider.engine.drafting import draft, observe, release_drafts
from outrider.engine.forward import TurnedAway, forward
from outrider.engine.request import Sequence
from outrider.events import StepReport, StepTiming

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


def run_step(engine: Engine) -> StepReport | None:
    """Advances every planned sequence; reports what each confirmed. None: nothing to do.

    Requests named in the report's `failures` made no progress: the caller ends them.
    """
    started = perf_counter()
    try:
        computed = engine.ahead.take(engine) or compute(engine)
    except TurnedAway as refused:
        return StepReport([], StepTiming(0, 0, perf_counter() - started, 0, 0), refused.failures)
    if computed is None:
        return None
    lines, proposals, laws = computed.lines, computed.proposals, computed.laws
    ready = [line.sequence for line in lines if line.is_last_chunk]
    num_tokens = sum([line.num_tokens for line in lines]) + sum([len(p.tokens) for p in proposals])
    passed = perf_counter()
    verdicts = verify(engine, ready, proposals, laws)
    verified = perf_counter()

    for line in lines:
        if not line.is_last_chunk:  # nothing to emit yet
            line.sequence.num_computed += line.num_tokens
            engine.kv.commit(line.sequence.id, line.sequence.tokens, line.sequence.num_computed)
    events = [
        commit(engine, sequence, proposal, verdict, laws, row)
        for sequence, proposal, verdict, row in zip(
            ready, proposals, verdicts, laws.starts, strict=True
        )
        if sequence.request.id not in computed.failures
    ]
    observe(engine, lines, proposals, verdicts, computed.taps)
    timing = StepTiming(
        draft_s=computed.draft_s,
        verify_s=computed.verify_s + verified - passed,
        other_s=computed.other_s + perf_counter() - verified,
        num_sequences=len(lines),
        num_tokens=num_tokens,
    )
    engine.policy.observe(ready, proposals, verdicts, timing)
    for sequence in ready:
        if sequence.finish_reason is not None:
            engine.scheduler.remove(sequence)
            release_drafts(engine, sequence)
    return StepReport(events, timing, computed.failures)


def compute(engine: Engine) -> Computed | None:
    """Plan, draft and forward."""
    started = perf_counter()
    lines, preempted = engine.scheduler.plan()
    for sequence in preempted:
        release_drafts(engine, sequence)
    if not lines:
        return None
    ready = [line for line in lines if line.is_last_chunk]
    if engine.thin_passes is not None:
        most = engine.thin_passes.most_drafts(len(ready))
        for line in ready:
            line.draft_limit = min(line.draft_limit, most)
    decision = engine.policy.decide(
        [line.sequence for line in ready],
        [line.draft_limit for line in ready],
        sum([line.num_tokens for line in lines]),
    )
    for line, rule in zip(ready, decision.stop_rules, strict=True):
        line.sequence.caution = rule if _follows_stop_rules(engine, line.sequence) else None
    computed = engine.ahead.begin(engine, lines, decision, started)
    if computed is not None:
        return computed
    proposals = draft(engine, ready, decision.budgets)
    drafted = perf_counter()
    passed = forward(engine, lines, proposals)
    verify_s = perf_counter() - drafted
    return Computed(
        lines,
        proposals,
        passed.laws,
        drafted - started,
        verify_s,
        0.0,
        passed.taps,
        passed.failures,
    )


def _follows_stop_rules(engine: Engine, sequence: Sequence) -> bool:
    """Whether the policy may let the sequence's drafter stop early."""
    name = sequence.proposer if sequence.adaptive else None
    return name is not None and engine.proposers[name].needs.caution
