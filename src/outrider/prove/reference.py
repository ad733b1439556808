"""Every acceptance rule in plain Python over exact numbers: the definition of the rules.

Tests compare the tensor verifiers with these functions decision by decision, and enumeration proves
these functions (`outrider.prove.enumerate`). Probabilities are Fractions; any type with exact
arithmetic and comparison works.

A rule takes the target's distributions (row 0 at the root, row 1 + j after node j), a draft and a
`Chance` that answers its random questions. It returns the accepted path and the distribution of the
next token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

Distribution = tuple[Fraction, ...]

ZERO, ONE = Fraction(0), Fraction(1)


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of drafted tokens. `dists[j]` is the distribution that the drafter *reports* for node
    j, given that its earlier siblings failed; for a deterministic child it is one-hot."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    dists: tuple[Distribution, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def path_to(self, node: int) -> tuple[int, ...]:
        """Node indices from the root's child down to `node`; empty for the root, -1."""
        return () if node < 0 else (*self.path_to(self.parents[node]), node)

    def tokens_to(self, node: int) -> tuple[int, ...]:
        return tuple(self.tokens[i] for i in self.path_to(node))

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]


class Decision(NamedTuple):
    path: tuple[int, ...]
    dist: Distribution


class Chance(Protocol):
    """The random questions of a rule."""

    def below(self, node: int, threshold: Fraction) -> bool:
        """Whether this step's uniform of `node` is below `threshold`."""
        ...

    def target(self, depth: int, dist: Distribution) -> int:
        """The target's own draw from `dist`, `depth` tokens after the committed ones."""
        ...


Rule = Callable[[Sequence[Distribution], Draft, Chance], Decision]


def one_hot(token: int, size: int) -> Distribution:
    return tuple(ONE if v == token else ZERO for v in range(size))


def normalised(weights: Sequence[Fraction], otherwise: Distribution) -> Distribution:
    """weights / sum; `otherwise` if the sum is 0 (a branch of probability zero)."""
    mass = sum(weights, ZERO)
    return tuple(w / mass for w in weights) if mass else otherwise


def residual(p: Distribution, q: Distribution, weight: Fraction = ONE) -> list[Fraction]:
    """max(0, weight * p - q)."""
    return [max(ZERO, weight * a - b) for a, b in zip(p, q, strict=True)]


def keep_probability(mass: Fraction, weight: Fraction) -> Fraction:
    """Z / (Z + 1 - w), with 0/0 = 1."""
    owed = mass + 1 - weight
    return mass / owed if owed else ONE


def coupled(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """Sample-match: emits the target's own draw; a draft is accepted if it agrees."""
    path: list[int] = []
    node = -1
    while True:
        dist = p_rows[node + 1]
        drawn = chance.target(len(path), dist)
        agreed = [c for c in draft.children(node) if draft.tokens[c] == drawn]
        if not agreed:
            return Decision(tuple(path), one_hot(drawn, len(dist)))
        node = agreed[0]
        path.append(node)


def token(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """Accepts x with probability min(1, p(x)/q(x)); else one token from norm(max(0, p - q))."""
    for i, x in enumerate(draft.tokens):
        p, q = p_rows[i], draft.dists[i]
        if not chance.below(i, p[x] / q[x]):
            return Decision(tuple(range(i)), normalised(residual(p, q), p))
    return Decision(tuple(range(len(draft))), p_rows[len(draft)])


def block(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """The capped joint ratio, scanned from the end of the draft."""
    weights = [ONE]
    for i, x in enumerate(draft.tokens):
        weights.append(min(ONE, weights[-1] * p_rows[i][x] / draft.dists[i][x]))
    num_drafts = len(draft)
    if num_drafts == 0 or chance.below(num_drafts - 1, weights[-1]):
        return Decision(tuple(range(num_drafts)), p_rows[num_drafts])
    for kept in range(num_drafts - 1, 0, -1):
        rest = residual(p_rows[kept], draft.dists[kept], weights[kept])
        if chance.below(kept - 1, keep_probability(sum(rest, ZERO), weights[kept])):
            return Decision(tuple(range(kept)), normalised(rest, p_rows[kept]))
    return Decision((), normalised(residual(p_rows[0], draft.dists[0]), p_rows[0]))


def tree(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """The trial-list rule, as a recursion over nodes."""
    decision = _visit(-1, ONE, p_rows, draft, chance)
    assert decision is not None, "the root's weight never leaves 1"
    return decision


def _visit(
    node: int, weight: Fraction, p_rows: Sequence[Distribution], draft: Draft, chance: Chance
) -> Decision | None:
    """Tries the children in order, then the node itself; None: rejected, the parent continues."""
    dist = p_rows[node + 1]
    for child in draft.children(node):
        x, q = draft.tokens[child], draft.dists[child]
        below = _visit(child, min(ONE, weight * dist[x] / q[x]), p_rows, draft, chance)
        if below is not None:
            return below
        rest = residual(dist, q, weight)
        weight = keep_probability(sum(rest, ZERO), weight)
        dist = normalised(rest, dist)
    if node < 0 or chance.below(node, weight):
        return Decision(draft.path_to(node), dist)
    return None


RULES: dict[str, Rule] = {"coupled": coupled, "token": token, "block": block, "tree": tree}
