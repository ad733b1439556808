"""What look-ups share: a chain per sequence, a function of its text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from outrider.contracts import Draw, Needs, Observation, Proposal, SequenceView
from outrider.errors import ConfigError


class LookupProposer(ABC):
    """Subclasses say `name`, `_draft` and `release`."""

    name: str
    draws = frozenset({Draw.DETERMINISTIC})
    trees = False
    needs = Needs()

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [
            Proposal(self._draft(view, budget), source=self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(  # noqa: B027
        self, views: Seq[SequenceView], seen: Seq[Observation]
    ) -> None:
        """Nothing to do: committed tokens are taken in when the next draft is asked for."""

    @abstractmethod
    def _draft(self, view: SequenceView, budget: int) -> list[int]: ...


def check_lookup(proposer: str, min_n: int, max_n: int, factor: float) -> None:
    """Raises ConfigError for n-gram lengths or a factor that cannot work."""
    if not 1 <= min_n <= max_n:
        raise ConfigError(f"{proposer} needs 1 <= min_n <= max_n, not min_n={min_n}, max_n={max_n}")
    if not factor > 0:
        raise ConfigError(f"{proposer} needs factor > 0, not {factor}")
