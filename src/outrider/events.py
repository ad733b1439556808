"""What a step reports: the one stream that statistics, streaming, metrics and traces all read.

A step's records are not frozen, only because that makes them three times as dear to create.
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
    """What one step confirmed for one sequence: `tokens` and `text` are never taken back."""

    request_id: str
    sample_index: int
    step: int  # counts this sequence's steps, from 1
    tokens: list[int]  # confirmed: the accepted drafts, then the target's own token
    text: str  # confirmed; may lag behind the tokens while a stop string or character is open
    finish_reason: str | None
    draft_tokens: list[int]
    draft_parents: list[int] | None  # None: a chain
    path: list[int]  # accepted nodes of the draft
    source: str  # which proposer drafted; "" for none
    pieces: list[str] = field(default_factory=list)  # `text`, by the token that confirmed it
    logprobs: list[TokenLogprob] | None = None  # of `tokens`, where the request asked for them
    prompt_logprobs: list[TokenLogprob] | None = None  # with the first event: all but token 0


@dataclass(slots=True)
class StepTiming:
    """Where one step's time went, all its sequences together."""

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
