"""Wrong rules and wrong drafters, by name: the proof must find each of them.

Each is a mistake from published texts or code. All look plausible, are faster, and change the
output distribution. An `Injection` contains the toy on which the mistake is measured and the range
of its total variation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from outrider.prove.drafters import chain, drafter
from outrider.prove.enumerate import Drafter, Experiment, Model, StepChance, Tokens
from outrider.prove.reference import (
    ONE,
    ZERO,
    Chance,
    Decision,
    Distribution,
    Draft,
    Rule,
    block,
    keep_probability,
    normalised,
    one_hot,
    residual,
    token,
    tree,
)
from outrider.prove.toys import argmax, fixed, hashed, only, top_k

# --- wrong rules ---------------------------------------------------------------------------


def replace_from_p(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """The token rule, but the replacement comes from p instead of the residual."""
    path, _ = token(p_rows, draft, chance)
    return Decision(path, p_rows[len(path)])


def uncapped_block(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """The block rule with the plain product of ratios: capped only where it is a probability."""
    joint = [ONE]
    for i, x in enumerate(draft.tokens):
        joint.append(joint[-1] * p_rows[i][x] / draft.dists[i][x])
    num_drafts = len(draft)
    if num_drafts == 0 or chance.below(num_drafts - 1, joint[-1]):
        return Decision(tuple(range(num_drafts)), p_rows[num_drafts])
    for kept in range(num_drafts - 1, -1, -1):
        rest = residual(p_rows[kept], draft.dists[kept], joint[kept])
        keep = keep_probability(sum(rest, ZERO), min(ONE, joint[kept]))
        if kept == 0 or chance.below(kept - 1, keep):
            break
    return Decision(tuple(range(kept)), normalised(rest, p_rows[kept]))


def typical_acceptance(p_rows: Sequence[Distribution], draft: Draft, chance: Chance) -> Decision:
    """Medusa's rule: accept x if p(x) > min(eps, delta exp(-H(p))), continue with the argmax."""
    epsilon, delta = 0.3, 0.09
    kept = 0
    for p, x in zip(p_rows, draft.tokens, strict=False):
        entropy = -sum(float(v) * math.log(v) for v in p if v)
        if not p[x] > min(epsilon, delta * math.exp(-entropy)):
            break
        kept += 1
    dist = p_rows[kept]
    return Decision(tuple(range(kept)), one_hot(argmax(dist), len(dist)))


# --- dishonest drafters --------------------------------------------------------------------


def _claims(honest: Drafter, claim: Callable[[Tokens], Distribution]) -> Drafter:
    """The same tokens with another reported distribution: `claim` of the node's context."""

    def draft(context: Tokens, chance: StepChance) -> Draft:
        drawn = honest(context, chance)
        dists = tuple(claim(context + drawn.tokens_to(parent)) for parent in drawn.parents)
        return Draft(drawn.tokens, drawn.parents, dists)

    return draft


def _cut(honest: Drafter, length: Callable[[Draft], int]) -> Drafter:
    """Submits only the first `length` tokens, chosen *after* they were drawn."""

    def draft(context: Tokens, chance: StepChance) -> Draft:
        drawn = honest(context, chance)
        n = length(drawn)
        return Draft(drawn.tokens[:n], drawn.parents[:n], drawn.dists[:n])

    return draft


def confident_prefix(draft: Draft, floor: Fraction = Fraction(1, 4)) -> int:
    """The number of tokens before the first one that is improbable under q."""
    for i, (x, q) in enumerate(zip(draft.tokens, draft.dists, strict=True)):
        if q[x] < floor:
            return i
    return len(draft)


def best_length(draft: Draft, cost: Fraction = Fraction(1, 3)) -> int:
    """The length with the most expected tokens per unit of cost, chosen afterwards."""
    expected, survival = [ONE], ONE
    for x, q in zip(draft.tokens, draft.dists, strict=True):
        survival *= q[x]
        expected.append(expected[-1] + survival)
    return max(range(len(expected)), key=lambda n: expected[n] / (1 + n * cost))


def best_of_two(model: Model, num_drafts: int) -> Drafter:
    """Every token is the likelier of two draws, reported as one draw."""

    def draft(context: Tokens, chance: StepChance) -> Draft:
        tokens: Tokens = ()
        dists: tuple[Distribution, ...] = ()
        for i in range(num_drafts):
            q = model(context + tokens)
            pair = [chance.inner((i, j), q) for j in range(2)]
            tokens, dists = (*tokens, max(pair, key=lambda v: q[v])), (*dists, q)
        return Draft(tokens, chain(num_drafts), dists)

    return draft


def pruned_by_score(model: Model) -> Drafter:
    """Two sampled children, of which only the likelier is submitted with a child of its own."""
    honest = drafter(model, (-1, -1))

    def draft(context: Tokens, chance: StepChance) -> Draft:
        pair = honest(context, chance)
        x = max(pair.tokens, key=lambda v: pair.dists[0][v])
        q = model((*context, x))
        return Draft((x, chance.draft(2, 1, q)), (-1, 0), (pair.dists[0], q))

    return draft


def lossy_level(middle: Model, bottom: Model) -> Model:
    """The distribution of an inner replace-from-p level, instead of the middle model's own."""

    def dist(context: Tokens) -> Distribution:
        m, b = middle(context), bottom(context)
        kept = [min(x, y) for x, y in zip(m, b, strict=True)]
        refused = 1 - sum(kept, ZERO)
        return tuple(k + refused * x for k, x in zip(kept, m, strict=True))

    return dist


