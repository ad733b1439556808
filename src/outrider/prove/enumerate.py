"""Proof by enumeration: run a randomised program through *all* its outcomes, in exact arithmetic.

`Dice` answers random questions and records them. The program runs once per branch, and the weight
of a run is the product of its branch probabilities. The distribution of the output is then compared
with the target's joint distribution: equality of Fractions, no Monte Carlo.

Randomness is *named*. Every name stands for one uniform, of which the dice know an interval; each
question narrows it. Two questions with one name give dependent answers, like counter-based noise,
so the enumeration finds a rule that reuses noise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from outrider.prove.reference import ONE, ZERO, Distribution, Draft, Rule

T = TypeVar("T", bound=Hashable)
Tokens = tuple[int, ...]
Model = Callable[[Tokens], Distribution]


class Dice:
    """One run's answers: first the scripted branches, then always the first possible one."""

    def __init__(self, script: Tokens = ()) -> None:
        self._script = script
        self._intervals: dict[Hashable, tuple[Fraction, Fraction]] = {}
        self.weight = ONE
        self.taken: list[int] = []  # the branch of every question that had more than one
        self.open: list[int] = []  # how many branches that question had

    def choose(self, name: Hashable, dist: Distribution) -> int:
        """A token from `dist`, by inverse CDF on the uniform called `name`."""
        edges = [ZERO]
        for mass in dist:
            edges.append(edges[-1] + mass)
        assert edges[-1] == 1, f"not a distribution: {dist}"
        return self._split(name, edges)

    def below(self, name: Hashable, threshold: Fraction) -> bool:
        """Whether the uniform called `name` is below `threshold`."""
        return self._split(name, [ZERO, min(ONE, max(ZERO, threshold)), ONE]) == 0

    def _split(self, name: Hashable, edges: list[Fraction]) -> int:
        low, high = self._intervals.get(name, (ZERO, ONE))
        cells = []
        for i in range(len(edges) - 1):
            left, right = max(low, edges[i]), min(high, edges[i + 1])
            if left < right:
                cells.append((i, left, right))
        which = 0
        if len(cells) > 1:
            if len(self.taken) < len(self._script):
                which = self._script[len(self.taken)]
            self.taken.append(which)
            self.open.append(len(cells))
        index, left, right = cells[which]
        self._intervals[name] = (left, right)
        self.weight *= (right - left) / (high - low)
        return index


def distribution_of(program: Callable[[Dice], T]) -> dict[T, Fraction]:
    """The exact distribution of `program`'s result."""
    dist: dict[T, Fraction] = {}
    script: Tokens | None = ()
    while script is not None:
        dice = Dice(script)
        result = program(dice)
        dist[result] = dist.get(result, ZERO) + dice.weight
        script = _next_script(dice)
    return dist


def _next_script(dice: Dice) -> Tokens | None:
    """The branches of the run after this one in depth-first order."""
    taken = dice.taken
    while taken and taken[-1] + 1 == dice.open[len(taken) - 1]:
        taken.pop()
    return (*taken[:-1], taken[-1] + 1) if taken else None


@dataclass(frozen=True, slots=True)
class StepChance:
    """The noise of one step, named as in the engine (`outrider.noise`).

    Draft draws and acceptance uniforms are named by step and node, so they are fresh in every step.
    Those in `reused` are named by absolute position alone (chains only), like the target's: a
    mistake that biases the block and tree rules.
    """

    dice: Dice
    num_tokens: int
    reused: frozenset[str] = frozenset()

    def draft(self, node: int, depth: int, dist: Distribution) -> int:
        return self.dice.choose(self._name("draft", node, depth), dist)

    def below(self, node: int, threshold: Fraction) -> bool:
        return self.dice.below(self._name("accept", node, node), threshold)

    def target(self, depth: int, dist: Distribution) -> int:
        return self.dice.choose(("target", self.num_tokens + depth), dist)

    def inner(self, name: Hashable, dist: Distribution) -> int:
        """Any further draw of a drafter."""
        return self.dice.choose(("inner", self.num_tokens, name), dist)

    def _name(self, stream: str, node: int, depth: int) -> Hashable:
        if stream in self.reused:
            return (stream, self.num_tokens + depth)
        return (stream, self.num_tokens, node)


Drafter = Callable[[Tokens, StepChance], Draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Speculative decoding of `horizon` tokens by one rule, one drafter and one target.

    After `num_steps` steps the target draws the missing tokens itself. Tokens beyond the horizon or
    after `eos` are dropped. If a coupled drafter used the noise after its output to choose its
    length, this completion is wrong: use `num_steps = horizon` there, so that nothing is missing.
    """

    target: Model
    drafter: Drafter
    rule: Rule
    horizon: int
    num_steps: int = 1
    eos: int | None = None
    reused: frozenset[str] = frozenset()

    def run(self, dice: Dice) -> Tokens:
        out: Tokens = ()
        for _ in range(self.num_steps):
            if self._ended(out):
                break
            chance = StepChance(dice, len(out), self.reused)
            draft = self.drafter(out, chance)
            rows = [self.target(out + draft.tokens_to(node)) for node in range(-1, len(draft))]
            path, dist = self.rule(rows, draft, chance)
            out += tuple(draft.tokens[node] for node in path)
            out += (dice.choose(("residual", len(out)), dist),)
            out = self._cut(out)
        return out

    def output_distribution(self) -> dict[Tokens, Fraction]:
        """The exact joint distribution of the emitted tokens."""
        return self._completed(distribution_of(self.run))

    def target_distribution(self) -> dict[Tokens, Fraction]:
        """The correct result: the target's joint distribution."""
        return self._completed({(): ONE})

    def total_variation(self) -> Fraction:
        """Zero exactly when the rule is exact here."""
        return total_variation(self.output_distribution(), self.target_distribution())

    def _ended(self, out: Tokens) -> bool:
        return len(out) >= self.horizon or (self.eos is not None and self.eos in out)

    def _cut(self, out: Tokens) -> Tokens:
        if self.eos is not None and self.eos in out:
            out = out[: out.index(self.eos) + 1]
        return out[: self.horizon]

    def _completed(self, dist: dict[Tokens, Fraction]) -> dict[Tokens, Fraction]:
        done: dict[Tokens, Fraction] = {}
        while dist:
            longer: dict[Tokens, Fraction] = {}
            for out, mass in dist.items():
                if self._ended(out):
                    done[out] = done.get(out, ZERO) + mass
                    continue
                for v, p in enumerate(self.target(out)):
                    if p:
                        longer[(*out, v)] = longer.get((*out, v), ZERO) + mass * p
            dist = longer
        return done


def total_variation(a: dict[T, Fraction], b: dict[T, Fraction]) -> Fraction:
    """Half the L1 distance of two distributions."""
    return sum((abs(a.get(k, ZERO) - b.get(k, ZERO)) for k in a.keys() | b.keys()), ZERO) / 2
