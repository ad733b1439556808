"""The caller's own guess of the output, followed token by token.

Someone who has a file edited knows most of the answer. The guess is read from its beginning for
as long as the output agrees; where the two part, the output's longest ending that occurs in the
guess says where to go on reading: at its first occurrence after the place where they parted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.proposers._ngram_index import suffix_keys, up_to_finish
from outrider.proposers._options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """Endings of `min_n` to `max_n` tokens decide where reading goes on.

    Unlike in prompt lookup one token is enough: the place is known but for an edit.
    """

    min_n: int = 1
    max_n: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(
                f"prediction needs 1 <= min_n <= max_n, not min_n={self.min_n}, max_n={self.max_n}"
            )


class Alignment:
    """Where in the guess an output stands; a function of the two, however the output arrived."""

    __slots__ = ("_config", "_ends", "_guess", "_num_read", "cursor", "is_lost")

    def __init__(self, guess: list[int], config: PredictionConfig) -> None:
        self._guess = guess
        self._config = config
        self._num_read = 0  # tokens of the output
        self._ends: dict[int, list[int]] | None = None  # n-gram -> its ends, ascending
        self.cursor = 0  # the guess's next token, or where the output left it
        self.is_lost = False

    def read(self, tokens: Seq[int], first: int) -> None:
        """Follows what the output `tokens[first:]` has gained since the last call."""
        guess = self._guess
        for end in range(first + self._num_read + 1, len(tokens) + 1):
            if not self.is_lost and guess[self.cursor : self.cursor + 1] == [tokens[end - 1]]:
                self.cursor += 1
            else:
                self._realign(tokens[max(first, end - self._config.max_n) : end])
        self._num_read = len(tokens) - first

    def _realign(self, ending: Seq[int]) -> None:
        if self._ends is None:
            self._ends = self._index()
        best: list[int] | None = None
        for key in suffix_keys(ending, len(ending), self._config.min_n, self._config.max_n):
            ends = self._ends.get(key)
            if ends is None:  # then no longer ending occurs either
                break
            best = ends
        self.is_lost = best is None
        if best is not None:
            at = bisect_left(best, self.cursor)  # an edit moves forward more often than back
            self.cursor = best[at] if at < len(best) else best[-1]

    def _index(self) -> dict[int, list[int]]:
        """Built at the first divergence: a perfect guess never needs it."""
        ends: dict[int, list[int]] = {}
        for end in range(1, len(self._guess) + 1):
            for key in suffix_keys(self._guess, end, self._config.min_n, self._config.max_n):
                ends.setdefault(key, []).append(end)
        return ends


class PredictionProposer:
    """Drafts from `view.prediction`; nothing for sequences without one."""

    name = "prediction"
    draws = frozenset({Draw.DETERMINISTIC})
    trees = False
    needs = Needs()

    def __init__(self, config: PredictionConfig | None = None) -> None:
        self.config = config or PredictionConfig()
        self._alignments: dict[int, Alignment] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> PredictionProposer:
        return cls(read_options(PredictionConfig, cls.name, context.options))

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return [
            Proposal(self._draft(view, budget), source=self.name)
            for view, budget in zip(views, budgets, strict=True)
        ]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: committed tokens are read when the next draft is asked for."""

    def release(self, sequence_id: int) -> None:
        self._alignments.pop(sequence_id, None)

    def _draft(self, view: SequenceView, budget: int) -> list[int]:
        if not view.prediction:
            return []
        alignment = self._alignments.get(view.id)
        if alignment is None:
            alignment = self._alignments[view.id] = Alignment(view.prediction, self.config)
        alignment.read(view.tokens, view.num_prompt_tokens)
        if alignment.is_lost:
            return []
        guessed = view.prediction[alignment.cursor : alignment.cursor + budget]
        return up_to_finish(guessed, view.finish_ids)
