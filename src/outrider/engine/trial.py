"""Finds out before the first request whether a drafter is of any use.

A policy that knows nothing of a drafter has to let it read the first prompt and draft. A useless
drafter then costs some hundredths of a short answer. A trained one is right now and then in any
text, so a few words of our own tell them apart.
"""

from __future__ import annotations

import logging
from time import perf_counter

from outrider.contracts import Draw, Proposer
from outrider.engine.engine import Engine
from outrider.engine.lane import Group
from outrider.engine.request import Speculation
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams

TEXTS = ("def ", "The three most important things about")
NUM_TOKENS = 32  # after each
NUM_DRAFTS = 4  # of a step
LIMIT_S = 0.5  # of all texts

logger = logging.getLogger(__name__)


def num_refused(engine: Engine, name: str) -> int:
    """How many drafts in a row were refused from their first token on; 0: one was accepted.

    Also 0 where nothing was drafted, and for look-ups: what they find depends on the text alone.
    Call it between two passes of the target.
    """
    refused = 0
    try:
        if _has_model(engine.proposers[name]):
            deadline = perf_counter() + LIMIT_S
            for prompt in map(engine.tokenizer.encode, TEXTS):
                text: list[int] = []
                for _ in range(2):  # a drafter that follows the request's prediction needs the text
                    is_right, num, text = _draft(engine, name, prompt, text, deadline)
                    if is_right:
                        return 0
                    refused += num
    except Exception as error:
        logger.debug("%s is not tried beforehand: %s", name, error)
    return refused


def _has_model(proposer: Proposer) -> bool:
    drafts_itself = Draw.COUPLED in proposer.draws or proposer.needs.stop_rules
    return drafts_itself and not proposer.needs.early


def _draft(
    engine: Engine, name: str, prompt: list[int], prediction: list[int], deadline: float
) -> tuple[bool, int, list[int]]:
    """Whether a draft was accepted, how many were not, and the text as far as it came."""
    longest = len(prompt) + NUM_TOKENS + NUM_DRAFTS + 1
    has_room = longest <= engine.kv.num_free_blocks * engine.kv.block_size
    if longest > engine.scheduler.max_positions or not has_room:
        return False, 0, []
    num = 0
    with Group(engine.fork(FixedPolicy())) as group:
        group.add(
            prompt,
            SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
            speculation=Speculation(proposer=name, num_draft_tokens=NUM_DRAFTS),
            prediction=prediction,
            salt="outrider calibration",
        )
        for report in group:
            if any(event.path for event in report.events):
                return True, 0, []
            num += sum([bool(event.draft_tokens) for event in report.events])
            if perf_counter() > deadline:
                break
    return False, num, group.results[0].tokens
