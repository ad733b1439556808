"""The newest traffic, as token ids: what a round of learning trains on and judges by.

Nothing here is written anywhere. The ids of a text are as private as the text: they leave memory
when newer ones need the room, and when the server ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

LENGTH = 384  # tokens of a row: bounds the memory and the time of one pass over it
LEAST_ANSWER = 12  # tokens; shorter ones say little


@dataclass(frozen=True, slots=True)
class Row:
    """The end of a prompt and the beginning of its answer."""

    tokens: tuple[int, ...]
    first: int  # index of the answer's first token
    temperature: float  # of the answer's draws
    number: int  # rows are counted from 0, all scopes together

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.first


@dataclass(slots=True)
class Collected:
    """The rows of one scope: of all clients, or of one key."""

    rows: deque[Row] = field(default_factory=deque)
    num_tokens: int = 0
    num_new: int = 0  # answer tokens since the last round


class Collector:
    """Keeps at most `most_tokens` tokens, all scopes together; the oldest go first."""

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.scopes: dict[str, Collected] = {}
        self.num_rows = 0
        self.num_tokens = 0

    def add(
        self, scope: str, prompt: Sequence[int], answer: Sequence[int], temperature: float
    ) -> None:
        """Keeps the last part of the prompt and the first of the answer; LENGTH tokens in all."""
        if len(answer) < LEAST_ANSWER:
            return
        answer = answer[: LENGTH * 2 // 3]
        prompt = prompt[-(LENGTH - len(answer)) :]
        row = Row((*prompt, *answer), len(prompt), temperature, self.num_rows)
        self.num_rows += 1
        kept = self.scopes.setdefault(scope, Collected())
        kept.rows.append(row)
        kept.num_new += row.num_answer
        self._count(kept, len(row.tokens))
        while self.num_tokens > self.most_tokens:
            self._drop_oldest()

    def _count(self, kept: Collected, num_tokens: int) -> None:
        kept.num_tokens += num_tokens
        self.num_tokens += num_tokens

    def _drop_oldest(self) -> None:
        scope, kept = min(self.scopes.items(), key=lambda item: item[1].rows[0].number)
        self._count(kept, -len(kept.rows.popleft().tokens))
        if not kept.rows:
            del self.scopes[scope]

    def ready(self, least_new: int) -> str | None:
        """The scope with the most new answer tokens, if they are enough for a round."""
        best = max(self.scopes, key=lambda scope: self.scopes[scope].num_new, default=None)
        if best is None or self.scopes[best].num_new < least_new:
            return None
        return best
