"""What a step's verdicts do to its sequences, and what the proposers learn of them.

A proposer's fault costs speed, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch

from outrider.contracts import Observation, Proposal
from outrider.engine.finish import absorb
from outrider.engine.request import Sequence
from outrider.events import StepEvent
from outrider.executors.base import Line, StepResult, by_proposer
from outrider.executors.forward import token_logprob

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

logger = logging.getLogger(__name__)


def commit_prompt(engine: Engine, lines: Iterable[Line[Sequence]]) -> None:
    """Keeps the K/V of chunks that do not reach the end of their text: they emit nothing."""
    for line in lines:
        if not line.is_last_chunk:
            sequence = line.sequence
            sequence.num_computed += line.num_tokens
            engine.kv.commit(sequence.id, sequence.tokens, sequence.num_computed)


def commit(engine: Engine, sequence: Sequence, index: int, result: StepResult) -> StepEvent:
    """Appends what verdict `index` confirms, up to a finish among it; frees the K/V of the rest."""
    proposal, verdict = result.proposals[index], result.verdicts[index]
    first_slot = len(sequence.tokens)  # where node 0 of the draft was written
    path = verdict.path
    emitted = [proposal.tokens[node] for node in path]
    emitted.append(verdict.next_token)
    pieces = absorb(sequence, emitted, engine.scheduler.max_positions)
    del emitted[len(pieces) :], path[len(pieces) :]
    sequence.num_computed = first_slot + len(path)
    engine.kv.commit(sequence.id, sequence.tokens, sequence.num_computed)
    logprobs = None
    params = sequence.params
    if params.logprobs is not None and result.distributions is not None:
        root = result.distributions.starts[index]
        rows = [root, *(root + 1 + node for node in path)]
        logprobs = [
            token_logprob(
                result.distributions.logprobs(row), token, params.logprobs, params.logprob_ids
            )
            for row, token in zip(rows, emitted, strict=False)
        ]
        sequence.logprobs += logprobs
    sequence.num_steps += 1
    first = sequence.num_steps == 1
    return StepEvent(
        request_id=sequence.request_id,
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


def observe(engine: Engine, lines: Seq[Line[Sequence]], result: StepResult) -> None:
    """Calls `observe` of every proposer, with its sequences' verdicts and committed taps."""
    groups = by_proposer([line.sequence for line in lines])
    if not result.taps and not any(p.tokens or p.drafted is not None for p in result.proposals):
        groups = {n: group for n, group in groups.items() if engine.proposers[n].needs.every_step}
    if not groups:
        return
    outcomes = zip(result.proposals, result.verdicts, strict=True)
    seen: list[Observation] = []
    row = 0
    for line in lines:
        proposal, verdict = next(outcomes) if line.is_last_chunk else (Proposal(), None)
        hidden: dict[int, torch.Tensor] = {}
        if result.taps:
            path = [] if verdict is None else verdict.path
            stop = row + line.num_tokens
            rows: slice | list[int] = slice(row, stop + len(path))
            if path != list(range(len(path))):  # a tree's: the rows have to be gathered
                rows = [*range(row, stop), *(stop + node for node in path)]
            hidden = {layer: states[rows] for layer, states in result.taps.items()}
            row += line.num_tokens + len(proposal)
        seen.append(Observation(proposal, verdict, hidden, line.start))
    for name, members in groups.items():
        views = [lines[i].sequence for i in members]
        try:
            engine.proposers[name].observe(views, [seen[i] for i in members])
        except Exception:
            logger.exception("proposer %s failed; its sequences go on without drafts", name)
            for view in views:
                drop_proposer(engine, view)


def release_drafts(engine: Engine, sequence: Sequence) -> None:
    """Makes proposer and policy forget a sequence that finished, failed or was preempted."""
    if sequence.proposer is not None:
        engine.policy.release(sequence.id)
        try:
            engine.proposers[sequence.proposer].release(sequence.id)
        except Exception:  # a broken drafter may cost memory of its own, never the engine
            logger.exception("proposer %s failed to forget a sequence", sequence.proposer)


def drop_proposer(engine: Engine, sequence: Sequence) -> None:
    """The sequence goes on without drafts."""
    release_drafts(engine, sequence)
    sequence.proposer = None
