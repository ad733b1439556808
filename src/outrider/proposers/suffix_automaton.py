"""Every substring of some texts and how often it occurs, in linear memory, token by token.

A suffix automaton (Blumer et al. 1985) has one state per set of places where substrings end: all
substrings that always occur together share one, so n tokens make at most 2n states. The longest
of a state's substrings has `_length` tokens; its `_link` is the state of the longest ending that
occurs in more places. The links lead through all endings of a text, from rare to frequent.

Counting follows all links for every token, and they can be as many as the tokens of the text ("a a
a a ..."). So a *context* is at most `depth` tokens: counts are exact for substrings up to there,
longer ones are judged by their last `depth` tokens, and a token costs at most `depth` links.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain

ROOT = 0
_NONE = -1

# A state and a length in tokens. Valid until the next `append`: states may be split.
Context = tuple[int, int]


class SuffixAutomaton:
    """Grows by `append`; `begin` starts another text. Nothing is ever removed.

    Most states have exactly one continuation, kept in two arrays; only the others have a
    dictionary.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.num_tokens = 0  # of all texts
        self._length = array("i", [0])
        self._link = array("i", [_NONE])
        self._count = array("i", [0])
        self._token = array("i", [_NONE])  # the first continuation ...
        self._next = array("i", [_NONE])  # ... and its state
        self._branches: dict[int, dict[int, int]] = {}  # all other continuations
        self.begin()

    def begin(self) -> None:
        """The next token starts a new text."""
        self._last = ROOT  # the whole text
        self._tail: Context = (ROOT, 0)  # its ending: a context and the token that follows it

    def append(self, token: int) -> None:
        self._last = self._extend(self._last, token)
        # The new token may have split the tail's state: find it again.
        state, size = self._shorten(*self._tail, self.depth)
        self._tail = self._shorten(self._get(state, token), size + 1, self.depth + 1)
        self.num_tokens += 1
        state = self._tail[0]
        while state != _NONE:
            self._count[state] += 1
            state = self._link[state]

    def advance(self, context: Context, token: int) -> Context:
        """The longest ending of `context + token` that occurs in the texts."""
        state, size = context
        following = self._get(state, token)
        while following == _NONE:
            state = self._link[state]
            if state == _NONE:
                return ROOT, 0
            size = self._length[state]
            following = self._get(state, token)
        return self._shorten(following, size + 1, self.depth)

    def find(self, tokens: Sequence[int]) -> Context:
        """The longest ending of `tokens` that occurs, up to `depth`."""
        context = (ROOT, 0)
        for i in range(max(0, len(tokens) - self.depth), len(tokens)):
            context = self.advance(context, tokens[i])
        return context

    def repeated_tail(self) -> Context:
        """The longest ending of the text being written that occurs elsewhere too, up to `depth`."""
        state, size = self._shorten(*self._tail, self.depth)
        return (state, size) if self._count[state] > 1 else self.shorter((state, size))

    def shorter(self, context: Context) -> Context:
        """The longest ending of `context` that occurs in more places; the root is its own."""
        state = self._link[context[0]]
        return (state, self._length[state]) if state != _NONE else (ROOT, 0)

    def followers(self, context: Context) -> list[tuple[int, int]]:
        """(token, count) for every token seen right after `context`."""
        return [(token, self._count[state]) for token, state in self._ways(context[0])]

    @property
    def num_states(self) -> int:
        return len(self._length)

    def _get(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        branches = self._branches.get(state)
        return branches.get(token, _NONE) if branches is not None else _NONE

    def _set(self, state: int, token: int, following: int) -> None:
        if self._token[state] in (token, _NONE):
            self._token[state] = token
            self._next[state] = following
        else:
            self._branches.setdefault(state, {})[token] = following

    def _ways(self, state: int) -> Iterator[tuple[int, int]]:
        first = [(self._token[state], self._next[state])] if self._next[state] != _NONE else []
        return chain(first, self._branches.get(state, {}).items())

    def _shorten(self, state: int, size: int, limit: int) -> Context:
        """The last `min(size, limit)` tokens of a substring of `size` tokens in `state`."""
        size = min(size, limit)
        while self._link[state] != _NONE and self._length[self._link[state]] >= size:
            state = self._link[state]
        return state, size

    def _new_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._count.append(0)
        self._token.append(_NONE)
        self._next.append(_NONE)
        return len(self._length) - 1

    def _extend(self, last: int, token: int) -> int:
        """The state of `last`'s text with one more token."""
        known = self._get(last, token)
        if known != _NONE:  # an earlier text begins in the same way
            return self._split(last, token, known)
        new = self._new_state(self._length[last] + 1)
        state = last
        while state != _NONE and (known := self._get(state, token)) == _NONE:
            self._set(state, token, new)
            state = self._link[state]
        self._link[new] = ROOT if state == _NONE else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, following: int) -> int:
        """The state whose longest substring is `state`'s longest and then `token`.

        That is `following`, unless longer substrings share it. Then the shorter ones move to a new
        state, because they are about to occur at a place where the longer ones do not.
        """
        length = self._length[state] + 1
        if self._length[following] == length:
            return following
        new = self._new_state(length)
        self._link[new] = self._link[following]
        self._count[new] = self._count[following]
        self._token[new] = self._token[following]
        self._next[new] = self._next[following]
        if following in self._branches:
            self._branches[new] = dict(self._branches[following])
        self._link[following] = new
        while state != _NONE and self._get(state, token) == following:
            self._set(state, token, new)
            state = self._link[state]
        return new
