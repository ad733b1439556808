"""The enumerated cases: one rule with every kind of draft, edge cases included."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from outrider.contracts import Draw
from outrider.prove.drafters import Kind, chain, drafter
from outrider.prove.enumerate import Experiment, Model, Tokens
from outrider.prove.reference import RULES, Distribution
from outrider.prove.toys import greedy, hashed, only, top_k, top_p

KINDS: dict[Draw, Kind] = {
    Draw.COUPLED: "coupled",
    Draw.SAMPLED: "sampled",
    Draw.DETERMINISTIC: "top",
    Draw.WITHOUT_REPLACEMENT: "distinct",
}

_P, _Q = hashed(1, 3), hashed(2, 3)
_P4, _Q4 = hashed(3, 4), hashed(4, 4)
TOYS: dict[str, tuple[Model, Model]] = {
    "ordinary distributions": (_P, _Q),
    "zero probabilities": (hashed(5, 4, zeros=0.4), hashed(6, 4, zeros=0.4)),
    "equal distributions": (_P, _P),
    "disjoint distributions": (only(_P4, {0, 1}), only(_Q4, {2, 3})),
    "filtered target": (top_k(_P4, 2), _Q4),
    "filtered draft": (_P, top_p(_Q, Fraction(3, 5))),
    "greedy target": (greedy(_P), _Q),
}
TREES: dict[str, Tokens] = {"two siblings": (-1, -1), "a late branch": (-1, 0, 0)}


def experiments(
    verifier: str, draw: Draw, trees: bool, own: tuple[Model, Model] | None = None
) -> Iterator[tuple[str, Experiment]]:
    """(title, experiment) for a rule and a kind of draft.

    `own`: small distributions of the user's models. `trees`: include trees.
    """
    rule, kind = RULES[verifier], KINDS[draw]
    pairs = TOYS | ({"your models' distributions": own} if own is not None else {})
    for title, (target, draft) in pairs.items():
        for num_drafts in range(3):
            yield (
                f"{num_drafts} drafts, {title}",
                Experiment(
                    target=target,
                    drafter=drafter(draft, chain(num_drafts), kind),
                    rule=rule,
                    horizon=num_drafts + 1,
                ),
            )
        for shape, parents in TREES.items() if trees else ():
            made = drafter(draft, parents, kind)
            yield (
                f"{shape}, {title}",
                Experiment(target=target, drafter=made, rule=rule, horizon=3),
            )
    yield (
        "three drafts",
        Experiment(target=_P, drafter=drafter(_Q, chain(3), kind), rule=rule, horizon=4),
    )
    for seed in range(2):
        made = drafter(hashed(seed + 100, 2), chain(2), kind)
        num_steps = 3 if draw is Draw.COUPLED else 2
        yield (
            "several steps",
            Experiment(
                target=hashed(seed, 2), drafter=made, rule=rule, horizon=4, num_steps=num_steps
            ),
        )
    made = drafter(_Q, chain(2), kind, eos=2)
    yield (
        "the end of the text inside a draft",
        Experiment(target=_P, drafter=made, rule=rule, horizon=4, num_steps=2, eos=2),
    )
    made = drafter(_Q, chain(3), kind, stop=_unsure)
    # A coupled drafter that stops has used the noise, so the steps must emit every token.
    num_steps = 4 if draw is Draw.COUPLED else 1
    yield (
        "a length chosen while drafting",
        Experiment(target=_P, drafter=made, rule=rule, horizon=4, num_steps=num_steps),
    )


def _unsure(before: Tokens, dist: Distribution) -> bool:
    return max(dist) < Fraction(1, 2)
