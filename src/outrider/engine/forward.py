"""The target's pass over one step, and the two ways it can fail without taking the engine along.

Memory that runs out is first sought from the drafts: they are optional, the step is not. Logits
that are not numbers belong to the sequences whose rows they are in: rows never mix, so the
others' tokens are what they would have been.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from outrider.contracts import Begun, Proposal, StepBatch, StepOutput
from outrider.engine.drafting import release_drafts, taps_for
from outrider.engine.logprobs import prompt_rows, score_prompts
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduled
from outrider.errors import EngineError, Overloaded
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack
from outrider.sampling import RowDraws, RowLaws, true_vocabulary

if TYPE_CHECKING:
    from outrider.engine.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pass:
    """What one pass of the target said."""

    laws: RowLaws
    taps: dict[int, torch.Tensor]
    failures: dict[str, EngineError]  # request id -> why its logits cannot be used


class TurnedAway(Exception):
    """Memory was too short even without drafts: nothing moved, and one request has to go."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        error = Overloaded("out of memory: try again later, or with a shorter prompt")
        self.failures: dict[str, EngineError] = {request_id: error}


def forward(engine: Engine, lines: list[Scheduled], proposals: list[Proposal]) -> Pass:
    """One pass; once more without drafts where memory ran out, and then `proposals` is emptied.

    Raises TurnedAway, or what the model raises.
    """
    batch, output = _run(engine, lines, proposals)
    logits_RV = output.logits_RV
    num_tokens = engine.target.spec.num_tokens
    broken: list[int] = []
    if any(line.sequence.scores_prompt for line in lines):
        num_rows = len(proposals) + sum(map(len, proposals))
        # Beyond the laws: rows that score a prompt.
        scored_RV = true_vocabulary(logits_RV[num_rows:], num_tokens)
        broken = (scored_RV.isnan().any(dim=-1).nonzero().flatten() + num_rows).tolist()
        score_prompts(lines, scored_RV)
        logits_RV = logits_RV[:num_rows]
    ready = [line.sequence for line in lines if line.is_last_chunk]
    laws = RowLaws(
        logits_RV,
        ready,
        proposals,
        [sequence.edits for sequence in ready],
        num_tokens=num_tokens,
        how=batch.draws,
        draws=output.draws,
    )
    broken += laws.mend()
    failures = _failures(lines, proposals, broken) if broken else {}
    return Pass(laws, output.taps, failures)


def _run(
    engine: Engine, lines: list[Scheduled], proposals: list[Proposal]
) -> tuple[StepBatch, StepOutput]:
    taps = taps_for(engine, (line.sequence for line in lines))
    while True:
        batch = _layout(engine.kv, lines, proposals, taps)
        try:
            return batch, engine.target.forward(batch)
        except Exception as error:
            if not out_of_memory(error):
                raise
            if not any(map(len, proposals)):
                raise _turn_away(engine, lines) from error
        logger.warning("out of memory in a pass with drafts; this step is repeated without them")
        proposals[:] = [Proposal() for _ in proposals]


def _turn_away(engine: Engine, lines: list[Scheduled]) -> TurnedAway:
    for line in lines:
        release_drafts(engine, line.sequence)  # they drafted for a step that did not happen
    # The most tokens, then the latest.
    victim = max(lines, key=lambda line: (line.num_tokens, line.sequence.id)).sequence.request.id
    logger.error("out of memory without drafts; request %s is turned away", victim)
    return TurnedAway(victim)


def _failures(
    lines: list[Scheduled], proposals: list[Proposal], broken: list[int]
) -> dict[str, EngineError]:
    """Which requests the broken rows of logits belong to."""
    owners: list[Sequence] = []
    ready = (line.sequence for line in lines if line.is_last_chunk)
    for sequence, proposal in zip(ready, proposals, strict=True):
        owners += [sequence] * (1 + len(proposal))
    for line in lines:
        owners += [line.sequence] * len(prompt_rows(line))
    failed = {owners[row].request.id for row in broken}
    logger.error("the target returned NaN for %d of %d sequences", len(failed), len(lines))
    return {request: EngineError("the model returned logits that are NaN") for request in failed}


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the host or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no type of its own.
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def _begun(lines: list[Scheduled], proposals: list[Proposal]) -> Begun | None:
    """Where drafting ran the first layers for every row of the pass: what they left."""
    first = proposals[0].begun if proposals else None
    if first is None or len(lines) > len(proposals):
        return None
    states = []
    for line, proposal in zip(lines, proposals, strict=True):
        begun = proposal.begun
        if line.num_tokens != 1 or begun is None or begun.layer != first.layer:
            return None
        states.append(begun.states_NH)
    return first if len(states) == 1 else Begun(first.layer, torch.cat(states))


def _layout(
    kv: KVCache, lines: list[Scheduled], proposals: list[Proposal], taps: tuple[int, ...]
) -> StepBatch:
    drafts = iter(proposals)
    slices = []
    ready = []
    untouched = True  # the logits that tokens are drawn from, and those are all there are
    for line in lines:
        s, start, stop = line.sequence, line.start, line.start + line.num_tokens
        scored = prompt_rows(line)
        if line.is_last_chunk:
            ready.append(s)
        if scored or s.edits is not None:
            untouched = False
        slices.append(
            Slice(
                s.tokens[start:stop],
                start,
                kv.table(s.id),
                next(drafts) if line.is_last_chunk else None,
                range(scored.start - start, scored.stop - start) if scored else scored,
            )
        )
    batch = pack(slices, taps)
    batch.begun = _begun(lines, proposals) if not taps else None
    if untouched:
        batch.draws = RowDraws.of(ready, proposals)
    return batch
