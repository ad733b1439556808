"""What a step works with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from outrider.contracts import Controller, Model, Proposer, Verifier
from outrider.engine.ahead import Ahead
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.kv.cache import KVCache

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """Built once by `engine.build`; every step works on these."""

    target: Model
    kv: KVCache
    scheduler: Scheduler
    controller: Controller
    proposers: Mapping[str, Proposer]
    verifiers: dict[str, Verifier]
    ahead: Ahead = field(default_factory=Ahead)

    def taps_for(self, sequences: Iterable[Sequence]) -> tuple[int, ...]:
        """The hidden layers that these sequences' proposers ask to see, ascending."""
        names = {s.proposer for s in sequences if s.proposer is not None and s.max_draft_tokens}
        return tuple(sorted({tap for name in names for tap in self.proposers[name].needs.taps}))

    def release_drafts(self, sequence: Sequence) -> None:
        """Makes proposer and controller forget a sequence: finished, preempted or failed."""
        if sequence.proposer is not None:
            self.controller.release(sequence.id)
            try:
                self.proposers[sequence.proposer].release(sequence.id)
            except Exception:  # a broken drafter may cost memory of its own, never the engine
                logger.exception("proposer %s failed to forget a sequence", sequence.proposer)
