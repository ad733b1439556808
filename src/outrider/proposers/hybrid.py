"""Several proposers for one sequence: at every step, the one that promises most tokens per second.

Look-ups (ngram, suffix, prediction) take microseconds and either find something or not; a drafter
(a model, a head) always has an answer and always costs a pass of its own. So look-ups are asked
first, at every step, and a drafter only where it is expected to gain more than its time costs:

    value = (sum over the batch of 1 + expected accepted tokens) - rate * (t_draft + t_target)

is compared for "no drafter" and for each drafter and number of tokens, every sequence taking the
better of the drafter and its own look-up. `rate`, what a second is worth, are the tokens a second
brought lately: the choice with the largest value at every step is the one with the highest rate in
the long run, and the highest rate of a single step is not. (Where copying goes fast, a token that
has to be written in between is not worth a drafter's time: the next one is copied again.)
What to expect is learnt from this sequence lately and
from all others about as hot: per position for drafters, per size of the draft for look-ups, which
are judged when they were not used as well: whatever the text became, it says how far they would
have come. What things cost is learnt from the clock, in the controller's own tables.

A drafter that was not asked for long has to read what it missed, a whole prompt perhaps. That is
paid where what it would have saved so far, going on like this, makes it worth while before the
request ends: so nobody pays for a drafter that is of no use.

The choice depends on finished steps and on look-ups, which are functions of the context; never on
what a drafter draws. So it is exact under ratio rules too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    Proposer,
    ProposerContext,
    SequenceView,
)
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.control.allocation import Source, heat
from outrider.control.cost import Costs, batch_bucket, context_bucket
from outrider.control.survival import OWN_DECAY, Survival
from outrider.errors import ConfigError
from outrider.proposers._options import read_options

_START = 0.7  # acceptance of a looked-up token nobody has seen yet
_PRIOR_WEIGHT = 4.0  # what all sequences together are worth beside this one, in drafts
_OWN_DECAY = 0.95
_SHARED_DECAY = 0.99
_DECIDE_EVERY = 4  # steps: how much a drafter is asked for; estimates move slowly
_FIRST_PASSES = 64  # from all of which prices are learnt; then from every fourth
_FADE_EVERY = 16  # steps without a drafter: what it did for a sequence counts for less
_RATE_DECAY = 0.95
_HORIZON = 128  # tokens to come that count, at most
_BEHIND = 16  # tokens that a drafter reads in passing; more take time of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    lookups: Seq[str] = ("suffix",)  # asked at every step: must cost next to nothing
    drafters: Seq[str] | None = None  # None: draft-model, where there is a draft model
    draft_tokens: int = 6  # that a drafter is asked for at most

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"hybrid needs draft_tokens of at least 1, not {self.draft_tokens}")
        for names in (self.lookups, self.drafters or ()):
            if isinstance(names, str) or HybridProposer.name in names:
                raise ConfigError(f"hybrid needs lists of other proposers' names, not {names!r}")


class Worth:
    """How many tokens of a look-up's drafts are accepted, by the size of the draft."""

    def __init__(self, shared: Worth | None = None) -> None:
        """`shared`: what is known from everybody; None: this one is."""
        self._shared = shared
        self._decay = _SHARED_DECAY if shared is None else _OWN_DECAY
        self._seen: dict[int, tuple[float, float]] = {}  # size -> decayed (drafts, accepted)

    def expected(self, size: int) -> float:
        if self._shared is not None:
            prior = self._shared.expected(size)
        else:  # every token as likely as the one before it
            prior = _START * (1 - _START**size) / (1 - _START)
        num, accepted = self._seen.get(size, (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (num + _PRIOR_WEIGHT)

    def learn(self, size: int, num_accepted: int) -> None:
        if self._shared is not None:
            self._shared.learn(size, num_accepted)
        num, accepted = self._seen.get(size, (0.0, 0.0))
        self._seen[size] = (self._decay * num + 1.0, self._decay * accepted + num_accepted)


@dataclass(slots=True)
class _Trial:
    """A looked-up draft that the text has not yet contradicted or run out of."""

    proposal: Proposal
    start: int  # how long the text was then


@dataclass(slots=True)
class _Track:
    """One sequence: what each source is worth to it, and drafts still to be judged."""

    lookups: dict[str, Worth]
    drafters: dict[str, Survival]
    expected: dict[str, list[float]] = field(default_factory=dict)  # of k drafts, by drafter
    num_steps: int = 0
    idle: int = 0  # of these, since a drafter was asked
    trials: dict[str, _Trial] = field(default_factory=dict)
    drafted: tuple[str, Proposal, int] | None = None  # by which drafter, and its budget
    num_fed: dict[str, int] = field(default_factory=dict)  # tokens that a drafter has read
    missed: dict[str, float] = field(default_factory=dict)  # lost by not asking, in tokens


@dataclass(slots=True)
class _Plan:
    """Whom to ask in this step, for which sequences and how many tokens; None: nobody."""

    drafter: Proposer | None = None
    members: Seq[int] = ()
    num_tokens: int = 0
    seconds: float = 0.0  # that drafting is expected to take


class HybridProposer:
    name = "hybrid"

    def __init__(
        self, lookups: Seq[Proposer], drafters: Seq[Proposer], draft_tokens: int = 6
    ) -> None:
        self._draft_tokens = min(draft_tokens, MAX_AUTO_DRAFT_TOKENS)
        self._lookups = list(lookups)
        self._drafters = list(drafters)
        self._parts = [*lookups, *drafters]
        if not self._parts:
            raise ConfigError("hybrid needs at least one look-up or drafter")
        self.draws = common_draws(self._parts)
        self.trees = any(part.trees for part in self._parts)
        taps = {tap for part in self._parts for tap in part.needs.taps}
        self.needs = Needs(taps=tuple(sorted(taps)))
        self._worth: dict[tuple[str, int], Worth] = {}  # by look-up and heat
        self._sources = {drafter.name: Source(drafter.name) for drafter in drafters}
        self._tracks: dict[int, _Track] = {}
        self._costs = Costs.guess()
        self._catch_up_s = dict.fromkeys(self._sources, 0.0)  # a token's, as far as known
        self._timed: set[str] = set()  # drafters whose time is known
        # How many tokens a drafter is asked for, since how many steps, for how many sequences.
        self._lengths: dict[str, tuple[int, int, int]] = {}
        # Under way: when it began, and the pass's bucket, width and beginning if it can be timed.
        self._began = 0.0
        self._pass: tuple[int, int, int, float] | None = None
        self._num_passes = 0
        self._tokens = self._seconds = 0.0  # of lately

    @classmethod
    def build(cls, context: ProposerContext) -> HybridProposer:
        config = read_options(HybridConfig, cls.name, context.options)
        drafters = config.drafters
        if drafters is None:
            drafters = ["draft-model"] if context.drafter is not None else []
        return cls(
            [context.proposer(name) for name in config.lookups],
            [context.proposer(name) for name in drafters],
            config.draft_tokens,
        )

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        self._began = perf_counter()
        tracks = [self._track(view) for view in views]
        bucket = context_bucket(sum([len(view.tokens) for view in views]) // len(views))
        proposals, gains = self._look_up(views, tracks, budgets, bucket)
        plan = self._choose(views, tracks, budgets, proposals, gains, bucket)
        if plan.drafter is not None:
            for i, draft in zip(plan.members, self._ask(plan, views, tracks, budgets), strict=True):
                if draft.tokens:
                    proposals[i] = draft
        if all(len(view.tokens) - view.num_computed == 1 for view in views):
            width = len(views) + sum(map(len, proposals))
            batch = batch_bucket(len(views))
            self._pass = (bucket, width, batch, perf_counter())  # not where prompts are read, too
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        if self._pass is not None:
            bucket, width, batch, since = self._pass
            now = perf_counter()
            self._num_passes += 1
            if self._learns:
                self._costs.verify.refresh(bucket, width, now - since, batch)
            self._pass = None
            tokens = sum(len(o.verdict.path) + 1 for o in seen if o.verdict is not None)
            self._tokens = _RATE_DECAY * self._tokens + tokens
            self._seconds = _RATE_DECAY * self._seconds + now - self._began
        for part in self._parts:
            part.observe(views, seen)
        for view, observation in zip(views, seen, strict=True):
            track = self._tracks.get(view.id)
            if track is not None:
                self._judge(track, view.tokens, observation)

    def release(self, sequence_id: int) -> None:
        self._tracks.pop(sequence_id, None)
        for part in self._parts:
            part.release(sequence_id)

    @property
    def _learns(self) -> bool:
        """Prices settle soon, and drawing a table anew takes time of its own."""
        return self._num_passes < _FIRST_PASSES or self._num_passes % _DECIDE_EVERY == 0

    @property
    def _rate(self) -> float:
        """Tokens that a second brings, as far as known."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def _track(self, view: SequenceView) -> _Track:
        track = self._tracks.get(view.id)
        if track is None:
            temperature = view.params.temperature
            track = self._tracks[view.id] = _Track(
                {
                    part.name: Worth(
                        self._worth.setdefault((part.name, heat(temperature)), Worth())
                    )
                    for part in self._lookups
                },
                {
                    name: Survival(source.prior(temperature))
                    for name, source in self._sources.items()
                },
            )
        return track

    def _look_up(
        self, views: Seq[SequenceView], tracks: list[_Track], budgets: Seq[int], bucket: int
    ) -> tuple[list[Proposal], list[float]]:
        """The best look-up for each sequence, if it beats drafting nothing, and what to expect."""
        proposals = [Proposal() for _ in views]
        gains = [0.0] * len(views)
        for lookup in self._lookups:
            for i, found in enumerate(lookup.propose(views, budgets)):
                if found.tokens:
                    track = tracks[i]
                    track.trials.setdefault(lookup.name, _Trial(found, len(views[i].tokens)))
                    gain = track.lookups[lookup.name].expected(len(found))
                    if gain > gains[i]:
                        proposals[i], gains[i] = found, gain
        num_sequences = len(views)
        verify = self._costs.verify
        batch = batch_bucket(num_sequences)
        row = verify.row(bucket, num_sequences + max(map(len, proposals)), batch)
        worth = self._rate * verify.scale
        for i, proposal in enumerate(proposals):
            extra = row[num_sequences + len(proposal)] - row[num_sequences]
            if proposal.tokens and gains[i] < worth * extra:
                proposals[i], gains[i] = Proposal(), 0.0
        return proposals, gains

    def _choose(
        self,
        views: Seq[SequenceView],
        tracks: list[_Track],
        budgets: Seq[int],
        proposals: list[Proposal],
        gains: list[float],
        bucket: int,
    ) -> _Plan:
        num_sequences = len(views)
        sizes = [len(proposal) for proposal in proposals]
        most = min(self._draft_tokens, max(budgets))
        verify = self._costs.verify
        num_found = sum(sizes)
        batch = batch_bucket(num_sequences)
        passes = verify.row(bucket, num_sequences * (1 + most) + num_found, batch)
        found = num_sequences + sum(gains)
        rate = self._rate
        without = found - rate * verify.scale * passes[num_sequences + num_found]
        best, best_value = _Plan(), without
        for drafter in self._drafters:
            name = drafter.name
            k, draft_s = self._length(name, tracks, most, passes)
            expected = [
                track.expected[name][min(k, budget)]
                for track, budget in zip(tracks, budgets, strict=True)
            ]
            plan, value = _Plan(), best_value
            # Where it promises more, or everywhere: its drafts may make for a narrower pass.
            better = [i for i, gain in enumerate(gains) if expected[i] > gain]
            everyone = range(num_sequences)
            for members in (better, everyone) if len(better) < num_sequences else (better,):
                tokens, width = found, num_sequences + num_found
                for i in members:
                    tokens += expected[i] - gains[i]
                    width += min(k, budgets[i]) - sizes[i]
                promised = tokens - rate * (draft_s + verify.scale * passes[width])
                if members and promised > value:
                    value, plan = promised, _Plan(drafter, members, k, draft_s)
            if plan.drafter is not None:
                gained = (value - without) / len(plan.members)
                plan.members = self._worth_reading(plan, views, tracks, gained)
                if plan.members:
                    best, best_value = plan, value
        return best

    def _length(
        self, name: str, tracks: list[_Track], most: int, passes: list[float]
    ) -> tuple[int, float]:
        """How much to ask a drafter for if everybody asked it, and what that takes.

        Looked at anew every few steps. One that nobody has asked yet is worth a try: its time
        counts when it is known.
        """
        num_sequences = len(tracks)
        table = self._costs.draft(name)
        drafts = table.row(batch_bucket(num_sequences), most)
        scale = table.scale if name in self._timed else 0.0
        for track in tracks:
            if name not in track.expected:
                survival = track.drafters[name]
                survival.prior.refresh()
                survival.refresh()
                track.expected[name] = [0.0, *accumulate(survival.curve)]
        k, age, size = self._lengths.get(name, (0, _DECIDE_EVERY, 0))
        if age < _DECIDE_EVERY and size == num_sequences:
            k, age = min(k, most), age + 1
        else:
            worth = self._rate * self._costs.verify.scale
            values = [
                sum([track.expected[name][k] for track in tracks])
                - worth * (scale * drafts[k] + passes[num_sequences * (1 + k)])
                for k in range(1, most + 1)
            ]
            k, age = 1 + values.index(max(values)), 1
        self._lengths[name] = (k, age, num_sequences)
        return k, self._costs.verify.scale * scale * drafts[k]

    def _worth_reading(
        self,
        plan: _Plan,
        views: Seq[SequenceView],
        tracks: list[_Track],
        gained: float,
    ) -> list[int]:
        """The members for whom the drafter may read what it missed; the others' loss is noted.

        `gained`: tokens' worth for each of them in this step.
        """
        assert plan.drafter is not None
        name = plan.drafter.name
        members = []
        for i in plan.members:
            view, track = views[i], tracks[i]
            behind = len(view.tokens) - track.num_fed.get(name, 0)
            price = self._rate * self._catch_up_s[name] * behind if behind > _BEHIND else 0.0
            missed = track.missed[name] = track.missed.get(name, 0.0) + gained
            num_tokens = len(view.tokens) - view.num_prompt_tokens
            to_come = min(view.params.max_tokens - num_tokens, _HORIZON)
            # As many steps for these as there were for what has been written.
            num_steps = to_come * (track.num_steps + 1) / (num_tokens + 1)
            if missed / (track.num_steps + _PRIOR_WEIGHT) * num_steps >= price:
                members.append(i)
        return members

    def _ask(
        self, plan: _Plan, views: Seq[SequenceView], tracks: list[_Track], budgets: Seq[int]
    ) -> list[Proposal]:
        assert plan.drafter is not None
        name = plan.drafter.name
        asked = [min(plan.num_tokens, budgets[i]) for i in plan.members]
        started = perf_counter()
        drafts = plan.drafter.propose([views[i] for i in plan.members], asked)
        seconds = perf_counter() - started
        behind = 0
        for i, budget, draft in zip(plan.members, asked, drafts, strict=True):
            track, num_tokens = tracks[i], len(views[i].tokens)
            track.drafted = (name, draft, budget)
            behind = max(behind, num_tokens - track.num_fed.get(name, 0))
            track.num_fed[name] = num_tokens
        if behind > _BEHIND:
            extra_s = max(0.0, seconds - plan.seconds) / behind
            known = self._catch_up_s[name]
            self._catch_up_s[name] = extra_s if not known else known + 0.2 * (extra_s - known)
        elif self._learns and not self._costs.verify.is_guess:  # the unit of all prices
            bucket = batch_bucket(len(plan.members))
            self._costs.learn_draft(name, bucket, plan.num_tokens, seconds)
            self._timed.add(name)
        return drafts

    @staticmethod
    def _judge(track: _Track, tokens: list[int], seen: Observation) -> None:
        track.num_steps += 1
        track.idle += 1
        if track.drafted is not None:
            name, draft, budget = track.drafted
            track.drafted = None
            track.idle = 0
            track.expected.pop(name, None)
            if seen.verdict is not None and seen.proposal is draft:
                is_tree = draft.parents is not None
                path = seen.verdict.path
                track.drafters[name].observe(budget, len(draft), path, is_tree)
        elif track.idle % _FADE_EVERY == 0:
            for survival in track.drafters.values():
                survival.fade(OWN_DECAY**_FADE_EVERY)
            track.expected.clear()
        for name, trial in list(track.trials.items()):
            num_accepted, is_over = follow(trial.proposal, tokens, trial.start)
            if is_over:
                track.lookups[name].learn(len(trial.proposal), num_accepted)
                del track.trials[name]


def follow(proposal: Proposal, tokens: list[int], start: int) -> tuple[int, bool]:
    """How many drafts the text `tokens[start:]` agrees with, and whether that is final.

    It is where the text went another way, or came to the end of the draft.
    """
    parents = proposal.parents
    end, last = start, -1
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if parents is None else parents[node]
        if parent == last:
            if end == len(tokens):
                return end - start, False
            if token == tokens[end]:
                last, end = node, end + 1
    return end - start, True


def common_draws(parts: Seq[Proposer]) -> frozenset[Draw]:
    """The laws that every part which samples can draw from; the others never do."""
    sampling = [part.draws for part in parts if part.draws != {Draw.DETERMINISTIC}]
    if not sampling:
        return frozenset({Draw.DETERMINISTIC})
    common = frozenset.intersection(*sampling)
    if not common:
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"hybrid: no law of drafts is common to {names}")
    return common
