"""Log-probabilities of the model itself: of what was emitted, and of the prompt.

Shape legend: R rows of the step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.engine.scheduler import Scheduled
from outrider.events import TokenLogprob


def token_logprob(logprobs_V: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    values, ids = logprobs_V.topk(min(num_top, len(logprobs_V)))
    top = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs_V[token]), top)


def prompt_rows(line: Scheduled) -> range:
    """Positions of this line whose logits score a token of the prompt that has no score yet.

    The logits of position i are about token i + 1.
    """
    s = line.sequence
    if not s.scores_prompt:
        return range(0)
    stop = min(line.start + line.num_tokens, s.num_prompt_tokens - 1)
    return range(max(line.start, len(s.prompt_logprobs)), stop)


def score_prompts(lines: Seq[Scheduled], logits_RV: torch.Tensor) -> None:
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
