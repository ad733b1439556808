"""Drafts from a prediction of the output that the caller passes, such as the file to be edited.

The prediction is copied from its beginning for as long as the output agrees. After a difference,
the output's longest ending is looked up in the prediction, and copying continues at its first
occurrence after the difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import ProposerContext, SequenceView
from outrider.draft_plans import DraftPlan, Propose, Script
from outrider.proposers._lookup import Draft, LookupProposer, check_lookup
from outrider.proposers.ngram_index import suffix_keys, trusted_length, up_to_finish
from outrider.proposers.options import read_options

_FIRST_TRUST = 4  # a prediction without rejections counts like this many agreements


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionConfig:
    """Endings of `min_n` to `max_n` tokens are looked up.

    The longer the output has agreed since, the longer the draft, times `factor`.
    """

    min_n: int = 1
    max_n: int = 4
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_lookup("prediction", self.min_n, self.max_n, self.factor)


class Alignment:
    """The place in the prediction that an output has reached. It does not depend on how the output
    was cut into steps."""

    __slots__ = ("_config", "_ends", "_guess", "_num_read", "cursor", "is_lost", "num_agreed")

    def __init__(self, guess: list[int], config: PredictionConfig) -> None:
        self._guess = guess
        self._config = config
        self._num_read = 0  # tokens of the output
        self._ends: dict[int, list[int]] | None = None  # n-gram -> its ends, ascending
        self.cursor = 0  # the prediction's next token, or where the output left it
        self.is_lost = False
        self.num_agreed = _FIRST_TRUST  # tokens in a row

    def read(self, tokens: Seq[int], first: int) -> None:
        """Reads the tokens that the output `tokens[first:]` gained since the last call."""
        guess = self._guess
        for end in range(first + self._num_read + 1, len(tokens) + 1):
            if not self.is_lost and guess[self.cursor : self.cursor + 1] == [tokens[end - 1]]:
                self.cursor += 1
                self.num_agreed += 1
            else:
                self._realign(tokens[max(first, end - self._config.max_n) : end])
        self._num_read = len(tokens) - first

    def _realign(self, ending: Seq[int]) -> None:
        if self._ends is None:
            self._ends = self._index()
        best: list[int] | None = None
        self.num_agreed = 0
        keys = suffix_keys(ending, len(ending), self._config.min_n, self._config.max_n)
        for n, key in enumerate(keys, self._config.min_n):
            ends = self._ends.get(key)
            if ends is None:  # then no longer ending occurs
                break
            best = ends
            self.num_agreed = n
        self.is_lost = best is None
        if best is not None:
            at = bisect_left(best, self.cursor)  # an edit moves forward more often than back
            self.cursor = best[at] if at < len(best) else best[-1]

    def _index(self) -> dict[int, list[int]]:
        """Built at the first difference: a perfect prediction never needs it."""
        ends: dict[int, list[int]] = {}
        for end in range(1, len(self._guess) + 1):
            for key in suffix_keys(self._guess, end, self._config.min_n, self._config.max_n):
                ends.setdefault(key, []).append(end)
        return ends


class PredictionProposer(LookupProposer):
    """Drafts from `view.prediction`; nothing for sequences without one."""

    name = "prediction"
    trees = False

    def __init__(self, config: PredictionConfig | None = None) -> None:
        self.config = config or PredictionConfig()
        self._alignments: dict[int, Alignment] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> PredictionProposer:
        return cls(read_options(PredictionConfig, cls.name, context.options))

    def release(self, sequence_id: int) -> None:
        self._alignments.pop(sequence_id, None)

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        """Copies the prediction for as long as the target agrees."""
        num_tokens = [
            len(self._guessed(view, budget)) for view, budget in zip(views, budgets, strict=True)
        ]
        if not all(num_tokens):
            return Propose()
        texts = [
            self._guessed(view, max_steps * (k + 1), trust=True)
            for view, k in zip(views, num_tokens, strict=True)
        ]
        right = [range(len(text), 0, -1) for text in texts]
        return Script(self.name, texts, right, num_tokens, copies=True)

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        return Draft(self._guessed(view, budget))

    def _guessed(self, view: SequenceView, budget: int, *, trust: bool = False) -> list[int]:
        """At most `budget` tokens; `trust`: draft at least as many after any match."""
        if not view.prediction:
            return []
        alignment = self._alignments.get(view.id)
        if alignment is None:
            alignment = self._alignments[view.id] = Alignment(view.prediction, self.config)
        alignment.read(view.tokens, view.num_prompt_tokens)
        if alignment.is_lost:
            return []
        if not trust:
            budget = min(budget, trusted_length(alignment.num_agreed, self.config.factor))
        guessed = view.prediction[alignment.cursor : alignment.cursor + budget]
        return up_to_finish(guessed, view.finish_ids)