def intersection(model: Model, shared: set[int]) -> Model:
    """q without the tokens that the target lacks, and *not* renormalised."""
    return lambda context: tuple(q if v in shared else ZERO for v, q in enumerate(model(context)))


# --- the list ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Injection:
    """A named mistake: an experiment built from a target and a draft model, and its own toy."""

    name: str
    what: str
    build: Callable[[Model, Model], Experiment]
    target: Model
    draft: Model
    low: float  # total variation on the toy
    high: float

    def experiment(self) -> Experiment:
        return self.build(self.target, self.draft)


def _with(
    rule: Rule,
    make: Callable[[Model], Drafter],
    horizon: int,
    num_steps: int = 1,
    reused: frozenset[str] = frozenset(),
) -> Callable[[Model, Model], Experiment]:
    return lambda p, q: Experiment(
        target=p,
        drafter=make(q),
        rule=rule,
        horizon=horizon,
        num_steps=num_steps,
        reused=reused,
    )


_BOTTOM = hashed(999, 3)
_SHARED = {0, 1}


def _injection(
    name: str,
    what: str,
    build: Callable[[Model, Model], Experiment],
    toy: int,
    low: float,
    high: float,
    size: int = 3,
) -> Injection:
    return Injection(name, what, build, hashed(toy, size), hashed(toy + 100, size), low, high)


_ALL = [
    Injection(
        "replace-from-p",
        "after a rejection the replacement is drawn from p",
        _with(replace_from_p, lambda q: drafter(q, chain(1)), 1),
        fixed(1, 1),
        fixed(9, 1),
        0.2,
        0.2,
    ),
    _injection(
        "greedy-as-soft",
        "the argmax of q is drafted but scored with its soft probability",
        _with(token, lambda q: _claims(drafter(q, chain(2), "top"), q), 3),
        4,
        0.37,
        0.58,
    ),
    _injection(
        "top-k-as-raw",
        "drafts are drawn from top-k of q but scored with the raw q",
        _with(token, lambda q: _claims(drafter(top_k(q, 2), chain(2)), q), 3),
        10,
        0.125,
        0.135,
    ),
    _injection(
        "best-of-two",
        "the likelier of two drafts is submitted as if it were one draw",
        _with(token, lambda q: best_of_two(q, 2), 3),
        9,
        0.145,
        0.155,
    ),
    _injection(
        "distinct-as-independent",
        "siblings drawn without replacement are judged as independent draws",
        _with(tree, lambda q: _claims(drafter(q, (-1, -1), "distinct"), q), 2),
        32,
        0.025,
        0.035,
    ),
    _injection(
        "discard-low-confidence",
        "a drafted token that q finds unlikely is discarded",
        _with(token, lambda q: _cut(drafter(q, chain(2)), confident_prefix), 3),
        1,
        0.15,
        0.19,
    ),
    _injection(
        "retrospective-length",
        "the draft is cut afterwards where it looks best",
        _with(token, lambda q: _cut(drafter(q, chain(3)), best_length), 4),
        12,
        0.065,
        0.075,
    ),
    _injection(
        "cascade-bottom-q",
        "the middle model's verified output is scored with the bottom model's q",
        _with(token, lambda q: _claims(drafter(q, chain(2)), _BOTTOM), 3),
        3,
        0.15,
        0.25,
    ),
    _injection(
        "lossy-inner-level",
        "the inner level of a cascade is lossy, the outer one relies on it",
        _with(token, lambda q: _claims(drafter(lossy_level(q, _BOTTOM), chain(2)), q), 3),
        8,
        0.07,
        0.10,
    ),
    _injection(
        "unnormalised-intersection",
        "drafts come from the shared vocabulary, q is not renormalised to it",
        _with(
            token,
            lambda q: _claims(drafter(only(q, _SHARED), chain(2)), intersection(q, _SHARED)),
            3,
        ),
        18,
        0.215,
        0.225,
    ),
    _injection(
        "typical-acceptance",
        "drafts are accepted if they are typical under p (Medusa)",
        _with(typical_acceptance, lambda q: drafter(q, chain(2), "top"), 3),
        8,
        0.945,
        0.955,
    ),
    _injection(
        "uncapped-ratio",
        "the joint ratio of a block is not capped at one at each token",
        _with(uncapped_block, lambda q: drafter(q, chain(3)), 4),
        1,
        0.01,
        0.12,
    ),
    _injection(
        "pruned-by-score",
        "sampled tree nodes are pruned by the score of the token drawn",
        _with(tree, pruned_by_score, 3),
        2,
        0.15,
        0.19,
    ),
    _injection(
        "reused-draft-noise",
        "a position drafted again in the next step gets the same draft noise",
        _with(block, lambda q: drafter(q, chain(2)), 4, 2, frozenset({"draft"})),
        1,
        0.025,
        0.035,
        size=2,
    ),
    _injection(
        "reused-accept-noise",
        "a position judged again in the next step gets the same uniform",
        _with(block, lambda q: drafter(q, chain(2)), 4, 2, frozenset({"accept"})),
        4,
        0.01,
        0.02,
        size=2,
    ),
]

BIASED: dict[str, Injection] = {injection.name: injection for injection in _ALL}
