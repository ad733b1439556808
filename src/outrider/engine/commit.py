"""From the target's laws to committed tokens: the verdicts, and what they do to a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.contracts import Proposal, Verdict
from outrider.engine.ahead import DrawnLaws
from outrider.engine.finish import absorb
from outrider.engine.logprobs import token_logprob
from outrider.engine.request import Sequence
from outrider.events import StepEvent
from outrider.sampling import RowLaws

if TYPE_CHECKING:
    from outrider.engine.engine import Engine


def verify(
    engine: Engine, sequences: list[Sequence], proposals: list[Proposal], laws: RowLaws | DrawnLaws
) -> list[Verdict]:
    groups: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.request.speculation.verifier, []).append(i)
    if len(groups) == 1:
        (name,) = groups
        return engine.verifiers[name].verify(sequences, proposals, laws)
    verdicts: dict[int, Verdict] = {}
    for name, members in groups.items():
        found = engine.verifiers[name].verify(
            [sequences[i] for i in members], [proposals[i] for i in members], laws.select(members)
        )
        verdicts.update(zip(members, found, strict=True))
    return [verdicts[i] for i in range(len(sequences))]


def commit(
    engine: Engine,
    sequence: Sequence,
    proposal: Proposal,
    verdict: Verdict,
    laws: RowLaws | DrawnLaws,
    root_row: int,
) -> StepEvent:
    """Appends what the verdict confirmed, up to a finish inside the block; frees the rest's K/V."""
    first_slot = len(sequence.tokens)  # where node 0 of the draft was written
    path = verdict.path
    emitted = [proposal.tokens[node] for node in path]
    emitted.append(verdict.next_token)
    pieces = absorb(sequence, emitted, engine.scheduler.max_positions)
    del emitted[len(pieces) :], path[len(pieces) :]
    if proposal.parents is not None and not isinstance(
        laws, DrawnLaws
    ):  # ahead it was done at once
        source, target = engine.kv.compact(sequence.id, first_slot, path)
        if len(source):
            engine.target.copy_slots(source, target)
    sequence.num_computed = first_slot + len(path)
    engine.kv.commit(sequence.id, sequence.tokens, sequence.num_computed)
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
