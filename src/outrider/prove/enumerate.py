"""Proof by enumeration: run a randomised program through *all* its outcomes, in exact arithmetic.

`Dice` answers random questions and remembers what was asked. A program is run again and again,
each time along the next unexplored branch, and every run's result is weighted with the product of
its branch probabilities. The law of the output is then compared with the target's joint law:
equality of Fractions, no Monte Carlo.

Randomness is *named*. Behind every name lies one uniform, of which the dice know only an interval;
a question narrows it. Asking twice with one name therefore gives dependent answers, exactly as
counter-based noise does, and a rule that reuses noise it has already looked at is caught.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from outrider.prove.reference import ONE, ZERO, Draft, Law, Rule

T = TypeVar("T", bound=Hashable)
Tokens = tuple[int, ...]
Model = Callable[[Tokens], Law]


class Dice:
    """One run's answers: first the scripted branches, then always the first possible one."""

    def __init__(self, script: Tokens = ()) -> None:
        self._script = script
        self._intervals: dict[Hashable, tuple[Fraction, Fraction]] = {}
        self.weight = ONE
        self.taken: list[int] = []  # the branch of every question that had more than one
        self.open: list[int] = []  # how many branches that question had

    def choose(self, name: Hashable, law: Law) -> int:
        """A token from `law`, by inverse CDF on the uniform called `name`."""
        edges = [ZERO]
        for mass in law:
            edges.append(edges[-1] + mass)
        assert edges[-1] == 1, f"not a law: {law}"
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


def law_of(program: Callable[[Dice], T]) -> dict[T, Fraction]:
    """The exact law of `program`'s result."""
    law: dict[T, Fraction] = {}
    script: Tokens | None = ()
    while script is not None:
        dice = Dice(script)
        result = program(dice)
        law[result] = law.get(result, ZERO) + dice.weight
        script = _next_script(dice)
    return law


def _next_script(dice: Dice) -> Tokens | None:
    """The branches of the run after this one in depth-first order."""
    taken = dice.taken
    while taken and taken[-1] + 1 == dice.open[len(taken) - 1]:
        taken.pop()
    return (*taken[:-1], taken[-1] + 1) if taken else None


@dataclass(frozen=True, slots=True)
class StepChance:
    """The noise of one step, named as the engine names it (`outrider.noise`).

    Draft draws and acceptance uniforms are named by step and node, so every step's are fresh.
    Those in `reused` are named by absolute position alone (chains only), as the target's are:
    a bug that the block and tree rules do not survive.
    """

    dice: Dice
    num_tokens: int
    reused: frozenset[str] = frozenset()

    def draft(self, node: int, depth: int, law: Law) -> int:
        return self.dice.choose(self._name("draft", node, depth), law)

    def below(self, node: int, threshold: Fraction) -> bool:
        return self.dice.below(self._name("accept", node, node), threshold)

    def target(self, depth: int, law: Law) -> int:
        return self.dice.choose(("target", self.num_tokens + depth), law)

    def inner(self, name: Hashable, law: Law) -> int:
        """Any further draw of a drafter's own."""
        return self.dice.choose(("inner", self.num_tokens, name), law)

    def _name(self, stream: str, node: int, depth: int) -> Hashable:
        if stream in self.reused:
            return (stream, self.num_tokens + depth)
        return (stream, self.num_tokens, node)


Drafter = Callable[[Tokens, StepChance], Draft]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Speculative decoding of `horizon` tokens by one rule, one drafter and one target.

    After `num_steps` steps whatever is missing comes from the target's own law; what exceeds the
    horizon, or follows `eos`, is cut off. (Where a coupled drafter looked at noise behind its
    output to choose its length, that law is no longer the unconditional one: take
    `num_steps = horizon` there, so that nothing is missing.)
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
            path, law = self.rule(rows, draft, chance)
            out += tuple(draft.tokens[node] for node in path)
            out += (dice.choose(("residual", len(out)), law),)
            out = self._cut(out)
        return out

    def output_law(self) -> dict[Tokens, Fraction]:
        """The exact joint law of the emitted tokens."""
        return self._completed(law_of(self.run))

    def target_law(self) -> dict[Tokens, Fraction]:
        """What it must be: the target's joint law."""
        return self._completed({(): ONE})

    def total_variation(self) -> Fraction:
        """Zero exactly when the rule is exact here."""
        return total_variation(self.output_law(), self.target_law())

    def _ended(self, out: Tokens) -> bool:
        return len(out) >= self.horizon or (self.eos is not None and self.eos in out)

    def _cut(self, out: Tokens) -> Tokens:
        if self.eos is not None and self.eos in out:
            out = out[: out.index(self.eos) + 1]
        return out[: self.horizon]

    def _completed(self, law: dict[Tokens, Fraction]) -> dict[Tokens, Fraction]:
        done: dict[Tokens, Fraction] = {}
        while law:
            longer: dict[Tokens, Fraction] = {}
            for out, mass in law.items():
                if self._ended(out):
                    done[out] = done.get(out, ZERO) + mass
                    continue
                for v, p in enumerate(self.target(out)):
                    if p:
                        longer[(*out, v)] = longer.get((*out, v), ZERO) + mass * p
            law = longer
        return done


def total_variation(a: dict[T, Fraction], b: dict[T, Fraction]) -> Fraction:
    """Half the L1 distance of two laws."""
    return sum((abs(a.get(k, ZERO) - b.get(k, ZERO)) for k in a.keys() | b.keys()), ZERO) / 2


def mean_emitted(experiment: Experiment) -> Fraction:
    """Expected tokens of the steps themselves: the acceptance length, extra token included."""
    law = law_of(lambda dice: len(experiment.run(dice)))
    return sum((n * mass for n, mass in law.items()), ZERO)
