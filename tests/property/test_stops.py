"""The stop scanner against a search of the whole text, whatever the pieces."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import example, given

from outrider.engine.stops import StopScanner

TEXT = st.text("abc", max_size=24)
STOPS = st.lists(st.text("abc", max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string to be complete, and that string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@given(text=TEXT, stops=STOPS, places=st.lists(st.integers(0, 100), max_size=10))
@example(text="abcd", stops=["abcd", "bc"], places=[3])
@example(text="aab", stops=["ab"], places=[1, 2])
def test_any_cut_gives_what_a_search_of_the_whole_gives(
    text: str, stops: list[str], places: list[int]
) -> None:
    scanner = StopScanner(stops)
    shown, fed, stopped_by = "", "", None
    for piece in cut(text, places):
        emit, stopped_by = scanner.feed(piece)
        shown, fed = shown + emit, fed + piece
        if stopped_by is not None:
            break
        # Held is exactly the longest end of the text that may still become a stop string.
        openings = {stop[:i] for stop in stops for i in range(1, len(stop))}
        held = max((o for o in openings if fed.endswith(o)), key=len, default="")
        assert shown == fed.removesuffix(held)
    else:
        shown += scanner.flush()
    assert (shown, stopped_by) == naive(text, stops)
    assert scanner.flush() == ""


def test_without_stops_everything_passes() -> None:
    scanner = StopScanner([])
    assert scanner.feed("anything") == ("anything", None)
    assert scanner.flush() == ""
