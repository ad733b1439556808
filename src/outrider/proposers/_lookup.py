"""What look-ups share: a chain per sequence, a function of its text alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from outrider.contracts import AheadBatch, Draw, Needs, Observation, Proposal, SequenceView
from outrider.errors import ConfigError
from outrider.layout import lay_script


class CopiesAhead(ABC):
    """contracts.DraftsAhead: a copy goes on for as long as the target agrees."""

    def goes_ahead(self, views: Seq[SequenceView]) -> bool:
        return True

    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        texts: list[list[int]] = []
        for i, (view, budget) in enumerate(zip(views, batch.num_drafts_S, strict=True)):
            text: list[int] = []
            if budget:
                batch.num_drafts_S[i], text = self._expected(view, budget, most_steps)
                if not text:
                    return False
            texts.append(text)
        batch.script_S2L = lay_script(texts)
        batch.copies = True
        return True

    def drafted_ahead(self, view: SequenceView, chain: list[int]) -> None:  # noqa: B027
        """Nothing to do."""

    def end_ahead(self, view: SequenceView) -> None:  # noqa: B027
        """Nothing to do."""

    @abstractmethod
    def _expected(self, view: SequenceView, budget: int, most_steps: int) -> tuple[int, list[int]]:
        """How many tokens to draft in every step, and the text that they begin; empty: none."""


class LookupProposer(CopiesAhead):
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

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed tokens are taken in when the next draft is asked for."""

    def _expected(self, view: SequenceView, budget: int, most_steps: int) -> tuple[int, list[int]]:
        num_drafts = len(self._draft(view, budget))
        if not num_drafts:
            return 0, []
        return num_drafts, self._draft(view, most_steps * (num_drafts + 1), trust=True)

    @abstractmethod
    def _draft(self, view: SequenceView, budget: int, *, trust: bool = False) -> list[int]:
        """At most `budget` tokens; `trust`: as many, however little speaks for the place."""


def check_lookup(proposer: str, min_n: int, max_n: int, factor: float) -> None:
    """Raises ConfigError for n-gram lengths or a factor that cannot work."""
    if not 1 <= min_n <= max_n:
        raise ConfigError(f"{proposer} needs 1 <= min_n <= max_n, not min_n={min_n}, max_n={max_n}")
    if not factor > 0:
        raise ConfigError(f"{proposer} needs factor > 0, not {factor}")
