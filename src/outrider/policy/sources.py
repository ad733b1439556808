"""Which source drafts for a sequence, and how many tokens: for a proposer that has several.

A look-up takes no time and often finds nothing; a drafter always has an answer and always takes
time. Both are compared in tokens:

    value = expected accepted tokens - rate * seconds that drafting and the wider pass take

`rate` is the speed of the latest steps. To take the largest value at every step gives the highest
speed in the long run; to maximise the speed of each single step does not. Where copying is fast, a
token between two copies is not worth a drafter's time: the next one is copied again.

Costs are the tables of `policy.costs`, acceptance is that of `policy.acceptance` and
`policy.lookups`. A drafter has one estimate for steps in which a look-up found something and one
for the others: where a text repeats itself, a drafter is right more often, too.

A drafter that was not asked for long has to read what it missed. It may if what it would have
gained so far, going on like this, exceeds the price before the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.contracts import Found, Proposal, SequenceView
from outrider.policy import MAX_AUTO_DRAFT_TOKENS, MEMORY
from outrider.policy.acceptance import (
    OWN_DECAY,
    PRIOR_WEIGHT,
    Acceptance,
    Prior,
    temperature_bucket,
)
from outrider.policy.controller import HORIZON, MARGIN
from outrider.policy.costs import Costs, batch_bucket
from outrider.policy.learning import undisturbed
from outrider.policy.lookups import LookupAcceptance, LookupPrior, follow

Place = tuple[str, bool]  # a drafter, and whether a look-up has found something as well


class Offer(NamedTuple):
    """The best number of tokens of one source."""

    num_tokens: int
    value: float  # in tokens, if drafting took no time
    net: float  # less its share of the drafting time, if all sequences drafted


@dataclass(slots=True)
class Step:
    """What one step did, and how long it took."""

    drafter: str | None = None
    num_members: int = 0  # sequences that it drafted for
    num_drafts: int = 0  # for each of them, at most
    num_unread: int = 0  # tokens that it had to read first, at most
    draft_s: float = 0.0
    width: int = 0  # tokens of the target's pass; 0: some are of prompts
    pass_s: float = 0.0
    num_tokens: int = 0  # that it emitted


class Trial(NamedTuple):
    """What a look-up found, and how long the text was then."""

    lookup: str
    found: Proposal | Found
    start: int


class Answer(NamedTuple):
    """A drafter's draft; `path`: the part that was accepted."""

    place: Place
    budget: int
    tokens: list[int]
    is_tree: bool
    path: Seq[int] = ()


@dataclass(slots=True)
class Track:
    """One sequence: its estimates, and the steps that were not learnt from yet."""

    view: SequenceView
    lookups: dict[str, LookupAcceptance]
    drafters: dict[Place, Acceptance]
    offers: dict[str, list[Offer]] = field(default_factory=dict)  # of look-ups, by size
    drafts: dict[Place, Offer] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    passed: list[tuple[bool, float]] = field(default_factory=list)  # found something; its value
    num_steps: int = 0
    idle: int = 0  # steps since a drafter was asked
    num_read: dict[str, int] = field(default_factory=dict)  # tokens, by drafter
    missed: dict[str, float] = field(default_factory=dict)  # tokens not gained: it has not read

    def num_unread(self, drafter: str) -> int:
        """Tokens that the drafter has to read first; 0 for a few, which it reads in passing."""
        num_unread = len(self.view.tokens) - self.num_read.get(drafter, 0)
        return num_unread if num_unread > MAX_AUTO_DRAFT_TOKENS else 0


