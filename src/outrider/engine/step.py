"""One step of the engine: the whole of speculative decoding on one page.

    plan      which sequences, how many of their tokens            (scheduler)
    draft     a few guessed tokens for those that reach their end  (controller, proposers)
    forward   ONE pass of the target over everything               (model)
    verify    which guesses stand, and one token more              (sampling, verifiers)
    commit    keep the K/V of what stands, roll back the rest      (kv, finish conditions)

Plain decoding is this same step with empty drafts: there is no other path.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import torch

from outrider.contracts import (
    Controller,
    Draw,
    Model,
    Observation,
    Proposal,
    Proposer,
    StepBatch,
    Verdict,
    Verifier,
)
from outrider.engine.finish import absorb
from outrider.engine.forward import (
    forward,
    heaviest,
    out_of_memory,
    prompt_rows,
    replace_nan_rows,
)
from outrider.engine.logprobs import score_prompts, token_logprob
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduled, Scheduler
from outrider.errors import EngineError, Overloaded
from outrider.events import StepEvent, StepReport, StepTiming
from outrider.kv.cache import KVCache
from outrider.sampling import RowLaws, true_vocabulary

logger = logging.getLogger(__name__)

Draws = frozenset[Draw]


@dataclass(slots=True)
class Parts:
    """Everything a step works with. Built once by `engine.build`."""

    target: Model
    kv: KVCache
    scheduler: Scheduler
    controller: Controller
    proposers: Mapping[str, Proposer]
    verifiers: dict[str, Verifier]
    taps: tuple[int, ...] = ()


def run_step(parts: Parts) -> StepReport | None:
    """Advances every planned sequence; reports what each confirmed. None: nothing to do.

    Requests named in the report's `failures` made no progress: the caller ends them.
    """
    started = perf_counter()
    lines, preempted = parts.scheduler.plan()
    for sequence in preempted:
        release_drafts(parts, sequence)
    if not lines:
        return None
    ready = [line for line in lines if line.is_last_chunk]
    sequences = [line.sequence for line in ready]

    num_pending = sum(line.num_tokens for line in lines)
    proposals = _draft(parts, ready, num_pending)
    drafted = perf_counter()

    try:
        batch, output = forward(parts.target, parts.kv, lines, proposals, parts.taps)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return _turned_away(parts, lines, started)
    num_rows = len(proposals) + sum(map(len, proposals))
    failures = _failures(lines, proposals, replace_nan_rows(output.logits_RV))
    if num_rows < len(output.logits_RV):
        scored_RV = true_vocabulary(output.logits_RV[num_rows:], parts.target.spec.num_tokens)
        score_prompts(lines, scored_RV)
    laws = RowLaws(
        output.logits_RV[:num_rows],
        sequences,
        proposals,
        [s.edits for s in sequences],
        num_tokens=parts.target.spec.num_tokens,
    )
    verdicts = _verify(parts, sequences, proposals, laws)
    verified = perf_counter()

    for line in lines:
        if not line.is_last_chunk:  # nothing to emit yet
            line.sequence.num_computed += line.num_tokens
            parts.kv.commit(line.sequence.id, line.sequence.tokens, line.sequence.num_computed)
    events = [
        _commit(parts, sequence, proposal, verdict, laws, row)
        for sequence, proposal, verdict, row in zip(
            sequences, proposals, verdicts, laws.starts, strict=True
        )
        if sequence.request.id not in failures
    ]
    _observe(parts, lines, batch, proposals, verdicts, output.taps)
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
            release_drafts(parts, sequence)
    return StepReport(events, timing, failures)


def _failures(
    lines: list[Scheduled], proposals: list[Proposal], broken: list[int]
) -> dict[str, EngineError]:
    """Which requests the broken rows of logits belong to."""
    if not broken:
        return {}
    owners: list[Sequence] = []
    ready = (line.sequence for line in lines if line.is_last_chunk)
    for sequence, proposal in zip(ready, proposals, strict=True):
        owners += [sequence] * (1 + len(proposal))
    for line in lines:
        owners += [line.sequence] * len(prompt_rows(line))
    failed = {owners[row].request.id for row in broken}
    logger.error("the target returned NaN for %d of %d sequences", len(failed), len(lines))
    return {request: EngineError("the model returned logits that are NaN") for request in failed}


def _turned_away(parts: Parts, lines: list[Scheduled], started: float) -> StepReport:
    """The report of a step that memory was too short for: one request has to go, nothing moved."""
    for line in lines:
        release_drafts(parts, line.sequence)  # they drafted for a step that did not happen
    victim = heaviest(lines).request.id
    logger.error("out of memory without drafts; request %s is turned away", victim)
    timing = StepTiming(0.0, 0.0, perf_counter() - started, 0, 0)
    error = Overloaded("out of memory: try again later, or with a shorter prompt")
    return StepReport([], timing, {victim: error})


def _by_proposer(sequences: list[Sequence]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.proposer is not None:
            groups.setdefault(sequence.proposer, []).append(i)
    return groups


def _draft(parts: Parts, ready: list[Scheduled], num_pending: int) -> list[Proposal]:
    """A proposal per ready line; empty where there is no budget, no proposer or no KV left."""
    sequences = [line.sequence for line in ready]
    proposals = [Proposal() for _ in ready]
    limits = [line.draft_limit for line in ready]
    budgets = parts.controller.budget(sequences, limits, num_pending)
    for name, members in _by_proposer(sequences).items():
        members = [i for i in members if budgets[i] > 0]
        if not members:
            continue
        asked = [sequences[i] for i in members]
        try:
            answers = parts.proposers[name].propose(asked, [budgets[i] for i in members])
            for i, answer in zip(members, answers, strict=True):
                rule = parts.verifiers[sequences[i].request.speculation.verifier]
                _check_proposal(answer, budgets[i], parts.target.spec.num_tokens, rule.draws)
        except Exception:  # a broken drafter may cost speed, never the request
            logger.exception("proposer %s failed; its sequences go on without drafts", name)
            for sequence in asked:
                release_drafts(parts, sequence)
                sequence.proposer = None
            continue
        for i, answer in zip(members, answers, strict=True):
            sequence = sequences[i]
            if answer.tokens and parts.kv.reserve(sequence.id, len(sequence.tokens) + len(answer)):
                proposals[i] = answer
    return proposals


def _check_proposal(proposal: Proposal, budget: int, num_tokens: int, allowed: Draws) -> None:
    """Raises ValueError for what a correct proposer never returns."""
    tokens, parents, q = proposal.tokens, proposal.parents, proposal.q
    if not tokens:
        return
    if len(tokens) > budget:
        raise ValueError(f"{len(tokens)} nodes drafted, {budget} allowed")
    if not 0 <= min(tokens) <= max(tokens) < num_tokens:
        raise ValueError(f"drafted ids outside 0..{num_tokens - 1}")
    if parents is not None and (
        len(parents) != len(tokens) or any(not -1 <= p < i for i, p in enumerate(parents))
    ):
        raise ValueError("every node needs one parent that comes before it")
    if proposal.draw not in allowed:
        raise ValueError(f"a {proposal.draw.value} draft is not exact under this request's rule")
    needs_q = proposal.draw is not Draw.DETERMINISTIC and Draw.COUPLED not in allowed
    if needs_q and (q is None or q.shape != (len(tokens), num_tokens)):
        raise ValueError("a sampled draft needs its law q, one row per node")


def _verify(
    parts: Parts, sequences: list[Sequence], proposals: list[Proposal], laws: RowLaws
) -> list[Verdict]:
    names = [s.request.speculation.verifier for s in sequences]
    if len(set(names)) == 1:
        return parts.verifiers[names[0]].verify(sequences, proposals, laws)
    verdicts: dict[int, Verdict] = {}
    for name in set(names):
        members = [i for i, other in enumerate(names) if other == name]
        found = parts.verifiers[name].verify(
            [sequences[i] for i in members], [proposals[i] for i in members], laws.select(members)
        )
        verdicts.update(zip(members, found, strict=True))
    return [verdicts[i] for i in range(len(sequences))]


def _commit(
    parts: Parts,
    sequence: Sequence,
    proposal: Proposal,
    verdict: Verdict,
    laws: RowLaws,
    root_row: int,
) -> StepEvent:
    """Appends what the verdict confirmed, up to a finish inside the block; frees the rest's K/V."""
    first_slot = len(sequence.tokens)  # where node 0 of the draft was written
    path = verdict.path
    emitted = [proposal.tokens[node] for node in path]
    emitted.append(verdict.next_token)
    pieces = absorb(sequence, emitted, parts.scheduler.max_positions)
    del emitted[len(pieces) :], path[len(pieces) :]
    if proposal.parents is not None:
        source, target = parts.kv.compact(sequence.id, first_slot, path)
        if len(source):
            parts.target.copy_slots(source, target)
    sequence.num_computed = first_slot + len(path)
    parts.kv.commit(sequence.id, sequence.tokens, sequence.num_computed)
    logprobs = None
    if sequence.params.logprobs is not None:
        rows = [root_row, *(root_row + 1 + node for node in path)]
        logprobs = [
            token_logprob(laws.logprobs(row), token, sequence.params.logprobs)
            for row, token in zip(rows, emitted, strict=False)
        ]
        sequence.logprobs += logprobs
    sequence.num_steps += 1
    first = sequence.num_steps == 1
    return StepEvent(
        request_id=sequence.request.id,
        sample_index=sequence.sample_index,
        step=sequence.num_steps,
        tokens=emitted,
        text="".join(pieces),
        finish_reason=sequence.finish_reason,
        draft_tokens=proposal.tokens,
        draft_parents=proposal.parents,
        source=proposal.source,
        path=path,
        pieces=pieces,
        logprobs=logprobs,
        prompt_logprobs=sequence.prompt_logprobs if first and sequence.scores_prompt else None,
    )


def _observe(
    parts: Parts,
    lines: list[Scheduled],
    batch: StepBatch,
    proposals: list[Proposal],
    verdicts: list[Verdict],
    taps: dict[int, torch.Tensor],
) -> None:
    """Tells every proposer what became of its sequences, with the taps of what was committed."""
    outcomes = zip(proposals, verdicts, strict=True)
    seen: list[Observation] = []
    for line, start in zip(lines, batch.starts_S1.tolist(), strict=False):
        proposal, verdict = next(outcomes) if line.is_last_chunk else (Proposal(), None)
        observation = Observation(proposal, verdict)
        if taps:
            rows = list(range(start, start + line.num_tokens))
            if verdict is not None:
                rows += [start + line.num_tokens + node for node in verdict.path]
            observation.taps = {layer: hidden[rows] for layer, hidden in taps.items()}
        seen.append(observation)
    for name, members in _by_proposer([line.sequence for line in lines]).items():
        views = [lines[i].sequence for i in members]
        parts.proposers[name].observe(views, [seen[i] for i in members])


def release_drafts(parts: Parts, sequence: Sequence) -> None:
    if sequence.proposer is not None:
        parts.proposers[sequence.proposer].release(sequence.id)
        parts.controller.release(sequence.id)
