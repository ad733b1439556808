"""K = auto: drafts as many tokens for every sequence as give the batch the most tokens per second.

Before a step, `decide` asks `allocation` for the best budgets. A decision stands for several steps,
which an executor may run in one call; turning drafts on or off must win by `MARGIN`.

Losses are bounded by one account, a balance of seconds per proposer and batch size. Every step pays
`PROBE_SHARE` of its time in, up to `VALID_STEPS` plain steps. A step with drafts pays in what plain
decoding would have needed for its tokens, and pays out what it took. Drafts need a positive
balance. Where estimates say that they do not pay, a *probe* drafts a little as soon as the balance
covers its price: so a drafter that is never right costs no more than the first balance and
`PROBE_SHARE`, and one that becomes good is found. Now and then a decision is a *trial*, with other
budgets or none, so that prices of what is not done at present stay true. Trials have an account of
their own. A decision that is confirmed stands three times as long.

Budgets depend on finished steps only, so the ratio rules stay exact. Requests with a K of their own
are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median_low

from outrider.contracts import ControlledView, Proposal, StopRule, Verdict
from outrider.events import StepTiming
from outrider.policy import MAX_AUTO_DRAFT_TOKENS, VALID_STEPS
from outrider.policy.allocation import FIRST_BALANCE, Group, Source, StepModel, Track
from outrider.policy.base import Choice, Decision
from outrider.policy.costs import Costs, batch_bucket
from outrider.policy.learning import (
    PROBE_STEPS,
    PROBE_TOKENS,
    Lesson,
    Member,
    Part,
    learn,
    num_emitted,
)

MARGIN = 0.02  # by which drafts, or other budgets, must win: the noise of estimates, and their cost
PROBE_SHARE = 0.005  # of all time may be lost by probes, and as much is spent on trials

FEW = 4  # sequences: here a newcomer of which nothing is known weighs enough to decide anew
HORIZON = 128  # tokens to come that count where a drafter has to read a long text first


@dataclass(slots=True)
class _Standing:
    """The decision that stands, and for which sequences."""

    ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    members: list[Member] = field(default_factory=list)
    rules: dict[int, StopRule | None] = field(default_factory=dict)  # by index of the view
    valid_steps: int = 0
    num_steps: int = 0  # for which it has stood
    lesson: Lesson | None = None  # None: its steps teach nothing
    saved_s: float = 0.0  # for each token, over plain decoding


@dataclass(slots=True)
class _Trials:
    """Of one batch size: how many there were, and how long the next one may take."""

    balance_s: float
    number: int = 0
    was_last: bool = False  # of the decisions


class AdaptivePolicy:
    """policy.base.Policy; also `Explains`. `costs` learns from every step.

    `measure` fills in what drafting with a proposer costs, when it is first asked for. `evenly`:
    all sequences draft as much, up to so many; 0: to each what is best.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        measure: Callable[[Costs, str], None] | None = None,
        evenly: int = 0,
    ) -> None:
        self.costs = costs or Costs.guess()
        self.measure = measure
        self.evenly = evenly
        self._sources: dict[str, Source] = {}
        self._tracks: dict[int, Track] = {}
        self._standing = _Standing()
        self._trials: dict[int, _Trials] = {}  # by batch bucket

    def prepare(self, proposer: str) -> None:
        """Measures now rather than at the first request."""
        self._source(proposer)

    def release(self, sequence_id: int) -> None:
        self._tracks.pop(sequence_id, None)

    # --- before the drafts --------------------------------------------------------------------

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Decision:
        now, ids = self._standing, [view.id for view in views]
        if ids != now.ids or num_tokens != now.num_tokens or now.num_steps >= now.valid_steps:
            carried = self._carry(views, limits, num_tokens, ids)
            if carried is None:
                self._learn()
                carried = self._choose(views, limits, num_tokens, ids)
            now = self._standing = carried
        budgets = list(limits)
        for i, _, k in now.members:
            budgets[i] = min(k, limits[i])
        rules = [now.rules.get(i) for i in range(len(views))]
        return Decision(budgets, rules, max(1, now.valid_steps - now.num_steps))

    def _choose(
        self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int, ids: list[int]
    ) -> _Standing:
        mine = [i for i, view in enumerate(views) if view.adaptive and limits[i] > 0]
        if not mine:
            return _Standing(ids, num_tokens, valid_steps=sys.maxsize)
        own = [views[i] for i in mine]
        tracks = [self._track(view) for view in own]
        most = [min(limits[i], self.evenly or MAX_AUTO_DRAFT_TOKENS) for i in mine]
        start = num_tokens + sum(limits) - sum([limits[i] for i in mine])
        step = StepModel(self.costs, views, tracks, start, sum(most), self.evenly > 0)
        for source in step.sources:
            if step.batch not in source.balance_s:
                source.balance_s[step.batch] = source.first_balance * step.plain_s
        if step.batch not in self._trials:
            self._trials[step.batch] = _Trials(2 * PROBE_STEPS * step.plain_s)
        chosen = self._best(step, own, most)
        longest = VALID_STEPS
        if all(t.is_confident or t.budget == k for t, k in zip(tracks, chosen, strict=True)):
            longest *= 3  # confirmed, or the drafters settle token by token how much they draft
        for track, k in zip(tracks, chosen, strict=True):
            track.budget = k
        now = _Standing(ids, num_tokens, valid_steps=longest)
        with_floors, is_alone = True, num_tokens == len(views)
        if self.costs.verify.is_guess:
            chosen = [0] * len(tracks)
        elif any(chosen):
            now.valid_steps = _bearable_steps(step, chosen, longest)
            if is_alone and now.valid_steps == longest:
                chosen, with_floors, now.valid_steps = self._try(step, chosen, most, longest)
        elif is_alone:  # beside prompts the cost of drafts is not clear
            chosen = self._probe(step, own, most)
            now.valid_steps = PROBE_STEPS if any(chosen) else longest
        now.members = list(zip(mine, tracks, chosen, strict=True))
        if any(chosen):
            rules = step.stop_rules(chosen)
            if not with_floors:
                rules = [rule and StopRule(rule.chances) for rule in rules]
            now.rules = dict(zip(mine, rules, strict=True))
            now.saved_s = step.plain_s / len(views) - 1.0 / step.rate(chosen)
        now.lesson = Lesson(step, [Part.begin(views, now.members, now.rules)])
        return now

    def _best(self, step: StepModel, own: Seq[ControlledView], most: list[int]) -> list[int]:
        """The best budgets, with hysteresis and only where balances allow them."""
        tracks, nothing = step.tracks, [0] * len(most)
        chosen = step.best(most)
        for i, track in enumerate(tracks):
            if track.source.first is not None:
                chosen[i] = min(track.source.first, most[i])
        if all(track.budget >= 0 for track in tracks):
            kept = [
                limit if track.is_confident and track.budget else min(track.budget, limit)
                for track, limit in zip(tracks, most, strict=True)
            ]
            if step.rate(chosen) < (1.0 + MARGIN) * step.rate(kept):
                chosen = kept
        if step.rate(chosen) < (1.0 + MARGIN) * step.rate(nothing):
            chosen = nothing
        for i, track in enumerate(tracks):
            if track.source.balance_s[step.batch] < 0.0:
                chosen[i] = 0
        if any(chosen):
            self._leave_unread(own, step, chosen)
        return chosen

    def _leave_unread(self, own: Seq[ControlledView], step: StepModel, chosen: list[int]) -> None:
        """Enables drafting only if catching up the drafter's KV costs less than the expected
        saving."""
        late = [
            (i, num_unread)
            for i, (view, track) in enumerate(zip(own, step.tracks, strict=True))
            if chosen[i] and track.budget <= 0 and (num_unread := _num_unread(view, track))
        ]
        price_s = sum(
            [self.costs.reading_s(step.tracks[i].source.name, len(late)) * n for i, n in late]
        )
        if not price_s:
            return
        to_come = sum(map(_to_come, own))
        saved_s = step.plain_s / step.num_sequences - 1.0 / step.rate(chosen)
        if to_come * saved_s < price_s:
            for i, _ in late:
                chosen[i] = 0

    def _try(
        self, step: StepModel, chosen: list[int], most: list[int], longest: int
    ) -> tuple[list[int], bool, int]:
        """The decision, or a trial in its place: (budgets, with floors, valid steps)."""
        trials, with_floors = self._trials[step.batch], True
        kind = trials.number % 3
        if kind == 0:
            tried = [0] * len(chosen)
        elif 0 in chosen:
            tried = self._with_one_more(step, chosen, most)[0]
        elif kind == 1:
            tried = [min(2 * k + 1, limit) for k, limit in zip(chosen, most, strict=True)]
            if any(track.is_confident for track in step.tracks):
                tried = [min(k, 2 * PROBE_TOKENS) for k in tried]
                with_floors = False  # wide passes, which early stops avoid
        else:
            tried = [max(1, k // 2) for k in chosen]
        price_s = PROBE_STEPS * step.worth(tried)[1]
        is_due = longest > VALID_STEPS and not trials.was_last
        trials.was_last = is_due and price_s <= trials.balance_s
        if not trials.was_last:
            return chosen, True, longest
        trials.number += 1
        trials.balance_s -= price_s
        return tried, with_floors, PROBE_STEPS

    def _probe(self, step: StepModel, own: Seq[ControlledView], most: list[int]) -> list[int]:
        """Lets one sequence or all draft a little, whichever loses less, if balances cover it."""
        nothing = [0] * len(most)
        everyone = [min(PROBE_TOKENS, limit) for limit in most]
        one, i = self._with_one_more(step, nothing, most)
        tried = min(one, everyone, key=step.loss_s)
        track = step.tracks[i]
        if track.idle < VALID_STEPS and track.budget == 0 and track.num_read:
            return nothing  # a probe cuts a call short: not one after the other
        name = track.source.name
        read_s = self.costs.reading_s(name) * _num_unread(own[i], track)
        price_s = PROBE_STEPS * max(step.loss_s(tried), _begin_s(step)) + read_s
        if not self.costs.draft(name).is_known:
            price_s = min(price_s, FIRST_BALANCE * step.plain_s)  # the price may be wrong
        elif step.rate(everyone, acceptance=1.0) < step.rate(nothing):
            price_s = VALID_STEPS * step.plain_s  # costs would have to change first
        price_s = min(price_s, 0.9 * VALID_STEPS * step.plain_s)
        if any(track.source.balance_s[step.batch] < price_s
               for track, k in zip(step.tracks, tried, strict=True) if k):  # fmt: skip
            return nothing
        if name in self.costs.read_s:
            track.source.balance_s[step.batch] -= read_s
        return tried

    def _with_one_more(
        self, step: StepModel, chosen: list[int], most: list[int]
    ) -> tuple[list[int], int]:
        """The budgets with a few drafts of the sequence that has been off longest, and which."""
        off = [i for i, k in enumerate(chosen) if k == 0]
        i = max(off, key=lambda i: step.tracks[i].idle)
        tried = list(chosen)
        tried[i] = most[i] if step.tracks[i].is_confident else min(PROBE_TOKENS, most[i])
        return tried, i

    def _carry(
        self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int, ids: list[int]
    ) -> _Standing | None:
        """The standing decision, for a batch in which some sequences came or went.

        A newcomer drafts as much as most others like it: that changes little, and a decision takes
        as long as a part of a pass. None: decide anew.
        """
        now, num = self._standing, len(ids)
        lesson, left = now.lesson, now.valid_steps - now.num_steps
        if left <= 0 or lesson is None or batch_bucket(num) != lesson.step.batch:
            return None
        budgets = {track: k for _, track, k in now.members}
        rules = {track: now.rules.get(i) for i, track, _ in now.members}
        usual: dict[Group, list[int]] = {}
        for _, track, k in now.members:
            usual.setdefault(track.group, []).append(k)
        carried = _Standing(ids, num_tokens, valid_steps=left, lesson=lesson, saved_s=now.saved_s)
        for i, view in enumerate(views):
            if not view.adaptive or limits[i] <= 0:
                continue
            track = self._track(view)
            if track not in budgets:
                k = median_low(usual.get(track.group, [0]))
                settles = track.is_confident and k > 0  # it stops by itself where its text is hard
                if track.group not in usual or (num <= FEW and not settles):
                    return None
                budgets[track] = k
                if self._unread_s(view, track) > now.saved_s * _to_come(view):
                    budgets[track] = 0
                others = [rule for rule in now.rules.values() if rule is not None]
                if budgets[track] and others:
                    rules[track] = replace(others[0], chances=track.confidence.chances)
            k = track.budget = budgets[track]
            carried.members.append((i, track, k))
            if k and rules.get(track) is not None:
                carried.rules[i] = rules[track]
        lesson.parts.append(Part.begin(views, carried.members, carried.rules))
        return carried

    def _unread_s(self, view: ControlledView, track: Track) -> float:
        """Seconds in which the sequence's drafter reads what it has not read."""
        return self.costs.reading_s(track.source.name) * _num_unread(view, track)

    def _track(self, view: ControlledView) -> Track:
        track = self._tracks.get(view.id)
        if track is None:
            source = self._source(view.proposer or "")
            kind = (view.draw.value, view.edits is None)
            track = self._tracks[view.id] = Track(source, view.params.temperature, kind)
        return track

    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            if self.measure is not None:
                self.measure(self.costs, name)
            source = self._sources[name] = Source(
                name, self.costs.first.get(name), self.costs.refused.get(name, 0)
            )
        return source

    # --- after the verdicts -------------------------------------------------------------------

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        """Only notes the step: between two passes every line of code is slow."""
        self._standing.num_steps += 1
        if self._standing.lesson is not None:
            self._standing.lesson.parts[-1].outcomes.append((timing, proposals, verdicts))

    def _learn(self) -> None:
        now, lesson = self._standing, self._standing.lesson
        if lesson is None:
            return
        total_s = learn(lesson, self.costs)
        plain_s, batch = lesson.step.plain_s, lesson.step.batch
        for source in {track.source for part in lesson.parts for _, track, _ in part.members}:
            left_s = source.balance_s[batch] + PROBE_SHARE * total_s
            source.balance_s[batch] = min(left_s, VALID_STEPS * plain_s)
        trials = self._trials[batch]
        trials.balance_s = min(trials.balance_s + PROBE_SHARE * total_s, VALID_STEPS * plain_s)
        lesson.parts = [Part.begin(lesson.parts[-1].views, now.members, now.rules)]

    # --- what the live page shows -------------------------------------------------------------

    def explain(self, view: ControlledView) -> Choice | None:
        """Between two steps: the reasons of the last decision. None where there was none."""
        self._learn()
        track = self._tracks.get(view.id)
        asked = next((k for _, other, k in self._standing.members if other is track), None)
        if track is None or asked is None:
            return None
        most = MAX_AUTO_DRAFT_TOKENS
        step = StepModel(self.costs, [view], [track], 1, most)
        rates = [1.0 / step.plain_s, *(step.rate([k]) for k in range(1, most + 1))]
        curve = track.confidence.curve if track.is_confident else track.acceptance.curve
        return Choice(track.budget, asked, list(curve), rates, track.is_confident)

    def plain_step_s(self, view: ControlledView) -> float | None:
        """Seconds of a pass without drafts for this sequence alone; None until they are known."""
        self._learn()
        verify = self.costs.verify
        return None if verify.is_guess else verify.seconds(0, 1)


def _begin_s(step: StepModel) -> float:
    """What each step of a short call loses at least: fewer share its beginning."""
    return step.plain_s / VALID_STEPS


def _bearable_steps(step: StepModel, budgets: list[int], longest: int) -> int:
    """Steps for which balances bear these drafts if none is accepted, until drafts have won."""
    extra_s = step.worth(budgets)[1] - step.plain_s
    drafting = {track.source for track, k in zip(step.tracks, budgets, strict=True) if k}
    balance_s = min([source.balance_s[step.batch] for source in drafting], default=0.0)
    if balance_s > FIRST_BALANCE * step.plain_s:
        return longest
    return max(PROBE_STEPS, int(min(balance_s / max(extra_s, 1e-9), longest)))


def _to_come(view: ControlledView) -> int:
    """Tokens of the sequence that a decision takes into account."""
    return min(HORIZON, view.params.max_tokens - num_emitted(view))


def _num_unread(view: ControlledView, track: Track) -> int:
    """Tokens that the drafter has yet to read; 0 for a few, which it reads in passing."""
    num_unread = len(view.tokens) - track.num_read
    return num_unread if num_unread > MAX_AUTO_DRAFT_TOKENS else 0
