"""Toy models: exact context-dependent laws over a few tokens, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from random import Random

from outrider.prove.enumerate import Model, Tokens
from outrider.prove.reference import ZERO, Law, normalised, one_hot


def fixed(*weights: int) -> Model:
    """The same law after every prefix."""
    law = _law(list(weights))
    return lambda context: law


def hashed(seed: int, size: int, *, grain: int = 8, zeros: float = 0.0) -> Model:
    """An arbitrary law for every prefix: weights 1..grain, some of them zero."""

    @cache
    def law(context: Tokens) -> Law:
        random = Random(f"{seed}:{context}")
        weights = [0 if random.random() < zeros else random.randint(1, grain) for _ in range(size)]
        if not any(weights):
            weights[random.randrange(size)] = 1
        return _law(weights)

    return law


def top_k(model: Model, k: int) -> Model:
    """Only the k most probable tokens, ties to the lower id, renormalised."""
    return _filtered(model, lambda law, order: set(order[:k]))


def top_p(model: Model, mass: Fraction) -> Model:
    """The smallest set of most probable tokens that reaches `mass`, renormalised."""

    def kept(law: Law, order: list[int]) -> set[int]:
        tokens: set[int] = set()
        for v in order:
            if sum((law[w] for w in tokens), ZERO) >= mass:
                break
            tokens.add(v)
        return tokens

    return _filtered(model, kept)


def greedy(model: Model) -> Model:
    """One-hot at the most probable token: temperature zero."""
    return top_k(model, 1)


def only(model: Model, tokens: set[int]) -> Model:
    """Restricted to some tokens and renormalised; one of them where the model has none."""

    def law(context: Tokens) -> Law:
        full = model(context)
        kept = [p if v in tokens else ZERO for v, p in enumerate(full)]
        return normalised(kept, one_hot(min(tokens), len(full)))

    return law


def argmax(law: Law) -> int:
    """The most probable token, ties to the lower id."""
    return _order(law)[0]


def _order(law: Law) -> list[int]:
    return sorted(range(len(law)), key=lambda v: (-law[v], v))


def _filtered(model: Model, kept: Callable[[Law, list[int]], set[int]]) -> Model:
    def law(context: Tokens) -> Law:
        full = model(context)
        tokens = kept(full, _order(full))
        return normalised([p if v in tokens else ZERO for v, p in enumerate(full)], full)

    return law


def _law(weights: list[int]) -> Law:
    return tuple(Fraction(w, sum(weights)) for w in weights)
