"""What a step works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.contracts import Controller, Model, Proposer, Verifier
from outrider.engine.request import Sequence
from outrider.engine.scheduler import Scheduler
from outrider.kv.cache import KVCache


@dataclass(slots=True)
class Parts:
    """Built once by `engine.build`; every step works on these."""

    target: Model
    kv: KVCache
    scheduler: Scheduler
    controller: Controller
    proposers: Mapping[str, Proposer]
    verifiers: dict[str, Verifier]
    taps: tuple[int, ...] = ()

    def release_drafts(self, sequence: Sequence) -> None:
        """Makes proposer and controller forget a sequence: finished, preempted or failed."""
        if sequence.proposer is not None:
            self.proposers[sequence.proposer].release(sequence.id)
            self.controller.release(sequence.id)
