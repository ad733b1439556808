"""One step of the engine: the whole of speculative decoding on one page.

    plan      which sequences, how many of their tokens            (scheduler)
    draft     a few guessed tokens for those that reach their end  (controller, proposers)
    forward   ONE pass of the target over everything               (model)
    verify    which guesses stand, and one token more              (sampling, verifiers)
    commit    keep the K/V of what stands, roll back the rest      (kv, finish conditions)

Plain decoding is this same step with empty drafts: there is no other path.
"""

from __future__ import annotations

from time import perf_counter

from outrider.engine.commit import commit, verify
from outrider.engine.drafting import draft, observe
from outrider.engine.forward import TurnedAway, forward
from outrider.engine.parts import Parts
from outrider.events import StepReport, StepTiming


def run_step(parts: Parts) -> StepReport | None:
    """Advances every planned sequence; reports what each confirmed. None: nothing to do.

    Requests named in the report's `failures` made no progress: the caller ends them.
    """
    started = perf_counter()
    lines, preempted = parts.scheduler.plan()
    for sequence in preempted:
        parts.release_drafts(sequence)
    if not lines:
        return None
    ready = [line for line in lines if line.is_last_chunk]
    sequences = [line.sequence for line in ready]
    num_pending = sum(line.num_tokens for line in lines)

    proposals = draft(parts, ready, num_pending)
    drafted = perf_counter()

    try:
        passed = forward(parts, lines, proposals)
    except TurnedAway as refused:
        return StepReport([], StepTiming(0, 0, perf_counter() - started, 0, 0), refused.failures)
    verdicts = verify(parts, sequences, proposals, passed.laws)
    verified = perf_counter()

    for line in lines:
        if not line.is_last_chunk:  # nothing to emit yet
            line.sequence.num_computed += line.num_tokens
            parts.kv.commit(line.sequence.id, line.sequence.tokens, line.sequence.num_computed)
    events = [
        commit(parts, sequence, proposal, verdict, passed.laws, row)
        for sequence, proposal, verdict, row in zip(
            sequences, proposals, verdicts, passed.laws.starts, strict=True
        )
        if sequence.request.id not in passed.failures
    ]
    observe(parts, lines, proposals, verdicts, passed.taps)
    timing = StepTiming(
        draft_s=drafted - started,
        verify_s=verified - drafted,
        other_s=perf_counter() - verified,
        num_sequences=len(lines),
        num_tokens=num_pending + sum(map(len, proposals)),
    )
    parts.controller.update(sequences, proposals, verdicts, timing)
    for sequence in sequences:
        if sequence.finish_reason is not None:
            parts.scheduler.remove(sequence)
            parts.release_drafts(sequence)
    return StepReport(events, timing, passed.failures)
