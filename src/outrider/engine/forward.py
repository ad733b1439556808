"""The target's pass over one step, and the two ways it can fail without taking the engine along.

Memory that runs out is first sought from the drafts: they are optional, the step is not. Logits
that are not numbers belong to the sequences whose rows they are in: rows never mix, so the
others' tokens are what they would have been.
"""

from __future__ import annotations

import logging
import math

import torch

from outrider.contracts import Model, Proposal, StepBatch, StepOutput
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduled
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack

logger = logging.getLogger(__name__)


def forward(
    target: Model,
    kv: KVCache,
    lines: list[Scheduled],
    proposals: list[Proposal],
    taps: tuple[int, ...],
) -> tuple[StepBatch, StepOutput]:
    """One pass; once more without drafts where memory ran out, and then `proposals` is emptied.

    Raises what the model raises. `out_of_memory` tells whether that was memory.
    """
    batch = _layout(kv, lines, proposals, taps)
    try:
        return batch, target.forward(batch)
    except Exception as error:
        if not out_of_memory(error) or not any(map(len, proposals)):
            raise
    logger.warning("out of memory in a pass with drafts; this step is repeated without them")
    proposals[:] = [Proposal() for _ in proposals]
    batch = _layout(kv, lines, proposals, taps)
    return batch, target.forward(batch)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on the host or on the device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator has no type of its own.
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def heaviest(lines: list[Scheduled]) -> Sequence:
    """Whom to turn away when even plain decoding does not fit: the most tokens, then the latest."""
    return max(lines, key=lambda line: (line.num_tokens, line.sequence.id)).sequence


def prompt_rows(line: Scheduled) -> range:
    """Positions of this line whose logits score a token of the prompt that has no score yet.

    The logits of position i are about token i + 1.
    """
    s = line.sequence
    if not s.scores_prompt:
        return range(0)
    stop = min(s.num_computed + line.num_tokens, s.num_prompt_tokens - 1)
    return range(max(s.num_computed, len(s.prompt_logprobs)), stop)


def replace_nan_rows(logits_RV: torch.Tensor) -> list[int]:
    """Zeroes every row with a NaN in place and returns their indices: normally none.

    One sum over everything finds out that there is nothing to find.
    """
    if not math.isnan(float(logits_RV.sum())):
        return []
    broken_R = logits_RV.isnan().any(dim=-1)
    logits_RV[broken_R] = 0.0
    rows: list[int] = broken_R.nonzero().flatten().tolist()
    return rows


def _layout(
    kv: KVCache, lines: list[Scheduled], proposals: list[Proposal], taps: tuple[int, ...]
) -> StepBatch:
    drafts = iter(proposals)
    slices = []
    for line in lines:
        s = line.sequence
        start, stop = s.num_computed, s.num_computed + line.num_tokens
        scored = prompt_rows(line)
        slices.append(
            Slice(
                s.tokens[start:stop],
                start,
                kv.table(s.id),
                next(drafts) if line.is_last_chunk else None,
                range(scored.start - start, scored.stop - start) if scored else scored,
            )
        )
    return pack(slices, taps)
