"""What hybrid's choices cost and gain, in one currency: tokens.

    value = expected accepted tokens - rate * (t_draft + what the drafts add to the target's pass)

`rate`, what time is worth, are the tokens that it brought lately: the choice with the largest value
at every step is the one with the highest rate in the long run, and the highest rate of a single
step is not. (Where copying goes fast, a token that has to be written in between is not worth a
drafter's time: the next one is copied again.) A drafter's time is shared by all sequences of the
batch that ask it.

What things take is learnt from the clock, in terms of how fast the machine is at the moment.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.costs import batch_bucket
from outrider.proposers._times import Times

BEHIND = 16  # tokens that a drafter reads in passing; more take time of their own
_RATE_DECAY = 0.95
_SPEED = 0.2  # of a change that a lesson puts down to the machine; the rest, to the widths
_TRUST = 0.6  # tokens that cutting a look-up short must gain


class Choice(NamedTuple):
    """The best number of tokens to take of a look-up, or to ask a drafter for."""

    num_tokens: int
    value: float  # if drafting took no time
    net: float  # if all sequences shared that time


@dataclass(slots=True)
class Done:
    """What a step did, and how long it took."""

    drafter: str | None = None
    num_members: int = 0  # sequences that it drafted for, ...
    num_drafts: int = 0  # ... how many tokens each at most, ...
    behind: int = 0  # ... and how many it had to read first
    draft_s: float = 0.0
    width: int = 0  # of the target's pass; 0: prompts are read in it, too
    pass_s: float = 0.0
    num_tokens: int = 0  # that it brought


class Economy:
    """`drafters`: their names."""

    def __init__(self, drafters: Seq[str]) -> None:
        # Times are in terms of the machine's speed when they were taken: seconds of the pass that
        # counted as one.
        self.speed = 0.0
        self._passes: dict[int, Times] = {}  # by batch
        self._draft_times: dict[tuple[str, int], Times] = {}  # by drafter and batch
        self._catch_up = dict.fromkeys(drafters, 0.0)  # a token's, as far as known
        self._tokens = self._time = 0.0  # of lately
        # As of the last lesson: what such a second is worth, how many sequences there are, and how
        # many tokens of a pass are not of the sequence that is looked at.
        self._rate = 0.0
        self.num_sequences = self._rest = 0
        self._price: list[float] = []  # of drafts in the target's pass, in tokens

    def drafting(self, name: str, num_sequences: int, most: int) -> float:
        """What drafting so many tokens for so many sequences costs."""
        return self._rate * self._draft_row(name, num_sequences, most)[most]

    def reading(self, name: str, num_tokens: int) -> float:
        """What it costs that a drafter reads so many tokens."""
        return self._rate * self._catch_up[name] * num_tokens

    def best_length(self, chances: Seq[float], drafter: str | None = None) -> Choice:
        """How many drafts to take if the k-th is accepted with `chances[k]`.

        A drafter's time is shared by all sequences here.
        """
        num_sequences, most = self.num_sequences, len(chances)
        prices = self._prices(most)
        draft_s = [0.0] * (most + 1)
        if drafter is not None:
            draft_s = self._draft_row(drafter, num_sequences, most)
        share = self._rate / max(1, num_sequences)
        best_k, best_value, best_net = 0, 0.0, 0.0
        expected = value = net = 0.0
        for k, chance in enumerate(chances, 1):
            expected += chance
            value = expected - prices[k]
            net = value - share * draft_s[k]
            if net > best_net or k == 1:
                best_k, best_value, best_net = k, value, net
        if drafter is None and net > best_net - _TRUST:  # a look-up has reasons for its length
            return Choice(most, value, net)
        return Choice(best_k, best_value, best_net)

    def learn(self, news: list[Done], num_sequences: int) -> None:
        """From steps; the next ones are for so many sequences."""
        num_drafts = 0.0  # of a sequence and step
        for step in news:
            num_drafts += max(0, step.width - self.num_sequences) / len(news)
        self._learn_times(news)
        self._learn_rate(news)
        for times in (*self._passes.values(), *self._draft_times.values()):
            times.end_lesson()
        self._rest = round((num_sequences - 1) * (1 + num_drafts / max(1, self.num_sequences)))
        self.num_sequences = num_sequences
        self._price = []
        self._rate = self._tokens / self._time if self._time else 0.0

    def _learn_times(self, news: list[Done]) -> None:
        passes = self._pass_times()
        known = passes.row(max([step.width for step in news], default=0))
        widths = [step for step in news if step.width]
        if widths:
            if not passes:
                known = [_pass_shape(n) for n in range(len(known))]
            now = median([step.pass_s / known[step.width] for step in widths])
            if not self.speed:
                self.speed = now
            elif passes:
                self.speed *= (now / self.speed) ** _SPEED
        if not self.speed:
            return
        for step in widths:
            passes.learn(step.width, step.pass_s / self.speed)
        for step in news:
            name, time = step.drafter, step.draft_s / self.speed
            if name is None or not time:
                continue
            place = (name, batch_bucket(step.num_members))
            times = self._draft_times.setdefault(place, Times(float))
            if step.behind <= BEHIND:
                times.learn(step.num_drafts, time)
            else:
                extra = max(0.0, time - times.row(step.num_drafts)[step.num_drafts]) / step.behind
                before = self._catch_up[name]
                self._catch_up[name] = extra if not before else before + 0.2 * (extra - before)

    def _learn_rate(self, news: list[Done]) -> None:
        """In the same units as the prices."""
        passes = self._pass_times().row(max([step.width for step in news], default=0))
        drafting: dict[tuple[str, int], list[float]] = {}
        for step in news:
            if not step.width:
                continue
            time = passes[step.width]
            if step.drafter is not None:
                place = (step.drafter, step.num_members)
                if place not in drafting:
                    drafting[place] = self._draft_row(*place, MAX_AUTO_DRAFT_TOKENS)
                time += drafting[place][step.num_drafts]
            self._tokens = _RATE_DECAY * self._tokens + step.num_tokens
            self._time = _RATE_DECAY * self._time + time

    def _prices(self, most: int) -> list[float]:
        """What one sequence's drafts add to the target's pass, in tokens: 0..most at least."""
        if len(self._price) <= most:
            width = self._rest + 1
            row = self._pass_times().row(width + max(most, MAX_AUTO_DRAFT_TOKENS))
            self._price = [self._rate * (time - row[width]) for time in row[width:]]
        return self._price

    def _draft_row(self, name: str, num_sequences: int, most: int) -> list[float]:
        """What drafting 0..most tokens takes. One that nobody has asked yet is worth a try."""
        times = self._draft_times.get((name, batch_bucket(num_sequences)))
        return times.row(most) if times else [0.0] * (most + 1)

    def _pass_times(self) -> Times:
        return self._passes.setdefault(batch_bucket(self.num_sequences), Times(_pass_shape))


def _pass_shape(num_tokens: int) -> float:
    """A pass is nearly free of its width, until something else is known."""
    return 1.0 + 0.03 * num_tokens
