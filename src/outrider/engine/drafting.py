"""A step's two conversations with the proposers: what do you guess, and this is what became of it.

Whatever a proposer does wrong costs speed, never the request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from outrider.contracts import Draw, Observation, Proposal, Verdict
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduled

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

logger = logging.getLogger(__name__)

Draws = frozenset[Draw]


def draft(engine: Engine, ready: list[Scheduled], budgets: list[int]) -> list[Proposal]:
    """A proposal per ready line; empty where there is no budget, no proposer or no KV left."""
    sequences = [line.sequence for line in ready]
    proposals = [Proposal() for _ in ready]
    limits = [line.draft_limit for line in ready]
    for i, sequence in enumerate(sequences):
        if sequence.matcher is not None and limits[i]:
            proposals[i] = _forced(engine, sequence, budgets[i] or limits[i])
    for name, members in _by_proposer(sequences).items():
        members = [i for i in members if budgets[i] > 0 and not proposals[i].tokens]
        if not members:
            continue
        asked = [sequences[i] for i in members]
        try:
            answers = engine.proposers[name].propose(asked, [budgets[i] for i in members])
            for i, answer in zip(members, answers, strict=True):
                rule = engine.verifiers[sequences[i].request.speculation.verifier]
                _check_proposal(answer, budgets[i], engine.target.spec.num_tokens, rule.draws)
        except Exception:
            switch_off(engine, name, asked)
            continue
        for i, answer in zip(members, answers, strict=True):
            sequence = sequences[i]
            proposals[i].levels = answer.levels  # of what was left out, where all was
            if answer.tokens and engine.kv.reserve(sequence.id, len(sequence.tokens) + len(answer)):
                proposals[i] = answer
    return proposals


def _forced(engine: Engine, sequence: Sequence, budget: int) -> Proposal:
    """What the request's grammar leaves no choice about: the best draft there is, for free."""
    assert sequence.matcher is not None
    tokens = sequence.matcher.forced(sequence.tokens)[:budget]
    rule = engine.verifiers[sequence.request.speculation.verifier]
    if not tokens or Draw.DETERMINISTIC not in rule.draws:
        return Proposal()
    if not engine.kv.reserve(sequence.id, len(sequence.tokens) + len(tokens)):
        return Proposal()
    return Proposal(tokens, source="grammar")


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


def observe(
    engine: Engine,
    lines: list[Scheduled],
    proposals: list[Proposal],
    verdicts: list[Verdict],
    taps: dict[int, torch.Tensor],
) -> None:
    """Tells every proposer what became of its sequences, with the taps of what was committed."""
    names = {line.sequence.proposer for line in lines} - {None}
    if not any(proposal.tokens for proposal in proposals):
        names = {name for name in names if name and engine.proposers[name].needs.every_step}
    if not names:
        return
    groups = _by_proposer([line.sequence for line in lines])
    outcomes = zip(proposals, verdicts, strict=True)
    seen: list[Observation] = []
    row = 0
    for line in lines:
        proposal, verdict = next(outcomes) if line.is_last_chunk else (Proposal(), None)
        hidden: dict[int, torch.Tensor] = {}
        if taps:
            path = [] if verdict is None else verdict.path
            stop = row + line.num_tokens
            rows: slice | list[int] = slice(row, stop + len(path))
            if path != list(range(len(path))):  # a tree's: the rows have to be gathered
                rows = [*range(row, stop), *(stop + node for node in path)]
            hidden = {layer: states[rows] for layer, states in taps.items()}
            row += line.num_tokens + len(proposal)
        seen.append(Observation(proposal, verdict, hidden, line.start))
    for name, members in groups.items():
        if name not in names:
            continue
        views = [lines[i].sequence for i in members]
        try:
            engine.proposers[name].observe(views, [seen[i] for i in members])
        except Exception:
            switch_off(engine, name, views)


def _by_proposer(sequences: list[Sequence]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.proposer is not None:
            groups.setdefault(sequence.proposer, []).append(i)
    return groups


def taps_for(engine: Engine, sequences: Iterable[Sequence]) -> tuple[int, ...]:
    """The hidden layers that these sequences' proposers read, ascending."""
    names = {s.proposer for s in sequences if s.proposer is not None and s.max_draft_tokens}
    return tuple(sorted({tap for name in names for tap in engine.proposers[name].needs.taps}))


def release_drafts(engine: Engine, sequence: Sequence) -> None:
    """Makes proposer and policy forget a sequence that finished, failed or was preempted."""
    if sequence.proposer is not None:
        engine.policy.release(sequence.id)
        try:
            engine.proposers[sequence.proposer].release(sequence.id)
        except Exception:  # a broken drafter may cost memory of its own, never the engine
            logger.exception("proposer %s failed to forget a sequence", sequence.proposer)


def switch_off(engine: Engine, name: str, sequences: Iterable[Sequence]) -> None:
    """Stops drafting for these sequences. Call it in the `except` block of the proposer's call."""
    logger.exception("proposer %s failed; its sequences go on without drafts", name)
    for sequence in sequences:
        release_drafts(engine, sequence)
        sequence.proposer = None
