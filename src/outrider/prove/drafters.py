"""Correct drafters for the enumeration: every way to draw, with the true distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from outrider.prove.enumerate import Drafter, Model, StepChance, Tokens
from outrider.prove.reference import ZERO, Distribution, Draft, normalised, one_hot
from outrider.prove.toys import argmax

Kind = Literal["sampled", "distinct", "top", "coupled"]
# Decided before a token is drawn, from the tokens before it and its distribution.
Stop = Callable[[Tokens, Distribution], bool]
# Decided after a token was drawn; the token stays in the draft.
Halt = Callable[[int, Distribution], bool]


def chain(num_drafts: int) -> Tokens:
    """The parents of a chain."""
    return tuple(range(-1, num_drafts - 1))


def drafter(
    model: Model,
    parents: Sequence[int],
    kinds: Kind | Sequence[Kind] = "sampled",
    *,
    stop: Stop | None = None,
    halt: Halt | None = None,
    eos: int | None = None,
) -> Drafter:
    """Draws a tree of the given shape, node by node.

    sampled: from the model's distribution. distinct: the same without earlier siblings. top: the
    most probable token without earlier siblings. coupled: with the target's noise.
    A node is left out if `stop` returns True, if its parent is left out, is EOS or `halt`s, or if
    its siblings leave no token.
    """
    all_kinds = [kinds] * len(parents) if isinstance(kinds, str) else list(kinds)

    def draft(context: Tokens, chance: StepChance) -> Draft:
        tree = Draft()
        place: dict[int, int] = {-1: -1}  # node of the shape -> node of the draft
        for shape_node, parent in enumerate(parents):
            if parent not in place:
                continue
            before = tree.tokens_to(place[parent])
            dist = model(context + before)
            if stop is not None and stop(before, dist):
                continue
            siblings = [tree.tokens[c] for c in tree.children(place[parent])]
            drawn = _draw(all_kinds[shape_node], dist, siblings, len(before), len(tree), chance)
            if drawn is None:
                continue
            token, said = drawn
            if token != eos and (halt is None or not halt(token, dist)):
                place[shape_node] = len(tree)
            tree = Draft((*tree.tokens, token), (*tree.parents, place[parent]), (*tree.dists, said))
        return tree

    return draft


def _draw(
    kind: Kind, dist: Distribution, siblings: list[int], depth: int, node: int, chance: StepChance
) -> tuple[int, Distribution] | None:
    """A token and the distribution it was drawn from; None if no token is left."""
    if kind == "coupled":
        return chance.target(depth, dist), dist
    if kind == "sampled":
        return chance.draft(node, depth, dist), dist
    left = [ZERO if v in siblings else p for v, p in enumerate(dist)]
    if not any(left):
        return None
    rest = normalised(left, dist)
    if kind == "top":
        token = argmax(rest)
        return token, one_hot(token, len(dist))
    return chance.draft(node, depth, rest), rest
