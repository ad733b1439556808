"""Every rule, every draft law, every stopping rule: the output's law *equals* the target's."""

from __future__ import annotations

from fractions import Fraction

import pytest

from outrider.prove.drafters import Kind, chain, drafter
from outrider.prove.enumerate import Dice, Experiment, Model, Tokens, distribution_of
from outrider.prove.reference import RULES, Distribution, Draft, coupled, token
from outrider.prove.toys import fixed, greedy, hashed, only, top_k, top_p

HALF = Fraction(1, 2)
P3, Q3 = hashed(1, 3), hashed(2, 3)
P4, Q4 = hashed(3, 4), hashed(4, 4)
SPARSE_P, SPARSE_Q = hashed(5, 4, zeros=0.4), hashed(6, 4, zeros=0.4)

# name: (target, draft)
PAIRS: dict[str, tuple[Model, Model]] = {
    "ordinary": (P3, Q3),
    "four tokens": (P4, Q4),
    "zero probabilities": (SPARSE_P, SPARSE_Q),
    "one-hot draft": (P3, greedy(Q3)),
    "equal": (P3, P3),
    "disjoint": (only(P4, {0, 1}), only(Q4, {2, 3})),
    "target top-k": (top_k(P4, 2), Q4),
    "draft top-k": (P4, top_k(Q4, 2)),
    "target top-p": (top_p(P3, Fraction(3, 5)), Q3),
    "draft top-p": (P3, top_p(Q3, Fraction(3, 5))),
    "both filtered": (top_k(P4, 3), top_p(Q4, HALF)),
    "greedy target": (greedy(P3), Q3),
    "greedy both": (greedy(P3), greedy(Q3)),
    "two tokens": (fixed(1, 1), fixed(9, 1)),
}

TREES: dict[str, Tokens] = {
    "two siblings": (-1, -1),
    "three siblings": (-1, -1, -1),
    "two chains": (-1, -1, 0, 1),
    "late branch": (-1, 0, 0),
    "depth first": (-1, 0, -1, 2),
}

MIXED: dict[str, list[Kind]] = {
    "two siblings": ["top", "sampled"],
    "three siblings": ["sampled", "top", "distinct"],
    "two chains": ["top", "distinct", "sampled", "top"],
    "late branch": ["sampled", "top", "distinct"],
    "depth first": ["sampled", "top", "distinct", "sampled"],
}


def kinds_for(rule: str) -> list[Kind]:
    honest: list[Kind] = ["sampled", "top", "distinct"]
    return [*honest, "coupled"] if rule == "coupled" else honest


def assert_exact(experiment: Experiment) -> None:
    assert experiment.output_distribution() == experiment.target_distribution()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RULES)
