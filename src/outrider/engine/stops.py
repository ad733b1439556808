"""Stop strings in text that arrives in pieces.

Shown text cannot be taken back, so the end of the text is held while it could still grow into a
stop string, and not a character longer: what is held is always the longest suffix of the text
that is a proper prefix of some stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Feed text; get what may be shown, and which stop string ended it. One per sequence.

    The stop string that is complete first wins; of two that are complete at once, the longer.
    So the outcome does not depend on how the text was cut into pieces. Empty stops are ignored.
    """

    __slots__ = ("_held", "_longest", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._prefixes = {stop[:i] for stop in self._stops for i in range(1, len(stop))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What may now be shown, and the stop string that was found (None: go on).

        A stop string and what follows it are dropped; the scanner is then empty.
        """
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, start = min(hits)
            self._held = ""
            return text[:start], text[start:end]
        cut = self._first_open(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The held text: the output ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held

    def _first_open(self, text: str) -> int:
        """Where the longest suffix begins that may still become a stop string."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