class SourcePolicy:
    """Prices the drafts of some look-ups and drafters; learns from finished steps."""

    def __init__(self, lookups: Seq[str], drafters: Seq[str], most: int) -> None:
        """`most`: tokens that a drafter is asked for."""
        self.costs = Costs.guess()
        self.tracks: dict[int, Track] = {}
        self.num_sequences = 0  # of the next step
        self._drafters = list(drafters)
        self._most = most
        self._lookups = list(lookups)
        self._lookup_priors: dict[tuple[str, int], LookupPrior] = {}
        self._priors: dict[tuple[Place, int], Prior] = {}
        self._surplus: dict[tuple[str, int], float] = {}  # tokens a step, of a drafter's
        self._rest = 0  # tokens of a pass that are other sequences'
        self._tokens = self._seconds = 0.0  # of the latest steps
        self._pass_s: list[float] = []  # what 0, 1, ... drafts add to the pass

    def track(self, view: SequenceView) -> Track:
        track = self.tracks.get(view.id)
        if track is None:
            temperature = view.params.temperature
            bucket = temperature_bucket(temperature)
            for name in self._lookups:
                self._lookup_priors.setdefault((name, bucket), LookupPrior(temperature))
            places = [(name, beside) for name in self._drafters for beside in (False, True)]
            for place in places:
                self._priors.setdefault((place, bucket), Prior())
            track = self.tracks[view.id] = Track(
                view,
                {n: LookupAcceptance(self._lookup_priors[n, bucket]) for n in self._lookups},
                {place: Acceptance(self._priors[place, bucket]) for place in places},
            )
        return track

    def release(self, sequence_id: int) -> None:
        track = self.tracks.pop(sequence_id, None)
        if track is not None:
            self._judge(track)

    # --- what to do ---------------------------------------------------------------------------

    def of_lookup(self, track: Track, name: str, most: int) -> list[Offer]:
        """What to take of a find, by its size: 0..most at least."""
        offers = track.offers.get(name)
        if offers is None or len(offers) <= most:
            rates = track.lookups[name].rates(max(most, MAX_AUTO_DRAFT_TOKENS))
            offers = track.offers[name] = [
                self.best([first * further**k for k in range(size)])
                for size, (first, further) in enumerate(rates)
            ]
        return offers

    def of_drafter(self, track: Track, place: Place, budget: int) -> Offer:
        """How much to ask a drafter for."""
        offer = track.drafts.get(place)
        if offer is None or offer.num_tokens > budget:
            acceptance = track.drafters[place]
            acceptance.refresh()
            gains = acceptance.curve[: min(self._most, budget)]
            offer = track.drafts[place] = self.best(gains, place[0])
        return offer

    def best(self, gains: Seq[float], drafter: str | None = None) -> Offer:
        """The number of drafts with the largest value, if the k-th one adds `gains[k]` tokens."""
        rate, share = self._rate, self._rate / max(1, self.num_sequences)
        added_s = self._added_s(len(gains))
        draft_s = [0.0] * (len(gains) + 1)
        if drafter is not None:
            draft_s = self._draft_row(drafter, self.num_sequences, len(gains))
        best = Offer(0, 0.0, 0.0)
        expected = value = net = 0.0
        for k, gain in enumerate(gains, 1):
            expected += gain
            value = expected - rate * added_s[k]
            net = value - share * draft_s[k]
            if k == 1 or net > best.net:
                best = Offer(k, value, net)
        return best

    def pays(self, drafter: str, surplus: Seq[float], num_drafts: int) -> float:
        """Tokens that asking a drafter gains, for sequences that gain so many before its price."""
        return sum(surplus) - self._rate * self._draft_s(drafter, len(surplus), num_drafts)

    def reads(self, drafter: str, track: Track) -> bool:
        """Whether it pays that a drafter reads what it missed."""
        num_unread = track.num_unread(drafter)
        if not num_unread:
            return True
        view = track.view
        missed = track.missed.get(drafter)
        if missed is None:
            missed = self._surplus.get((drafter, temperature_bucket(view.params.temperature)), 1.0)
        num_tokens = len(view.tokens) - view.num_prompt_tokens
        to_come = min(view.params.max_tokens - num_tokens, HORIZON)
        # As many steps for these tokens as there were for those that have been written.
        num_steps = to_come * (track.num_steps + 1) / (num_tokens + 1)
        price_s = self.costs.read_s.get(drafter, 0.0) * num_unread
        gain = missed / (track.num_steps + PRIOR_WEIGHT) * num_steps
        return gain >= self._rate * self.costs.verify.speed * price_s

    @property
    def margin(self) -> float:
        """Tokens that a drafter must promise more than a look-up, whose price is surer."""
        return MARGIN

    # --- what to learn ------------------------------------------------------------------------

    def learn(self, steps: list[Step], num_sequences: int) -> None:
        """From finished steps; the next ones are for `num_sequences`."""
        width = sum([max(0, s.width - self.num_sequences) for s in steps]) / max(1, len(steps))
        self._learn_costs(steps)
        for step in steps:
            if step.width:
                self._tokens = OWN_DECAY * self._tokens + step.num_tokens
                self._seconds = OWN_DECAY * self._seconds + self._expected_s(step)
        self._rest = round((num_sequences - 1) * (1 + width / max(1, self.num_sequences)))
        self.num_sequences = num_sequences
        self._pass_s = []
        for track in self.tracks.values():
            self._judge(track)

    @property
    def _rate(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def _expected_s(self, step: Step) -> float:
        """Seconds of the step by the tables: a single clock reading is too noisy."""
        drafted_s = 0.0
        if step.drafter is not None:
            drafted_s = self._draft_s(step.drafter, step.num_members, step.num_drafts)
        batch = batch_bucket(max(1, self.num_sequences))
        return self.costs.verify.seconds(batch, step.width) + drafted_s

    def _draft_s(self, drafter: str, num_sequences: int, num_drafts: int) -> float:
        return self.costs.draft_s(drafter, batch_bucket(max(1, num_sequences)), num_drafts)

    def _draft_row(self, drafter: str, num_sequences: int, most: int) -> list[float]:
        table = self.costs.draft(drafter)
        speed = self.costs.verify.speed * table.speed
        return [speed * s for s in table.row(batch_bucket(max(1, num_sequences)), most)]

    def _added_s(self, most: int) -> list[float]:
        """Seconds that 0, 1, ... drafts of a sequence add to the pass."""
        if len(self._pass_s) <= most:
            width, most = self._rest + 1, max(most, MAX_AUTO_DRAFT_TOKENS)
            verify = self.costs.verify
            row = verify.row(batch_bucket(max(1, self.num_sequences)), width + most)
            self._pass_s = [verify.speed * (s - row[width]) for s in row[width : width + most + 1]]
        return self._pass_s

    def _learn_costs(self, steps: list[Step]) -> None:
        passes: dict[int, list[float]] = {}
        drafts: dict[tuple[str, int, int], list[float]] = {}
        for step in steps:
            if step.width and step.pass_s:
                passes.setdefault(step.width, []).append(step.pass_s)
        for width, found in passes.items():
            batch = batch_bucket(max(1, self.num_sequences))
            self.costs.verify.learn(batch, width, undisturbed(found), len(found))
        for step in steps:
            if step.drafter is None or not step.draft_s:
                continue
            batch = batch_bucket(step.num_members)
            if step.num_unread > MAX_AUTO_DRAFT_TOKENS:
                more_s = step.draft_s - self._draft_s(
                    step.drafter, step.num_members, step.num_drafts
                )
                self.costs.learn_reading(step.drafter, more_s / step.num_unread, step.num_members)
            else:
                place = (step.drafter, batch, step.num_drafts)
                drafts.setdefault(place, []).append(step.draft_s)
        for (name, batch, num_drafts), found in drafts.items():
            self.costs.learn_draft(name, batch, num_drafts, undisturbed(found), len(found))

    def _judge(self, track: Track) -> None:
        """What became of a sequence's drafts; its offers are computed anew."""
        self._count_missed(track)
        for place, budget, tokens, is_tree, path in track.answers:
            track.drafters[place].observe([(budget, len(tokens), path, is_tree)])
        if not track.answers:
            for acceptance in track.drafters.values():
                acceptance.fade(OWN_DECAY ** min(track.idle, MAX_AUTO_DRAFT_TOKENS))
        still_open = []
        for trial in track.trials:
            found = trial.found
            num_accepted, is_refused = follow(found, track.view.tokens, trial.start)
            if is_refused is None:
                still_open.append(trial)
            else:
                track.lookups[trial.lookup].observe(len(found.tokens), num_accepted, is_refused)
        track.trials = still_open
        track.answers = []
        track.passed = []
        track.offers.clear()
        track.drafts.clear()

    def _count_missed(self, track: Track) -> None:
        """What drafters gained or would have gained over the look-ups of the last steps."""
        for name in self._drafters:
            key = (name, temperature_bucket(track.view.params.temperature))
            surplus = self._surplus.get(key, 1.0)
            missed = 0.0
            for beside, value in track.passed:
                offer = track.drafts.get((name, beside))
                gained = max(0.0, offer.net - value) if offer is not None else 0.0
                surplus = MEMORY * surplus + (1.0 - MEMORY) * gained
                missed += gained
            self._surplus[key] = surplus
            if track.passed and track.num_unread(name):
                track.missed[name] = track.missed.get(name, 0.0) + missed
