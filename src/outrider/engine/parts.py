"""What a step works with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.contracts import (
    Model,
    PrefersThinPasses,
    Proposer,
    RunsAhead,
    Verifier,
)
from outrider.engine.ahead import Ahead
from outrider.engine.plain_loop import PlainLoop
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.kv.cache import KVCache
from outrider.policy.base import Policy

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """Built once by `engine.build`; every step works on these."""

    target: Model
    kv: KVCache
    scheduler: Scheduler
    controller: Policy
    proposers: Mapping[str, Proposer]
    verifiers: dict[str, Verifier]
    ahead: Ahead = field(default_factory=Ahead)
    # What the target can besides; asking for it at every step would take longer than using it.
    runs_ahead: RunsAhead | None = field(init=False)
    thin_passes: PrefersThinPasses | None = field(init=False)
    plain_loop: PlainLoop = field(init=False)

    def __post_init__(self) -> None:
        self.runs_ahead = self.target if isinstance(self.target, RunsAhead) else None
        self.thin_passes = self.target if isinstance(self.target, PrefersThinPasses) else None
        self.plain_loop = PlainLoop(self.target)

    def taps_for(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """The hidden layers that these sequences' proposers ask to see, ascending."""
        names = {s.proposer for s in sequences if s.proposer is not None and s.max_draft_tokens}
        return tuple(sorted({tap for name in names for tap in self.proposers[name].needs.taps}))

    def heeds_stop_rules(self, sequence: Sequence) -> bool:
        """Whether the policy may let the sequence's drafter stop early."""
        name = sequence.proposer if sequence.adaptive else None
        return name is not None and self.proposers[name].needs.caution

    def release_drafts(self, sequence: Sequence) -> None:
        """Makes proposer and controller forget a sequence: finished, preempted or failed."""
        if sequence.proposer is not None:
            self.controller.release(sequence.id)
            try:
                self.proposers[sequence.proposer].release(sequence.id)
            except Exception:  # a broken drafter may cost memory of its own, never the engine
                logger.exception("proposer %s failed to forget a sequence", sequence.proposer)

    def switch_off(self, name: str, sequences: Iterable[Sequence]) -> None:
        """Inside an except block: a broken drafter may cost speed, never the request."""
        logger.exception("proposer %s failed; its sequences go on without drafts", name)
        for sequence in sequences:
            self.release_drafts(sequence)
            sequence.proposer = None
