"""The origin and verdict of each token of a step, for everything that shows steps."""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.events import StepEvent
    from outrider.model.tokenizer import Tokenizer

Spelling = Callable[[int], str]


class Kind(enum.Enum):
    """The verdict on a token: value is (mark, style)."""

    ACCEPTED = ("✓", "green underline")
    REJECTED = ("✗", "red strike")
    CORRECTION = ("→", "bold yellow")
    BONUS = ("+", "italic cyan")
    TARGET = ("", "none")  # nothing was drafted: plain decoding
    UNUSED = ("…", "dim strike")  # drafted past the end of the output: never judged

    @property
    def mark(self) -> str:
        return self.value[0]

    @property
    def style(self) -> str:
        return self.value[1]


def judged(event: StepEvent) -> list[tuple[Kind, int]]:
    """A step's tokens in reading order: accepted, the rejected draft, then the target's own."""
    drafted, path = event.draft_tokens, event.path
    own = event.tokens[len(path) :]
    leftover = Kind.REJECTED if own else Kind.UNUSED
    kept = set(path)
    tokens = [(Kind.ACCEPTED, drafted[node]) for node in path]
    tokens += [(leftover, token) for node, token in enumerate(drafted) if node not in kept]
    return tokens + [(_own_kind(event), token) for token in own]


def _own_kind(event: StepEvent) -> Kind:
    if not event.draft_tokens:
        return Kind.TARGET
    last = event.path[-1] if event.path else -1
    parents = event.draft_parents
    if parents is None:
        parents = list(range(-1, len(event.draft_tokens) - 1))
    return Kind.CORRECTION if last in parents else Kind.BONUS


def spelling(tokenizer: Tokenizer) -> Spelling:
    """A token's text including a leading space, which some decoders drop at the start of a text."""

    @cache
    def spell(token: int) -> str:
        once = tokenizer.decode([token], skip_special=False)
        twice = tokenizer.decode([token, token], skip_special=False)
        return twice[len(once) :] if twice.startswith(once) else once

    return spell
