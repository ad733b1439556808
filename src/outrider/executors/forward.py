"""The target's pass over one step, and two failures that it survives.

When memory runs out, the pass is repeated without drafts. Logits that are NaN fail the requests
whose rows they are in: rows never mix, so the other requests' tokens are right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from outrider.contracts import Begun, Model, Proposal, StepBatch, StepOutput
from outrider.errors import EngineError, Overloaded
from outrider.events import TokenLogprob
from outrider.executors.base import Line, RunningSequence
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack
from outrider.sampling import RowDistributions, RowDraws, true_vocabulary

Lines = Seq[Line[RunningSequence]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Pass:
    """The target's output."""

    distributions: RowDistributions
    taps: dict[int, torch.Tensor]
    failures: dict[str, EngineError]  # request id -> why its logits cannot be used


class TurnedAway(Exception):
    """Memory is too short even without drafts: no sequence moved, and one request must end."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        error = Overloaded("out of memory: try again later, or with a shorter prompt")
        self.failures: dict[str, EngineError] = {request_id: error}


def forward(
    target: Model, kv: KVCache, lines: Lines, proposals: list[Proposal], taps: tuple[int, ...]
) -> Pass:
    """One pass, repeated without drafts if memory runs out: `proposals` is emptied then.

    Raises TurnedAway, or what the model raises.
    """
    batch, output = _run(target, kv, lines, proposals, taps)
    logits_RV = output.logits_RV
    num_tokens = target.spec.num_tokens
    broken: list[int] = []
    if any(line.sequence.scores_prompt for line in lines):
        num_rows = len(proposals) + sum(map(len, proposals))
        # After the rows that are drawn from: rows that score a prompt.
        scored_RV = true_vocabulary(logits_RV[num_rows:], num_tokens)
        broken = (scored_RV.isnan().any(dim=-1).nonzero().flatten() + num_rows).tolist()
        score_prompts(lines, scored_RV)
        logits_RV = logits_RV[:num_rows]
    ready = [line.sequence for line in lines if line.is_last_chunk]
    distributions = RowDistributions(
        logits_RV,
        ready,
        proposals,
        [sequence.edits for sequence in ready],
        num_tokens=num_tokens,
        how=batch.draws,
        draws=output.draws,
    )
    broken += distributions.mend()
    failures = _failures(lines, proposals, broken) if broken else {}
    return Pass(distributions, output.taps, failures)


def _run(
    target: Model, kv: KVCache, lines: Lines, proposals: list[Proposal], taps: tuple[int, ...]
) -> tuple[StepBatch, StepOutput]:
    while True:
        batch = _layout(kv, lines, proposals, taps)
        try:
            return batch, target.forward(batch)
        except Exception as error:
            if not out_of_memory(error):
                raise
            if not any(map(len, proposals)):
                raise _turn_away(lines) from error
        logger.warning("out of memory in a pass with drafts; this step is repeated without them")
        proposals[:] = [Proposal() for _ in proposals]


def _turn_away(lines: Lines) -> TurnedAway:
    """The request with the most tokens in the pass, of these the latest."""
    victim = max(lines, key=lambda line: (line.num_tokens, line.sequence.id)).sequence.request_id
    logger.error("out of memory without drafts; request %s is turned away", victim)
    return TurnedAway(victim)


def _failures(lines: Lines, proposals: list[Proposal], broken: list[int]) -> dict[str, EngineError]:
    """Which requests the broken rows of logits belong to."""
    owners: list[RunningSequence] = []
    ready = (line.sequence for line in lines if line.is_last_chunk)
    for sequence, proposal in zip(ready, proposals, strict=True):
        owners += [sequence] * (1 + len(proposal))
    for line in lines:
        owners += [line.sequence] * len(prompt_rows(line))
    failed = {owners[row].request_id for row in broken}
    logger.error("the target returned NaN for %d of %d sequences", len(failed), len(lines))
    return {request: EngineError("the model returned logits that are NaN") for request in failed}


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the host or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no type of its own.
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def _begun(lines: Lines, proposals: list[Proposal]) -> Begun | None:
    """The states after the first layers, if drafting ran these for every row of the pass."""
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
    kv: KVCache, lines: Lines, proposals: list[Proposal], taps: tuple[int, ...]
) -> StepBatch:
    drafts = iter(proposals)
    slices = []
    ready = []
    untouched = True  # the model may draw: no row is edited, and none scores a prompt
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


# Log-probabilities of the model itself.


def token_logprob(
    logprobs_V: torch.Tensor, token: int, num_top: int, wanted: tuple[int, ...] = ()
) -> TokenLogprob:
    """With the `num_top` most probable alternatives, or with those that are wanted."""
    if wanted:
        ids = torch.tensor(list(dict.fromkeys((token, *wanted))), device=logprobs_V.device)
        values = logprobs_V[ids]
    else:
        values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs_V[token]), top)


def prompt_rows(line: Line[RunningSequence]) -> range:
    """Positions of this line whose logits score a token of the prompt that has no score yet.

    The logits of position i are about token i + 1.
    """
    s = line.sequence
    if not s.scores_prompt:
        return range(0)
    stop = min(line.start + line.num_tokens, s.num_prompt_tokens - 1)
    return range(max(line.start, len(s.prompt_logprobs)), stop)


def score_prompts(lines: Seq[Line[RunningSequence]], logits_RV: torch.Tensor) -> None:
    """Appends to each sequence's `prompt_logprobs` what this step's extra rows say.

    `logits_RV` are those rows over true tokens, line by line, as `prompt_rows` lists them. Call it
    before anything is committed.
    """
    row = 0
    for line in lines:
        sequence = line.sequence
        num_top = sequence.params.prompt_logprobs
        for position in prompt_rows(line):
            assert num_top is not None
            logprobs_V = logits_RV[row].log_softmax(dim=-1)
            token = sequence.tokens[position + 1]
            sequence.prompt_logprobs.append(token_logprob(logprobs_V, token, num_top))
            row += 1
