"""What a peer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.bench.decode import Settings
from outrider.bench.measure import Tell
from outrider.bench.report import Row
from outrider.bench.workloads import Workload
from outrider.engine.engine import Engine


class Peer(Protocol):
    def rows(
        self,
        engine: Engine,
        workloads: Sequence[Workload],
        settings: Settings,
        ours: Sequence[Row],
        tell: Tell,
    ) -> list[Row]:
        """A row per workload and way of decoding."""
        ...
