"""The report of a step: the single source of statistics, streaming, metrics and traces.

The records are not frozen, because frozen ones take three times as long to create.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import EngineError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability under the model, and its strongest alternatives."""

    token: int
    logprob: float
    top: dict[int, float]


@dataclass(slots=True)
class StepEvent:
    """What one step confirmed for one sequence: `tokens` and `text` never change later."""

    request_id: str
    sample_index: int
    step: int  # counts this sequence's steps, from 1
    tokens: list[int]  # confirmed: the accepted drafts, then the target's own token
    text: str  # confirmed; later than the tokens while a stop string or character is open
    finish_reason: str | None
    draft_tokens: list[int]
    draft_parents: list[int] | None  # None: a chain
    path: list[int]  # accepted nodes of the draft
    source: str  # which proposer drafted; "" for none
    pieces: list[str] = field(default_factory=list)  # `text`, by the token that confirmed it
    logprobs: list[TokenLogprob] | None = None  # of `tokens`, if the request asked for them
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first event: all but token 0


@dataclass(slots=True)
class StepTiming:
    """The time of one step, all its sequences together."""

    draft_s: float
    verify_s: float  # the target's pass, sampling and verdicts
    other_s: float  # planning, commit, finish conditions
    num_sequences: int
    num_tokens: int  # tokens of the pass, drafts included


@dataclass(slots=True)
class StepReport:
    events: list[StepEvent]  # one per sequence that confirmed something
    timing: StepTiming
    failures: dict[str, EngineError] = field(default_factory=dict)  # request id: why it ended
