"""Random steps of drafts over a text, for the property tests of recurrent states."""

from __future__ import annotations

import hypothesis.strategies as st

TOKEN = st.integers(0, 63)
MOST_TOKENS = 100

STEP = st.tuples(
    st.lists(TOKEN, min_size=1, max_size=7),  # a chunk, or the last token and drafts
    st.integers(0, 7),  # how many of them are kept
    st.lists(st.integers(-1, 5), max_size=7),  # parents, if it is a tree
)


def accepted(
    tokens: list[int], num_kept: int, above: list[int]
) -> tuple[list[int] | None, list[int]]:
    """The parents, if it is a tree, and the nodes that are kept."""
    if len(above) != len(tokens):
        return None, list(range(min(num_kept, len(tokens))))
    parents = [min(parent, node - 1) for node, parent in enumerate(above)]
    node = min(num_kept, len(tokens)) - 1
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return parents, path
