"""Chooses K for every sequence, so that the batch emits most tokens per second.

    rate = (R + sum of expected accepted drafts) / (t_draft + t_verify)

R sequences emit one token each whatever is drafted; node k of a draft adds its survival S_k. All
nodes of all sequences are ranked by survival, and the best prefix of that ranking is taken. As many
are looked at as could pay, not only up to the first that falls: costs have cliffs and plateaus.
None at all is plain decoding. What other sequences prefill in the same pass has to be paid anyhow
and does not count.

Drafters that know how sure they are get prices instead of a K, and stop by themselves (`caution`);
of them it is only decided whether they draft at all.

A decision stands for several steps: they can be computed at once then, and are what prices are
learnt from, with all that the engine does around them. Turning on or off must win by `TURNING`.

Losses are bounded twice, per proposer and batch size, in seconds. Where drafts do not pay, a
sequence probes now and then, paid from a purse that `SHARE` of all time goes into: a drafter that
is never right costs no more, and one that is good again earns its next probe. Where estimates say
that drafts pay, the clock has to agree: there is a credit of a few plain steps, to which comes what
plain decoding would have needed for the same tokens, and from which goes what the steps took (who
has won before loses half of it at most in one call: it may be a slow moment of the machine).
Without credit nothing is drafted until `SHARE` of the time has paid the debt.

Now and then a decision is a trial: a token more or less, or none where drafts win by little; what
is compared must have been paid lately.

Choices depend on finished steps only: the ratio rules stay exact. Requests with a K of their own
are left alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.control.allocation import Plain, Source, Step, Track
from outrider.control.cost import Costs, batch_bucket, context_bucket
from outrider.control.learning import (
    FIRST_CREDIT,
    MOST_PURSE,
    STARTING,
    Decision,
    Learner,
    News,
    num_emitted_by,
)
from outrider.events import StepTiming
from outrider.policy.base import Choice
from outrider.policy.base import Decision as Answer

TURNING = 0.02  # what turning on or off must win by
ANOTHER_K = 0.005  # the same of another K
MOST_STEPS = 16  # of a decision that may be computed at once
SURE_STEPS = 48  # where drafters stop by themselves, and it stands as long: less is to be decided
MOST_RESTED = 64  # steps for which one to draft nothing stands
MANY = 5  # sequences, of which a newcomer is no reason to decide anew: it would change little
PROBE_TOKENS, PROBE_STEPS = 2, 4
GOOD = 0.8  # acceptance; where it would not pay, nothing is probed ...
PRICE_CHECKS = 12  # ... once a proposer's price has been checked this often
FIRST_TRIAL, MOST_BETWEEN = 32, 64  # decisions between trials: one more each time
MOST_AT_ONCE = 64  # drafts of a step that are looked at, or four for each sequence
TRIALS = (1, -1, 2, -2)  # drafts more or less ...
TRIAL_STEPS = 6  # ... for so many steps
MOST_TRYING = 4  # sequences: beyond, widths vary without it
CLOSE = 1.4  # drafts that win by less are compared with plain decoding at every other trial ...
AT_LEAST = 8  # ... and others at every eighth: it may have been seen in a slow moment only
IN_PASSING = 16  # tokens that a drafter reads besides; more take time of their own
HORIZON = 128  # tokens to come of a sequence that count, at most


class AdaptiveController:
    """policy.base.Policy. `costs` is refreshed by every step.

    `measure` fills in what drafting with a proposer costs, when it is first asked for. `evenly`:
    everybody drafts as much (see `Step`), up to so many; 0: to each what is best.
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
        self._learner = Learner(self.costs)
        self._now = Decision([], 0, [], sys.maxsize)
        self._is_decided = False  # and the first step of it is under way
        self._news: list[News] = []  # steps of this decision that are not learnt from yet
        self._until_trial = FIRST_TRIAL
        self._num_trials = 0

    def prepare(self, proposer: str) -> None:
        """Measures now rather than at the first request."""
        self._source(proposer)

    def release(self, sequence_id: int) -> None:
        self._tracks.pop(sequence_id, None)

    def explain(self, view: ControlledView) -> Choice | None:
        """Between two steps: the reasons of the last decision. None where there was none."""
        self._learn()
        track = self._tracks.get(view.id)
        asked = next((k for _, other, k in self._now.asked if other is track), None)
        if track is None or asked is None:
            return None
        most = MAX_AUTO_DRAFT_TOKENS
        step = Step(self.costs, [view], [track], 1, most)
        rates = [1.0 / step.plain_s, *(step.rate([k]) for k in range(1, most + 1))]
        survival = track.sureness.survival if track.is_sure else track.survival.curve
        return Choice(track.budget, asked, list(survival), rates, track.is_sure)

    def plain_step_s(self, view: ControlledView) -> float | None:
        """What a pass without drafts takes for this sequence alone; None until it is known."""
        self._learn()
        verify = self.costs.verify
        return None if verify.is_guess else verify.seconds(context_bucket(len(view.tokens)), 1)

    # --- before the draft ---------------------------------------------------------------------

    def decide(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> Answer:
        budgets = self._budget(views, limits, num_tokens)
        self._is_decided = True
        rules = [self._now.cautions.get(i) for i in range(len(budgets))]
        return Answer(budgets, rules, max(1, self._now.most_steps - self._now.num_steps + 1))

    def _budget(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> list[int]:
        now, ids = self._now, [view.id for view in views]
        if (
            now.num_steps < min(now.least_steps, now.most_steps)
            and ids == now.ids
            and num_tokens == now.num_tokens
        ):
            now.num_steps += 1
        else:
            now = self._now = self._decide(views, limits, num_tokens, ids)
        budgets = list(limits)
        for i, _, k in now.asked:
            budgets[i] = min(k, limits[i])
        return budgets

    def _rested(
        self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int, ids: list[int]
    ) -> Decision | None:
        """A decision to draft nothing stands for some steps more where there is nothing to probe
        with, and beside prompts: most of the time nobody drafts, that is what deciding costs. Who
        comes meanwhile has to be one of many, and like those it was made for."""
        now = self._now
        if now.missing is None:
            return None
        source, batch, price_s = now.missing
        is_beside_prompts = num_tokens != len(ids)
        num_rested = now.num_rested + now.num_steps
        if not is_beside_prompts and (num_rested >= MOST_RESTED or source.purses[batch] >= price_s):
            return None
        if ids == now.ids and num_tokens == now.num_tokens:
            now.num_rested, now.num_steps = num_rested, 1
            return now
        if len(ids) < MANY or batch_bucket(len(ids)) != batch:
            return None
        if is_beside_prompts:
            decision = Decision(ids, num_tokens, [], 1)  # whose steps would teach nothing
        else:
            decision = _decision(views, num_tokens, ids, Plain(self.costs, views))
        for i, view in enumerate(views):
            if view.adaptive and limits[i] > 0:
                track = self._track(view)
                if track.group not in now.groups:
                    return None
                track.budget = 0
                decision.asked.append((i, track, 0))
        decision.missing, decision.num_rested, decision.groups = now.missing, num_rested, now.groups
        return decision

    def _decide(
        self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int, ids: list[int]
    ) -> Decision:
        self._learn()
        rested = self._rested(views, limits, num_tokens, ids)
        if rested is not None:
            return rested
        mine = [i for i, view in enumerate(views) if view.adaptive and limits[i] > 0]
        if not mine:
            return Decision(ids, num_tokens, [], sys.maxsize)
        own = [views[i] for i in mine]
        tracks = [self._track(view) for view in own]
        most = [min(limits[i], self.evenly or MAX_AUTO_DRAFT_TOKENS) for i in mine]
        start = num_tokens + sum(limits) - sum([limits[i] for i in mine])
        at_once = sum(most)
        if not self.evenly:
            standing = sum([max(0, track.budget) for track in tracks])
            at_once = min(at_once, max(MOST_AT_ONCE, 4 * len(own), standing))
        step = Step(self.costs, views, tracks, start, at_once, self.evenly > 0, PROBE_TOKENS)
        chosen = self._best(step, own, most)
        for track, k in zip(tracks, chosen, strict=True):
            track.budget = k
        decision = _decision(views, num_tokens, ids, step.plain)
        if self.costs.verify.is_guess:
            chosen = [0] * len(tracks)
        elif num_tokens == len(views):  # beside prompts, what a trial costs could not be told
            is_off = not any(chosen)
            if not is_off:
                chosen = self._try(decision, step, chosen, most)
            if is_off or any(chosen):
                self._probe(decision, step, own, chosen, most)
            if is_off and decision.probed is not None:
                decision.most_steps = PROBE_STEPS
        decision.asked = list(zip(mine, tracks, chosen, strict=True))
        if any(chosen):
            decision.cautions = dict(zip(mine, step.cautions(chosen), strict=True))
            if decision.most_steps == MOST_STEPS and all(
                track.is_sure for track, k in zip(tracks, chosen, strict=True) if k
            ):
                decision.least_steps = decision.most_steps = SURE_STEPS
        for view, track, k in zip(own, tracks, chosen, strict=True):
            if k:
                decision.behind += _behind(view, track)
                decision.is_first = decision.is_first or not num_emitted_by(view)
        return decision

    def _best(self, step: Step, own: Seq[ControlledView], most: list[int]) -> list[int]:
        """How much everybody drafts from now on."""
        tracks = step.tracks
        for source in step.sources:
            if step.batch not in source.purses:  # the first time, prices may be wrong
                source.purses[step.batch] = 0.0 if source.purses else MOST_PURSE * step.plain_s
                source.credits[step.batch] = FIRST_CREDIT * step.plain_s
        chosen, rate = step.best(most)
        if all(track.budget >= 0 for track in tracks):
            kept = [min(track.budget, limit) for track, limit in zip(tracks, most, strict=True)]
            turns = any((a == 0) != (b == 0) for a, b in zip(kept, chosen, strict=True))
            if rate < (1.0 + (TURNING if turns else ANOTHER_K)) * step.rate(kept):
                chosen = kept
        if any(chosen):
            for order, track in enumerate(tracks):
                if track.source.credits[step.batch] < 0.0:
                    chosen[order] = 0
        if any(chosen) and step.num_sequences > 1:
            # What was clocked lately counts for more than the table.
            plain_s = self._learner.tried_s(step.batch, step.plain.base)
            if plain_s is not None and rate < step.doubt * step.num_sequences / plain_s:
                chosen = [0] * len(chosen)
        if any(chosen):
            self._leave_unread(own, step, chosen)
        return chosen

    def _leave_unread(self, own: Seq[ControlledView], step: Step, chosen: list[int]) -> None:
        """Turns nobody on whose drafter would take longer to read the text than it can win."""
        late = [
            (order, _behind(view, track))
            for order, (view, track) in enumerate(zip(own, step.tracks, strict=True))
            if chosen[order] and track.budget <= 0 and _behind(view, track)
        ]
        price_s = sum(
            [self._reading_s(step.tracks[order].source, n, len(late)) for order, n in late]
        )
        if price_s:
            to_come = sum([min(HORIZON, _num_left(view)) for view in own])
            # What is paid now is gone, so the estimate of what follows has to be on the safe side.
            gain_s = step.plain_s / (step.doubt * step.num_sequences) - 1.0 / step.rate(chosen)
            if to_come * gain_s < price_s:
                for order, _ in late:
                    chosen[order] = 0

    def _reading_s(self, source: Source, num_tokens: int, num_readers: int) -> float:
        """What a drafter takes to read so many tokens: no more than to draft them."""
        read_s = self._learner.read_s
        if read_s is None:
            read_s = self.costs.draft_s(source.name, batch_bucket(num_readers), 1) / num_readers
        return read_s * num_tokens

    def _probe(
        self,
        decision: Decision,
        step: Step,
        own: Seq[ControlledView],
        chosen: list[int],
        most: list[int],
    ) -> None:
        """Lets the sequence that has been off longest draft a little, if there is credit for it."""
        off = [order for order, k in enumerate(chosen) if k == 0]
        if not off:
            return
        order = max(off, key=lambda o: step.tracks[o].idle)
        each = [
            limit if track.is_sure else min(PROBE_TOKENS, limit)
            for track, limit in zip(step.tracks, most, strict=True)
        ]
        track, k = step.tracks[order], each[order]
        source, least_s = track.source, STARTING * step.plain_s
        extra_s = step.extra_s(chosen, order, k) + least_s
        read_s = (self._learner.read_s or 0.0) * _behind(own[order], track)
        price_s = PROBE_STEPS * extra_s + read_s
        price_s = min(price_s, 0.9 * MOST_PURSE * step.plain_s)
        if source.purses[step.batch] < price_s:
            if not any(chosen):
                decision.rest(source, step.batch, price_s, step.tracks)
            return
        # The price may be wrong, so what is too dear is tried a few times all the same. Where all
        # are off, it is all that would be turned on: they share what a round of drafting takes.
        budgets = [k if o == order else b for o, b in enumerate(chosen)] if any(chosen) else each
        if step.rate(budgets, GOOD) <= step.rate(chosen):
            if source.num_checks >= PRICE_CHECKS:
                if not any(chosen):
                    decision.rest(source, step.batch, math.inf, step.tracks)
                return
            source.num_checks += 1
        source.purses[step.batch] -= read_s
        chosen[order] = k
        decision.probed, decision.probe_s = track, extra_s

    def _try(self, decision: Decision, step: Step, chosen: list[int], most: list[int]) -> list[int]:
        """The decision; now and then its neighbours, or plain decoding."""
        plain = [0] * len(chosen)
        is_unknown = len(chosen) > 1 and self._learner.tried_s(step.batch, 1.0) is None
        self._until_trial -= 1
        if self._until_trial > 0 and not is_unknown:
            return chosen
        is_close = step.rate(chosen) < CLOSE * step.rate(plain)
        if is_unknown and is_close:
            decision.most_steps = TRIAL_STEPS
            return plain
        if self._until_trial > 0:
            return chosen
        self._num_trials += 1
        self._until_trial = min(FIRST_TRIAL + self._num_trials, MOST_BETWEEN)
        if self._num_trials % (2 if is_close else AT_LEAST) == 0:
            decision.most_steps = TRIAL_STEPS
            return plain
        if len(chosen) > MOST_TRYING:
            return chosen  # widths vary without it
        decision.most_steps = TRIAL_STEPS
        offset = TRIALS[self._num_trials % len(TRIALS)]
        return [
            max(1, min(k + offset * (1 + k // 8), limit)) if k else 0
            for k, limit in zip(chosen, most, strict=True)
        ]

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
            source = self._sources[name] = Source(name)
            if self.measure is not None:
                self.measure(self.costs, name)
        return source

    # --- after the verdict --------------------------------------------------------------------

    def observe(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        """Only notes what happened: between two passes every line of code is cold."""
        if not self._is_decided:  # a further step of the last decision
            self._now.num_steps += 1
        self._is_decided = False
        if self._now.views:
            self._news.append((timing, proposals, verdicts))

    def _learn(self) -> None:
        news, self._news = self._news, []
        if news:
            self._learner.learn(self._now, news)


def _decision(
    views: Seq[ControlledView], num_tokens: int, ids: list[int], plain: Plain
) -> Decision:
    return Decision(
        ids,
        num_tokens,
        [],
        MOST_STEPS,
        list(views),
        plain.bucket,
        plain.seconds,
        plain.base,
        plain.num_read,
    )


def _behind(view: ControlledView, track: Track) -> int:
    """Tokens that the sequence's drafter has yet to read, if they are worth mentioning."""
    behind = len(view.tokens) - track.num_read
    return behind if behind > IN_PASSING else 0


def _num_left(view: ControlledView) -> int:
    return view.params.max_tokens - num_emitted_by(view)