def test_chains(rule: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    longest = 3 if len(target(())) == 3 else 2
    for num_drafts in range(longest + 1):
        for kind in kinds_for(rule):
            made = drafter(draft, chain(num_drafts), kind)
            assert_exact(
                Experiment(target=target, drafter=made, rule=RULES[rule], horizon=num_drafts + 1)
            )


@pytest.mark.parametrize("rule", ["token", "block", "tree", "coupled"])
def test_the_longest_chain_of_four_tokens(rule: str) -> None:
    made = drafter(Q4, chain(3))
    assert_exact(Experiment(target=P4, drafter=made, rule=RULES[rule], horizon=4))


@pytest.mark.parametrize(
    "pair",
    [
        "ordinary",
        "zero probabilities",
        "disjoint",
        "equal",
        "draft top-k",
        "target top-k",
        "greedy target",
    ],
)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("rule", ["tree", "coupled"])
def test_trees(rule: str, shape: str, pair: str) -> None:
    target, draft = PAIRS[pair]
    small = len(target(())) == 3 or len(TREES[shape]) < 4
    choices: list[Kind | list[Kind]] = [*kinds_for(rule), MIXED[shape]]
    for kinds in choices:
        if kinds == "sampled" and not small:
            continue  # tens of thousands of outcomes that the three-token pairs cover
        made = drafter(draft, TREES[shape], kinds)
        assert_exact(Experiment(target=target, drafter=made, rule=RULES[rule], horizon=3))


@pytest.mark.parametrize("rule", RULES)
def test_several_steps(rule: str) -> None:
    """Fresh noise in every step; the coupled rule may even share it with its drafter."""
    for seed in range(4):
        for kind in kinds_for(rule):
            made = drafter(hashed(seed + 100, 2), chain(2), kind)
            assert_exact(
                Experiment(
                    target=hashed(seed, 2),
                    drafter=made,
                    rule=RULES[rule],
                    horizon=4,
                    num_steps=3 if kind == "coupled" else 2,
                )
            )


def test_several_steps_of_trees() -> None:
    for kind in ("sampled", "distinct"):
        made = drafter(hashed(102, 2), (-1, -1, 0), kind)
        assert_exact(
            Experiment(
                target=hashed(2, 2), drafter=made, rule=RULES["tree"], horizon=3, num_steps=2
            )
        )


@pytest.mark.parametrize("rule", RULES)
def test_end_of_sequence(rule: str) -> None:
    """Drafting stops at EOS, and nothing behind an accepted EOS is emitted."""
    for eos in range(3):
        made = drafter(Q3, chain(2), eos=eos)
        assert_exact(
            Experiment(target=P3, drafter=made, rule=RULES[rule], horizon=4, num_steps=2, eos=eos)
        )


@pytest.mark.parametrize("rule", RULES)
def test_stopping_rules_that_do_not_anticipate(rule: str) -> None:
    """Whether a token is submitted may depend on what precedes it and on q, not on itself."""

    def unsure(before: Tokens, q: Distribution) -> bool:
        return max(q) < HALF

    def after_two(before: Tokens, q: Distribution) -> bool:
        return bool(before) and before[-1] == 2

    for stop in (unsure, after_two):
        assert_exact(
            Experiment(
                target=P3,
                drafter=drafter(Q3, chain(3), stop=stop),
                rule=RULES[rule],
                horizon=4,
            )
        )
    # "Stop after a low-confidence token" is fine as long as the token itself is kept.
    kept = drafter(Q3, chain(3), halt=lambda x, q: q[x] < Fraction(1, 3))
    assert_exact(Experiment(target=P3, drafter=kept, rule=RULES[rule], horizon=4))


def test_sample_match_survives_any_pruning() -> None:
    """The coupled rule needs no promise from the drafter: here it even discards what it drew."""
    honest = drafter(Q3, chain(3), "coupled")

    def picky(context: Tokens, chance: object) -> Draft:
        drawn = honest(context, chance)  # type: ignore[arg-type]
        n = sum(1 for x, q in zip(drawn.tokens, drawn.dists, strict=True) if q[x] >= HALF)
        return Draft(drawn.tokens[:n], drawn.parents[:n], drawn.dists[:n])

    assert_exact(Experiment(target=P3, drafter=picky, rule=coupled, horizon=3, num_steps=3))


def mean_emitted(experiment: Experiment) -> Fraction:
    """Expected tokens of the steps themselves: the acceptance length, extra token included."""
    dist = distribution_of(lambda dice: len(experiment.run(dice)))
    return sum((n * mass for n, mass in dist.items()), Fraction(0))


def test_block_keeps_at_least_as_much_as_token_and_equals_the_tree_rule() -> None:
    for seed in range(12):
        p, q = hashed(seed, 3), hashed(seed + 50, 3)
        length = {}
        for rule in ("token", "block", "tree"):
            length[rule] = mean_emitted(
                Experiment(target=p, drafter=drafter(q, chain(2)), rule=RULES[rule], horizon=3)
            )
        assert length["block"] >= length["token"]
        assert length["block"] == length["tree"]


def test_for_deterministic_trees_sample_match_is_optimal() -> None:
    for seed in range(12):
        p, q = hashed(seed, 3), hashed(seed + 50, 3)
        made = drafter(q, (-1, -1, 0, 1), "top")
        length = {
            rule: mean_emitted(Experiment(target=p, drafter=made, rule=RULES[rule], horizon=3))
            for rule in ("coupled", "tree")
        }
        assert length["coupled"] >= length["tree"]


def test_acceptance_of_the_token_rule_is_the_overlap() -> None:
    p, q = fixed(5, 3, 2), fixed(2, 3, 5)
    made = drafter(q, chain(1))
    length = mean_emitted(Experiment(target=p, drafter=made, rule=token, horizon=2))
    assert length == 1 + sum(min(a, b) for a, b in zip(p(()), q(()), strict=True))


def test_dice_remember_what_a_name_has_shown() -> None:
    def twice(dice: Dice) -> tuple[bool, bool]:
        return dice.below("u", HALF), dice.below("u", Fraction(1, 4))

    assert distribution_of(twice) == {
        (True, True): Fraction(1, 4),
        (True, False): Fraction(1, 4),
        (False, False): HALF,
    }
