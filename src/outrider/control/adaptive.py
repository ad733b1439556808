"""Chooses K for every sequence at every step, so that the batch emits most tokens per second.

    rate = (R + sum of expected accepted drafts) / (overhead + t_draft + t_verify)

R sequences emit one token each whatever is drafted; node k of a draft adds its survival S_k. All
nodes of all sequences are ranked by survival, and the best prefix of that ranking is taken. Every
prefix is looked at, not only up to the first that falls: costs have cliffs and plateaus. None at
all is plain decoding. What other sequences prefill in the same pass has to be paid anyhow and does
not count.

Three things keep it honest. Turning on or off must win by `HYSTERESIS`, less as time goes by;
another K by a fourth of it. A sequence that is off drafts two tokens now and then, paid from a
purse that fills with `PROBE_SHARE` of all time, so it finds out when drafts are good again and a
drafter that never is costs no more than that. And prices are kept up to date: of the neighbours by
drafting a token more or less now and then, of plain decoding by a plain step where speculation
wins by little.

Choices depend on finished steps only: the ratio rules stay exact. Requests with a K of their own
are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import ControlledView, Proposal, Verdict
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.control.allocation import Source, Step, Track
from outrider.control.cost import Costs, batch_bucket, context_bucket
from outrider.events import StepTiming

HYSTERESIS = 0.04  # what turning on or off must win by just after a change; other changes a fourth
PATIENCE = 50  # half of it this many steps later: small advantages that last count too
PROBE_SHARE = 0.01  # of all time that may go into finding out whether to speculate again
PROBE_TOKENS = 2
GOOD = 0.8  # acceptance; where it would not pay, nothing is probed ...
PRICE_CHECKS = 12  # ... once a proposer's price has been checked this often
FIRST_STRAY = 8  # steps with drafts: then one in which all are a little longer or shorter, ...
MOST_BETWEEN = 64  # ... and the next after one more, until so many lie between
MOST_STRAYING = 4  # sequences: beyond, a stray costs too much, and widths vary without it
STRAYS = (1, -1, 2, -2)  # by these in turn: prices of neighbours must be known to be compared
PLAIN_EVERY = 100  # steps without a plain one ...
PLAIN_BELOW = 1.5  # ... while speculation is estimated to win by less than this factor
DECIDE_EVERY = 4  # steps of an unchanged batch: estimates move slowly, deciding takes time
MOST_REST = 16  # the same where the last decisions changed nothing, or nobody drafts
SMOOTHING = 0.1  # of the small constant times
IN_PASSING = 16  # tokens that a drafter reads besides; more take time of their own
HORIZON = 128  # tokens to come of a sequence that count, at most


# (its sequences, [(track, budget, nodes drafted, nodes accepted, is a tree)], probed, its time,
#  tokens that drafters had to read first)
Draft = tuple[Track, int, int, list[int], bool]
News = tuple[int, list[Draft], bool, StepTiming, int]


@dataclass(frozen=True, slots=True)
class Choice:
    """How much a sequence drafts, and what speaks for it; estimates as if it ran alone."""

    decided: int  # the standing decision
    asked: int  # of the last step: mostly the same, now and then a trial
    survival: list[float]  # [k]: that draft k + 1 is accepted
    rates: list[float]  # [k]: tokens per second with k drafts a step; [0] is plain decoding


class AdaptiveController:
    """contracts.Controller. `costs` is refreshed by every step.

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
        self._asked: list[tuple[int, Track, int]] = []  # (index of the view, track, budget)
        self._bucket = 0
        self._age = 0  # steps since the last decision, ...
        self._every = DECIDE_EVERY  # ... how many there may be, and whom it was about
        self._tracks_then: list[Track] = []
        self._start_then = 0
        self._rest = 0  # steps in which nobody drafts and nothing has to be decided ...
        self._resting: list[int] = []  # ... for these sequences
        self._num_rested = 0  # of them
        self._undrafted_s = 0.0  # what the step would have taken without our drafts
        self._probed = False
        self._news: list[News] = []  # steps not learnt from yet
        self._purse_s = 0.0
        self._probe_s = 0.0  # what a probe really took lately
        self._since_plain = 0
        self._since_change = 0
        self._until_stray = FIRST_STRAY
        self._num_strays = 0
        self._behind = 0  # tokens that drafters have to read before this step's drafts
        self._read_s = 0.0  # what one of them takes, as far as is known

    def prepare(self, proposer: str) -> None:
        """Measures now rather than at the first request."""
        self._source(proposer)

    def release(self, sequence_id: int) -> None:
        self._tracks.pop(sequence_id, None)

    def explain(self, view: ControlledView) -> Choice | None:
        """Between two steps: the reasons of the last decision. None where there was none."""
        self._learn()
        track = self._tracks.get(view.id)
        asked = next((k for _, other, k in self._asked if other is track), None)
        if view.id in self._resting:
            asked = 0
        if track is None or asked is None:
            return None
        most = len(track.survival.curve)
        step = Step(self.costs, [view], [track], 1, most)
        rates = [1.0 / step.plain_s, *(step.rate([k]) for k in range(1, most + 1))]
        return Choice(track.budget, asked, list(track.survival.curve), rates)

    def plain_step_s(self, view: ControlledView) -> float | None:
        """What a pass without drafts takes for this sequence alone; None until it is known."""
        self._learn()
        costs = self.costs
        if costs.verify.is_guess:
            return None
        return costs.overhead_s + costs.verify.seconds(context_bucket(len(view.tokens)), 1)

    # --- before the draft ---------------------------------------------------------------------

    def budget(self, views: Seq[ControlledView], limits: Seq[int], num_tokens: int) -> list[int]:
        self._asked = []
        if self._rest > 0:
            self._rest -= 1
            if num_tokens == len(views) and [view.id for view in views] == self._resting:
                return [0] * len(views)
        self._wake()
        budgets = list(limits)
        mine = [i for i, view in enumerate(views) if view.adaptive and limits[i] > 0]
        if not mine:
            return budgets
        tracks = [self._track(views[i]) for i in mine]
        most = [min(limits[i], self.evenly or MAX_AUTO_DRAFT_TOKENS) for i in mine]
        start = num_tokens + sum(limits) - sum([limits[i] for i in mine])
        self._age += 1
        self._probed = False
        same = tracks == self._tracks_then and start == self._start_then
        if same and self._age < self._every:
            chosen = self._stray(tracks, most)
        else:
            self._every = min(2 * self._every, MOST_REST) if same else DECIDE_EVERY
            self._age, self._tracks_then, self._start_then = 0, tracks, start
            own = [views[i] for i in mine]
            chosen = self._decide(views, own, tracks, most, start, num_tokens > len(views))
            is_off = self.costs.verify.is_guess or not any(track.budget for track in tracks)
            if is_off and len(mine) == len(views) and not any(chosen):
                idle = min(track.idle for track in tracks)
                self._rest = min(max(DECIDE_EVERY, 2 * len(tracks), idle // 8), MOST_REST) - 1
                self._resting = [view.id for view in views]
        self._behind = 0
        for i, track, k in zip(mine, tracks, chosen, strict=True):
            budgets[i] = k
            self._asked.append((i, track, k))
            if k:
                self._behind += _behind(views[i], track)
        return budgets

    def standing(self) -> int:
        if self._resting:
            return self._rest + 1
        if not self._asked:
            return sys.maxsize
        if any(k != track.budget for _, track, k in self._asked):
            return 1  # a trial
        until_decision = self._every - self._age
        if len(self._asked) > MOST_STRAYING:
            return max(1, until_decision)
        return max(1, min(until_decision, self._until_stray))

    def repeat(self) -> None:
        if self._resting:
            self._rest -= 1
        elif self._asked:
            self._age += 1
            self._until_stray -= 1

    def _wake(self) -> None:
        """Ends a rest: what was not counted sequence by sequence is counted now."""
        if not self._resting:
            return
        self._learn()
        for sequence_id in self._resting:
            track = self._tracks.get(sequence_id)
            if track is not None:
                track.rested(self._num_rested)
        self._rest = self._num_rested = 0
        self._resting = []
        self._age = MOST_REST  # decides at once

    def _decide(
        self,
        views: Seq[ControlledView],
        own: Seq[ControlledView],
        tracks: list[Track],
        most: list[int],
        start: int,
        prefilling: bool,
    ) -> list[int]:
        self._learn()
        step = Step(self.costs, views, tracks, start, sum(most), self.evenly > 0)
        self._bucket, self._undrafted_s = step.bucket, step.undrafted_s
        chosen, rate = step.best(most)
        if all(track.budget >= 0 for track in tracks):
            kept = [min(track.budget, limit) for track, limit in zip(tracks, most, strict=True)]
            turns = any((a == 0) != (b == 0) for a, b in zip(kept, chosen, strict=True))
            patience = HYSTERESIS * PATIENCE / (PATIENCE + self._since_change)
            needed = 1.0 + (patience if turns else patience / 4)
            if kept == chosen or rate < needed * step.rate(kept):
                chosen = kept
                self._since_change += self._every
            else:
                self._since_change, self._every = 0, DECIDE_EVERY
        self._leave_unread(own, step, chosen, rate)
        for track, k in zip(tracks, chosen, strict=True):
            track.budget = k
        stale = self._since_plain >= PLAIN_EVERY and rate * step.plain_s < PLAIN_BELOW * len(views)
        if stale or self.costs.verify.is_guess:
            return [0] * len(tracks)
        chosen = self._stray(tracks, most)
        if not prefilling:  # beside which a probe's own cost could not be told
            self._probe(step, chosen, most)
        return chosen

    def _leave_unread(
        self, own: Seq[ControlledView], step: Step, chosen: list[int], rate: float
    ) -> None:
        """Turns nobody on whose drafter would take longer to read the text than it can win."""
        late = [
            (order, _behind(view, track))
            for order, (view, track) in enumerate(zip(own, step.tracks, strict=True))
            if chosen[order] and track.budget <= 0 and _behind(view, track)
        ]
        price_s = self._read_s * sum([behind for _, behind in late])
        if price_s:
            to_come = sum([min(HORIZON, _num_left(view)) for view in own])
            if to_come * (step.plain_s / step.num_sequences - 1.0 / rate) < price_s:
                for order, _ in late:
                    chosen[order] = 0

    def _stray(self, tracks: list[Track], most: list[int]) -> list[int]:
        """The standing choices; now and then their neighbours."""
        offset = 0
        self._until_stray -= 1
        if self._until_stray <= 0 and len(tracks) <= MOST_STRAYING:
            offset = STRAYS[self._num_strays % len(STRAYS)]
            self._until_stray = min(FIRST_STRAY + self._num_strays, MOST_BETWEEN)
            self._num_strays += 1
        return [track.near(m, offset) for track, m in zip(tracks, most, strict=True)]

    def _track(self, view: ControlledView) -> Track:
        track = self._tracks.get(view.id)
        if track is None:
            source = self._source(view.proposer or "")
            track = self._tracks[view.id] = Track(source, view.params.temperature)
        return track

    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = Source(name)
            if self.measure is not None:
                self.measure(self.costs, name)
        return source

    def _probe(self, step: Step, chosen: list[int], most: list[int]) -> None:
        """Lets the sequence that has been off longest draft a little, if the purse allows."""
        if 0 not in chosen or self._purse_s <= 0.0:
            return
        off = [order for order, k in enumerate(chosen) if k == 0]
        order = max(off, key=lambda o: step.tracks[o].idle)
        k = min(PROBE_TOKENS, most[order])
        extra_s = step.extra_s(chosen, order, k)
        source = step.tracks[order].source
        good_drafts_pay = GOOD * k * step.plain_s > extra_s * step.num_sequences
        # The price may be wrong, so what is too dear is tried a few times all the same. A probe
        # that takes more than there was is paid for by a longer wait.
        if not good_drafts_pay and source.num_checks >= PRICE_CHECKS:
            return
        if self._purse_s >= min(max(extra_s, self._probe_s), step.plain_s):
            source.num_checks += not good_drafts_pay
            chosen[order] = k
            self._probed = True

    # --- after the verdict --------------------------------------------------------------------

    def update(
        self,
        views: Seq[ControlledView],
        proposals: Seq[Proposal],
        verdicts: Seq[Verdict],
        timing: StepTiming,
    ) -> None:
        """Only notes what happened: between two passes every line of code is cold."""
        asked = self._asked
        if asked or self._resting:
            drafts = [
                (track, k, len(proposals[i]), verdicts[i].path, proposals[i].parents is not None)
                for i, track, k in asked
            ]
            self._news.append((len(views), drafts, self._probed, timing, self._behind))
            self._behind = 0
            for i, track, k in asked:
                if k:
                    track.num_read = len(views[i].tokens)

    def _learn(self) -> None:
        """From the steps since the last decision."""
        news, self._news = self._news, []
        for num_sequences, drafts, probed, timing, behind in news:
            self._num_rested += not drafts
            num_nodes = timing.num_tokens - num_sequences  # if nobody prefilled
            longest = total = num_drafting = num_late = 0
            source: Source | None = None
            mixed = 0 < len(drafts) < num_sequences
            for track, k, num_drafted, path, is_tree in drafts:
                if k == 0:
                    track.rested(1)
                    continue
                mixed = mixed or (source is not None and source is not track.source)
                source = track.source
                longest = max(longest, k)
                total += k
                num_drafting += 1
                num_late += track.idle > 0
                track.idle = 0
                track.survival.observe(k, num_drafted, path, is_tree)
                num_nodes -= num_drafted
            self._learn_costs(num_nodes == 0, longest, num_sequences, timing)
            # The table is about drafts of one length.
            if source is not None and not mixed and 4 * total >= 3 * longest * num_drafting:
                bucket = batch_bucket(num_drafting)
                drafting_s = timing.draft_s - self.costs.plan_s
                if behind:
                    usual_s = self.costs.draft_s(source.name, bucket, longest)
                    read_s = max(0.0, drafting_s - usual_s) / behind
                    self._read_s += (0.3 if self._read_s else 1.0) * (read_s - self._read_s)
                # A drafter that has to catch up first takes longer than the table is about.
                late = 8 * num_late > num_drafting
                if not late or drafting_s < self.costs.draft_s(source.name, bucket, longest):
                    self.costs.learn_draft(source.name, bucket, longest, drafting_s)
            self._settle(timing, probed)

    def _learn_costs(
        self, is_known: bool, longest: int, num_sequences: int, timing: StepTiming
    ) -> None:
        """`is_known`: the pass held nothing but sequences and drafts of ours."""
        costs = self.costs
        if is_known:
            batch = batch_bucket(num_sequences)
            costs.verify.refresh(self._bucket, timing.num_tokens, timing.verify_s, batch)
        # The first of several steps computed at once takes longer than all that follow; a decision
        # that stands for long has few of them.
        error_s = timing.other_s + costs.plan_s - costs.overhead_s
        costs.overhead_s += SMOOTHING * (error_s if error_s < 0 else error_s / 5)
        if timing.num_tokens > num_sequences:
            self._since_plain += 1
        else:
            self._since_plain = 0
            if longest == 0:
                costs.plan_s += SMOOTHING * (timing.draft_s - costs.plan_s)

    def _settle(self, timing: StepTiming, probed: bool) -> None:
        """Fills the purse, and takes from it what a probe really cost."""
        total_s = timing.draft_s + timing.verify_s + timing.other_s
        self._purse_s += PROBE_SHARE * total_s
        if probed:
            extra_s = max(0.0, total_s - self._undrafted_s)
            self._purse_s -= extra_s
            self._probe_s += 0.5 * (extra_s - self._probe_s)
        self._purse_s = min(self._purse_s, 2.0 * max(total_s, self._probe_s))


def _behind(view: ControlledView, track: Track) -> int:
    """Tokens that the sequence's drafter has yet to read, if they are worth mentioning."""
    behind = len(view.tokens) - track.num_read
    return behind if behind > IN_PASSING else 0


def _num_left(view: ControlledView) -> int:
    return view.params.max_tokens - (len(view.tokens) - view.num_prompt_tokens)
