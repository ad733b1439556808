"""Toy models: exact context-dependent distributions over a few tokens, and changes to them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from random import Random

from outrider.prove.enumerate import Model, Tokens
from outrider.prove.reference import ZERO, Distribution, normalised, one_hot


def fixed(*weights: int) -> Model:
    """The same distribution after every prefix."""
    dist = _dist(list(weights))
    return lambda context: dist


def hashed(seed: int, size: int, *, grain: int = 8, zeros: float = 0.0) -> Model:
    """An arbitrary distribution for every prefix: weights 1..grain, some of them zero."""

    @cache
    def dist(context: Tokens) -> Distribution:
        random = Random(f"{seed}:{context}")
        weights = [0 if random.random() < zeros else random.randint(1, grain) for _ in range(size)]
        if not any(weights):
            weights[random.randrange(size)] = 1
        return _dist(weights)

    return dist


def top_k(model: Model, k: int) -> Model:
    """Only the k most probable tokens, ties to the lower id, renormalised."""
    return _filtered(model, lambda dist, order: set(order[:k]))


def top_p(model: Model, mass: Fraction) -> Model:
    """The smallest set of most probable tokens that reaches `mass`, renormalised."""

    def kept(dist: Distribution, order: list[int]) -> set[int]:
        tokens: set[int] = set()
        for v in order:
            if sum((dist[w] for w in tokens), ZERO) >= mass:
                break
            tokens.add(v)
        return tokens

    return _filtered(model, kept)


def greedy(model: Model) -> Model:
    """One-hot at the most probable token: temperature zero."""
    return top_k(model, 1)


def only(model: Model, tokens: set[int]) -> Model:
    """Restricted to some tokens and renormalised; one-hot if the model has none of them."""

    def dist(context: Tokens) -> Distribution:
        full = model(context)
        kept = [p if v in tokens else ZERO for v, p in enumerate(full)]
        return normalised(kept, one_hot(min(tokens), len(full)))

    return dist


def argmax(dist: Distribution) -> int:
    """The most probable token, ties to the lower id."""
    return _order(dist)[0]


def _order(dist: Distribution) -> list[int]:
    return sorted(range(len(dist)), key=lambda v: (-dist[v], v))


def _filtered(model: Model, kept: Callable[[Distribution, list[int]], set[int]]) -> Model:
    def dist(context: Tokens) -> Distribution:
        full = model(context)
        tokens = kept(full, _order(full))
        return normalised([p if v in tokens else ZERO for v, p in enumerate(full)], full)

    return dist


def _dist(weights: list[int]) -> Distribution:
    return tuple(Fraction(w, sum(weights)) for w in weights)
