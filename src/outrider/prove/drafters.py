"""Honest drafters for the enumeration: every way a proposal may be drawn, with its true law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from outrider.prove.enumerate import Drafter, Model, StepChance, Tokens
from outrider.prove.reference import ZERO, Draft, Law, normalised, one_hot
from outrider.prove.toys import argmax

Kind = Literal["sampled", "distinct", "top", "coupled"]
# Decided before a token is drawn, from what precedes it and the law it would be drawn from.
Stop = Callable[[Tokens, Law], bool]
# Decided after a token was drawn; the token stays in the draft.
Halt = Callable[[int, Law], bool]


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

    sampled: from the model's law. distinct: the same, earlier siblings removed. top: the most
    probable token that no earlier sibling took. coupled: with the target's noise.
    A node is left out when `stop` says so, when its parent is (or is EOS, or `halt`s), or when
    its siblings used up the law.
    """
    all_kinds = [kinds] * len(parents) if isinstance(kinds, str) else list(kinds)

    def draft(context: Tokens, chance: StepChance) -> Draft:
        tree = Draft()
        place: dict[int, int] = {-1: -1}  # node of the shape -> node of the draft
        for shape_node, parent in enumerate(parents):
            if parent not in place:
                continue
            before = tree.tokens_to(place[parent])
            law = model(context + before)
            if stop is not None and stop(before, law):
                continue
            siblings = [tree.tokens[c] for c in tree.children(place[parent])]
            drawn = _draw(all_kinds[shape_node], law, siblings, len(before), len(tree), chance)
            if drawn is None:
                continue
            token, said = drawn
            if token != eos and (halt is None or not halt(token, law)):
                place[shape_node] = len(tree)
            tree = Draft((*tree.tokens, token), (*tree.parents, place[parent]), (*tree.laws, said))
        return tree

    return draft


def _draw(
    kind: Kind, law: Law, siblings: list[int], depth: int, node: int, chance: StepChance
) -> tuple[int, Law] | None:
    """A token and the law it was drawn from; None when no token is left."""
    if kind == "coupled":
        return chance.target(depth, law), law
    if kind == "sampled":
        return chance.draft(node, depth, law), law
    left = [ZERO if v in siblings else p for v, p in enumerate(law)]
    if not any(left):
        return None
    rest = normalised(left, law)
    if kind == "top":
        token = argmax(rest)
        return token, one_hot(token, len(law))
    return chance.draft(node, depth, rest), rest
