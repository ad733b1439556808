"""Several proposers for one sequence: at every step, the one that promises most tokens per second.

Look-ups (ngram, suffix, prediction) take microseconds and either find something or not; a drafter
(a model, a head) always has an answer and always costs a pass of its own. So look-ups are asked
first, at every step, and a drafter only where it is expected to gain more than its time costs:

    value = expected accepted tokens - rate * (t_draft + what the drafts add to the target's pass)

is compared for what was looked up, for each drafter at its best number of tokens, and for nothing,
which is worth 0. `rate`, what a second is worth, are the tokens a second brought lately: the choice
with the largest value at every step is the one with the highest rate in the long run, and the
highest rate of a single step is not. (Where copying goes fast, a token that has to be written in
between is not worth a drafter's time: the next one is copied again.) A drafter's time is shared by
all sequences of the batch that ask it.

What to expect is learnt from this sequence lately and from all others about as hot: per position
for drafters, per size of the draft for look-ups, which are judged when they were not used as well:
whatever the text became, it says how far they would have come. What things cost is learnt from the
clock. Between two passes every line of code is cold and takes
several times as long as usual, so a step only notes what happened; several are learnt from at once,
and values are kept until then.

A drafter that was not asked for long has to read what it missed, a whole prompt perhaps. That is
paid where what it would have saved so far, going on like this, makes it worth while before the
request ends: so nobody pays for a drafter that is of no use.

Where one side hardly gains anything over the other, the other is left alone for several steps
(`begin_ahead`); then everybody is asked again.

The choice depends on finished steps and on look-ups, which are functions of the context; never on
what a drafter draws. So it is exact under ratio rules too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from outrider.contracts import (
    AheadBatch,
    DraftsAhead,
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
from outrider.control.cost import batch_bucket, context_bucket
from outrider.control.survival import OWN_DECAY, Survival
from outrider.errors import ConfigError
from outrider.proposers._options import read_options
from outrider.proposers._times import Times

_START = 0.7  # acceptance of a looked-up token nobody has seen yet
_PRIOR_WEIGHT = 4.0  # what all sequences together are worth beside this one, in drafts
_OWN_DECAY = 0.95
_SHARED_DECAY = 0.99
_LEARN_EVERY = 8  # steps; after every second ...
_FIRST_STEPS = 64  # ... of the first
_RATE_DECAY = 0.95
_HORIZON = 128  # tokens to come that count, at most
_MARGIN = 0.01  # tokens that a drafter must promise more than a look-up, whose price is surer
_TRUST = 0.2  # tokens that cutting a look-up short must gain
_FEW = 0.1  # tokens that one side gains a step, below which the other may go ahead alone ...
_LATELY = 0.05  # ... of late: the weight of a step
_UNKNOWN = 0.3  # the same until anything is known
_LOOKUPS_ALONE = 4  # times in a row that a look-up may, and a drafter once
_BEHIND = 16  # tokens that a drafter reads in passing; more take time of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    lookups: Seq[str] = ("suffix",)  # asked at every step: must cost next to nothing
    drafters: Seq[str] | None = None  # None: draft-model, where there is a draft model
    draft_tokens: int = 8  # that a drafter is asked for at most

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"hybrid needs draft_tokens of at least 1, not {self.draft_tokens}")
        for names in (self.lookups, self.drafters or ()):
            if isinstance(names, str) or HybridProposer.name in names:
                raise ConfigError(f"hybrid needs lists of other proposers' names, not {names!r}")


Rates = tuple[float, float]


class Worth:
    """How likely a look-up's drafts are accepted, by their size: the first token, and each further
    one if all before it were. (A match is by chance or it is not: then it goes on for long.)

    Larger drafts come from longer matches: a size that was hardly seen leans on smaller ones.
    """

    def __init__(self, shared: Worth | None = None) -> None:
        """`shared`: what is known from everybody; None: this one is."""
        self._shared = shared
        self._decay = _SHARED_DECAY if shared is None else _OWN_DECAY
        # size -> decayed numbers of first tokens, of those accepted, and the same of further ones
        self._seen: dict[int, tuple[float, float, float, float]] = {}

    def rates(self, size: int) -> Rates:
        if self._shared is not None:
            return self._lean(size, self._shared.rates(size))
        rates = (_START, _START)
        for known in sorted(self._seen):
            if known <= size:
                rates = self._lean(known, rates)
        return rates

    def _lean(self, size: int, rates: Rates) -> Rates:
        first, first_good, further, good = self._seen.get(size, (0.0, 0.0, 0.0, 0.0))
        weight = _PRIOR_WEIGHT
        return (
            (first_good + weight * rates[0]) / (first + weight),
            (good + weight * rates[1]) / (further + weight),
        )

    def learn(self, size: int, num_accepted: int, is_refused: bool) -> None:
        """From a draft of which so many tokens were right, and then the text left it, or not."""
        if self._shared is not None:
            self._shared.learn(size, num_accepted, is_refused)
        first, first_good, further, good = self._seen.get(size, (0.0, 0.0, 0.0, 0.0))
        decay = self._decay
        self._seen[size] = (
            decay * first + 1,
            decay * first_good + (num_accepted > 0),
            decay * further + max(0, num_accepted - 1 + is_refused),
            decay * good + max(0, num_accepted - 1),
        )


class _Trial(NamedTuple):
    """A looked-up draft, and how long the text was then."""

    lookup: str
    proposal: Proposal
    start: int


class _Choice(NamedTuple):
    """The best number of tokens to take of a look-up, or to ask a drafter for."""

    num_tokens: int
    value: float  # if drafting took no time
    net: float  # if all sequences shared that time


class _Drafted(NamedTuple):
    """By a drafter; `path` was accepted of it."""

    drafter: str
    budget: int
    tokens: list[int]
    is_tree: bool
    path: Seq[int] = ()


@dataclass(slots=True)
class _Track:
    """One sequence: what each source is worth to it, and what was not learnt from yet."""

    view: SequenceView
    lookups: dict[str, Worth]
    drafters: dict[str, Survival]
    # Kept until the next lesson: what to take of look-ups, by size, and of drafters.
    found: dict[tuple[str, int], _Choice] = field(default_factory=dict)
    drafts: dict[str, _Choice] = field(default_factory=dict)
    trials: list[_Trial] = field(default_factory=list)
    drafted: _Drafted | None = None  # in the step under way
    outcomes: list[_Drafted] = field(default_factory=list)
    num_steps: int = 0
    idle: int = 0  # of these, since a drafter was asked
    # Tokens a step, lately: by look-ups over what drafters promised, and by drafters.
    gained: tuple[float, float] = (0.0, 0.0)
    num_fed: dict[str, int] = field(default_factory=dict)  # tokens that a drafter has read
    missed: dict[str, float] = field(default_factory=dict)  # lost by not asking, in tokens


@dataclass(slots=True)
class _Step:
    """What a step did, and how long it took."""

    drafter: str | None = None
    num_members: int = 0  # sequences that it drafted for, ...
    num_drafts: int = 0  # ... how many tokens each at most, ...
    behind: int = 0  # ... and how many it had to read first
    draft_s: float = 0.0
    width: int = 0  # of the target's pass; 0: prompts are read in it, too
    pass_s: float = 0.0
    num_tokens: int = 0  # that it brought


class HybridProposer:
    name = "hybrid"

    def __init__(
        self, lookups: Seq[Proposer], drafters: Seq[Proposer], draft_tokens: int = 8
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
        # `_Track.gained` of the last sequence about as hot.
        self._gained: dict[int, tuple[float, float]] = {}
        self._sources = {drafter.name: Source(drafter.name) for drafter in drafters}
        self._tracks: dict[int, _Track] = {}
        self._passes: dict[tuple[int, int], Times] = {}  # by batch and context
        self._draft_times: dict[tuple[str, int], Times] = {}  # by drafter and batch
        self._catch_up_s = dict.fromkeys(self._sources, 0.0)  # a token's, as far as known
        self._step: _Step | None = None  # under way
        self._pass_began = 0.0
        # Who may go ahead, for whom and how often; who does.
        self._alone: tuple[str, DraftsAhead, list[int]] | None = None
        self._times_alone = 0
        self._ahead: tuple[str, DraftsAhead] | None = None
        self._news: list[_Step] = []  # steps not learnt from yet
        self._num_steps = 0
        self._tokens = self._seconds = 0.0  # of lately
        # As of the last lesson: what a second is worth, how many sequences there are, the bucket of
        # their contexts, and how many tokens of a pass are not of the sequence that is looked at.
        self._rate = 0.0
        self._num_sequences = self._bucket = self._rest = 0
        self._row = [0.0]  # seconds of a pass by its tokens

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
        step = self._step = _Step()
        every = _LEARN_EVERY if self._num_steps >= _FIRST_STEPS else 2
        if len(self._news) >= every or len(views) != self._num_sequences:
            self._learn(views)
        tracks = [self._tracks.get(view.id) or self._begin(view) for view in views]
        proposals = [Proposal() for _ in views]
        values = [0.0] * len(views)
        for lookup in self._lookups:
            name = lookup.name
            for i, found in enumerate(lookup.propose(views, budgets)):
                if found.tokens:
                    track, size = tracks[i], len(found.tokens)
                    track.trials.append(_Trial(name, found, len(views[i].tokens)))
                    choice = track.found.get((name, size))
                    if choice is None:
                        first, further = track.lookups[name].rates(size)
                        chances = [first * further**k for k in range(size)]
                        choice = track.found[name, size] = self._best_length(chances)
                    if choice.value > values[i]:
                        proposals[i], values[i] = _first(found, choice.num_tokens), choice.value
        drafter, members = self._choose(views, tracks, budgets, values)
        if drafter is not None:
            for i, draft in self._ask(drafter, members, views, tracks, budgets, step):
                if draft.tokens:
                    proposals[i] = draft
        self._leave_alone(views, tracks, values, drafter, members, proposals)
        if all(len(view.tokens) - view.num_computed == 1 for view in views):
            step.width = len(views) + sum([len(proposal.tokens) for proposal in proposals])
        self._pass_began = perf_counter()
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Look-ups hear of every step, drafters of those that they drafted in, unless they need
        the target's states."""
        step, self._step = self._step, None
        if step is not None:
            step.pass_s = perf_counter() - self._pass_began
            self._news.append(step)
        drafted: list[int] = []
        for i, (view, observation) in enumerate(zip(views, seen, strict=True)):
            track, verdict = self._tracks.get(view.id), observation.verdict
            if track is None:
                continue
            track.num_steps += 1
            track.idle += 1
            if verdict is not None and step is not None:
                step.num_tokens += len(verdict.path) + 1
            draft = track.drafted
            if draft is not None:
                drafted.append(i)
                if verdict is not None and observation.proposal.tokens is draft.tokens:
                    track.outcomes.append(draft._replace(path=verdict.path))
                track.drafted, track.idle = None, 0
        for part in self._parts:
            if part not in self._drafters or part.needs.taps:
                part.observe(views, seen)
            elif step is not None and step.drafter == part.name:
                part.observe([views[i] for i in drafted], [seen[i] for i in drafted])

    def goes_ahead(self, views: Seq[SequenceView]) -> bool:
        """contracts.DraftsAhead; after a step in which everybody was asked."""
        if self._alone is None:
            return False
        _, drafter, ids = self._alone
        return ids == [view.id for view in views] and drafter.goes_ahead(views)

    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        assert self._alone is not None
        name, part, _ = self._alone
        self._times_alone -= 1
        if self._times_alone <= 0:
            self._alone = None
        self._ahead = (name, part)
        if name in self._sources:
            for i, view in enumerate(views):
                choice = self._tracks[view.id].drafts.get(name)
                if choice is None:
                    return False
                batch.num_drafts_S[i] = min(batch.num_drafts_S[i], choice.num_tokens)
        return part.begin_ahead(views, most_steps, batch)

    def drafted_ahead(self, view: SequenceView, chain: list[int]) -> None:
        assert self._ahead is not None
        name, part = self._ahead
        track, num_tokens = self._tracks[view.id], len(view.tokens)
        if name in self._sources:
            self._step = self._step or _Step(drafter=name)
            track.drafted = _Drafted(name, len(chain), chain, is_tree=False)
            track.num_fed[name] = num_tokens
        else:
            track.trials.append(_Trial(name, Proposal(chain), num_tokens))
        part.drafted_ahead(view, chain)

    def end_ahead(self, view: SequenceView) -> None:
        if self._ahead is not None:
            self._ahead[1].end_ahead(view)

    def release(self, sequence_id: int) -> None:
        track = self._tracks.pop(sequence_id, None)
        self._alone = None  # it may have been about this one
        if track is not None:
            self._judge(track)
            self._gained[heat(track.view.params.temperature)] = track.gained
        for part in self._parts:
            part.release(sequence_id)

    def _begin(self, view: SequenceView) -> _Track:
        temperature = view.params.temperature
        worth = {
            part.name: self._worth.setdefault((part.name, heat(temperature)), Worth())
            for part in self._lookups
        }
        track = self._tracks[view.id] = _Track(
            view,
            {name: Worth(shared) for name, shared in worth.items()},
            {name: Survival(source.prior(temperature)) for name, source in self._sources.items()},
            gained=self._gained.get(heat(temperature), (_UNKNOWN, _UNKNOWN)),
        )
        return track

    # --- what to do ---------------------------------------------------------------------------

    def _extra_s(self, num_drafts: int) -> float:
        """What one sequence's drafts add to the target's pass."""
        width = self._rest + 1
        if len(self._row) <= width + num_drafts:
            self._row = self._pass_times().row(width + max(num_drafts, MAX_AUTO_DRAFT_TOKENS))
        return self._row[width + num_drafts] - self._row[width]

    def _draft_s(self, name: str, num_sequences: int, num_drafts: int) -> float:
        """What drafting takes. One that nobody has asked yet is worth a try."""
        times = self._draft_times.get((name, batch_bucket(num_sequences)))
        return times.row(num_drafts)[num_drafts] if times else 0.0

    def _pass_times(self) -> Times:
        place = (batch_bucket(self._num_sequences), self._bucket)
        return self._passes.setdefault(place, Times(_pass_shape))

    def _best_length(self, chances: Seq[float], drafter: str | None = None) -> _Choice:
        """How many drafts to take if the k-th is accepted with `chances[k]`.

        A drafter's time is shared by all sequences here.
        """
        num_sequences, rate = self._num_sequences, self._rate
        expected = 0.0
        choice = best = _Choice(0, 0.0, 0.0)
        for k, chance in enumerate(chances, 1):
            expected += chance
            value = net = expected - rate * self._extra_s(k)
            if drafter is not None:
                net -= rate * self._draft_s(drafter, num_sequences, k) / num_sequences
            choice = _Choice(k, value, net)
            if net > best.net or k == 1:
                best = choice
        if (
            drafter is None and choice.net > best.net - _TRUST
        ):  # a look-up has reasons for its length
            return choice
        return best

    def _choose(
        self,
        views: Seq[SequenceView],
        tracks: list[_Track],
        budgets: Seq[int],
        values: list[float],
    ) -> tuple[Proposer | None, list[int]]:
        """Whom to ask, for which sequences; `values` are those of what was looked up."""
        best: Proposer | None = None
        best_members: list[int] = []
        best_surplus = 0.0
        for drafter in self._drafters:
            name = drafter.name
            members, surplus, longest = [], 0.0, 0
            for i, track in enumerate(tracks):
                choice = track.drafts.get(name)
                if choice is None or choice.num_tokens > budgets[i]:
                    survival = track.drafters[name]
                    survival.prior.refresh()
                    survival.refresh()
                    chances = survival.curve[: min(self._draft_tokens, budgets[i])]
                    choice = track.drafts[name] = self._best_length(chances, name)
                if choice.value > values[i] + _MARGIN:
                    members.append(i)
                    surplus += choice.value - values[i]
                    longest = max(longest, choice.num_tokens)
            if members:
                surplus -= self._rate * self._draft_s(name, len(members), longest)
                if surplus > best_surplus:
                    share = surplus / len(members)
                    members = [
                        i for i in members if self._may_read(name, views[i], tracks[i], share)
                    ]
                    if members:
                        best, best_members, best_surplus = drafter, members, surplus
        return best, best_members

    def _leave_alone(
        self,
        views: Seq[SequenceView],
        tracks: list[_Track],
        values: list[float],
        drafter: Proposer | None,
        members: list[int],
        proposals: list[Proposal],
    ) -> None:
        """Whether who drafted in this step may do so in the next ones without being compared."""
        most = [0.0, 0.0]
        for i, track in enumerate(tracks):
            rival = max([0.0, *[choice.net for choice in track.drafts.values()]])
            more = values[i] - rival
            gains = (0.0, max(0.0, -more)) if i in members else (max(0.0, more), 0.0)
            track.gained = (
                track.gained[0] + _LATELY * (gains[0] - track.gained[0]),
                track.gained[1] + _LATELY * (gains[1] - track.gained[1]),
            )
            most = [max(most[0], track.gained[0]), max(most[1], track.gained[1])]
        self._alone = None
        part = drafter
        if drafter is None and most[1] < _FEW:
            sources = {proposal.source for proposal in proposals}
            part = next((p for p in self._lookups if {p.name} == sources), None)
        elif most[0] >= _FEW or len(members) < len(views):
            return
        if isinstance(part, DraftsAhead):
            self._alone = part.name, part, [view.id for view in views]
            self._times_alone = _LOOKUPS_ALONE if drafter is None else 1

    def _may_read(self, name: str, view: SequenceView, track: _Track, gained: float) -> bool:
        """Whether a drafter may read what it missed, which gains so many tokens in this step; if
        not, the loss is noted."""
        behind = len(view.tokens) - track.num_fed.get(name, 0)
        if behind <= _BEHIND:
            return True
        missed = track.missed[name] = track.missed.get(name, 0.0) + gained
        num_tokens = len(view.tokens) - view.num_prompt_tokens
        to_come = min(view.params.max_tokens - num_tokens, _HORIZON)
        # As many steps for these as there were for what has been written.
        num_steps = to_come * (track.num_steps + 1) / (num_tokens + 1)
        price = self._rate * self._catch_up_s[name] * behind
        return missed / (track.num_steps + _PRIOR_WEIGHT) * num_steps >= price

    def _ask(
        self,
        drafter: Proposer,
        members: list[int],
        views: Seq[SequenceView],
        tracks: list[_Track],
        budgets: Seq[int],
        step: _Step,
    ) -> list[tuple[int, Proposal]]:
        name = drafter.name
        asked = [min(tracks[i].drafts[name].num_tokens, budgets[i]) for i in members]
        started = perf_counter()
        drafts = drafter.propose([views[i] for i in members], asked)
        step.draft_s = perf_counter() - started
        step.drafter, step.num_members, step.num_drafts = name, len(members), max(asked)
        for i, budget, draft in zip(members, asked, drafts, strict=True):
            track, num_tokens = tracks[i], len(views[i].tokens)
            track.drafted = _Drafted(name, budget, draft.tokens, draft.parents is not None)
            step.behind = max(step.behind, num_tokens - track.num_fed.get(name, 0))
            track.num_fed[name] = num_tokens
        return list(zip(members, drafts, strict=True))

    # --- what to learn ------------------------------------------------------------------------

    def _learn(self, views: Seq[SequenceView]) -> None:
        """From the steps since the last time. `views`: whom the next ones are for."""
        news, self._news = self._news, []
        self._num_steps += len(news)
        num_drafts = 0.0  # of a sequence and step
        for step in news:
            num_drafts += max(0, step.width - self._num_sequences) / len(news)
            self._learn_times(step)
        for times in (*self._passes.values(), *self._draft_times.values()):
            times.end_lesson()
        num_sequences = len(views)
        self._rest = round((num_sequences - 1) * (1 + num_drafts / max(1, self._num_sequences)))
        self._num_sequences = num_sequences
        self._bucket = context_bucket(sum([len(view.tokens) for view in views]) // num_sequences)
        self._row = [0.0]
        self._rate = self._tokens / self._seconds if self._seconds else 0.0
        for track in self._tracks.values():
            self._judge(track)

    def _learn_times(self, step: _Step) -> None:
        name, draft_s = step.drafter, 0.0
        if name is not None and step.draft_s:
            place = (name, batch_bucket(step.num_members))
            times = self._draft_times.setdefault(place, Times(float))
            if step.behind <= _BEHIND:
                times.learn(step.num_drafts, step.draft_s)
            draft_s = times.row(step.num_drafts)[step.num_drafts]
            if step.behind > _BEHIND:
                extra_s = max(0.0, step.draft_s - draft_s) / step.behind
                known = self._catch_up_s[name]
                self._catch_up_s[name] = extra_s if not known else known + 0.2 * (extra_s - known)
        if step.width:
            passes = self._pass_times()
            passes.learn(step.width, step.pass_s)
            # In the same quiet seconds as the prices.
            self._tokens = _RATE_DECAY * self._tokens + step.num_tokens
            self._seconds = (
                _RATE_DECAY * self._seconds + draft_s + passes.row(step.width)[step.width]
            )

    @staticmethod
    def _judge(track: _Track) -> None:
        """What became of a sequence's drafts; its values are to be found anew."""
        for name, budget, tokens, is_tree, path in track.outcomes:
            track.drafters[name].observe(budget, len(tokens), path, is_tree)
        if not track.outcomes:
            for survival in track.drafters.values():
                survival.fade(OWN_DECAY ** min(track.idle, _LEARN_EVERY))
        open_ = []
        for trial in track.trials:
            num_accepted, is_refused = follow(trial.proposal, track.view.tokens, trial.start)
            if is_refused is None:
                open_.append(trial)
            else:
                track.lookups[trial.lookup].learn(len(trial.proposal), num_accepted, is_refused)
        track.trials = open_
        track.outcomes = []
        track.found.clear()
        track.drafts.clear()


def follow(proposal: Proposal, tokens: list[int], start: int) -> tuple[int, bool | None]:
    """How many drafts the text `tokens[start:]` agrees with, and whether it then left them.

    None: not known yet; False: it came to the end of the draft.
    """
    parents = proposal.parents
    end, last, is_refused = start, -1, False
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if parents is None else parents[node]
        if parent == last:
            if end == len(tokens):
                return end - start, None
            is_refused = token != tokens[end]
            if not is_refused:
                last, end = node, end + 1
    return end - start, is_refused


def _pass_shape(num_tokens: int) -> float:
    """A pass is nearly free of its width, until something else is known."""
    return 1.0 + 0.03 * num_tokens


def _first(proposal: Proposal, num_nodes: int) -> Proposal:
    """The beginning of a deterministic draft."""
    if num_nodes >= len(proposal.tokens):
        return proposal
    parents = proposal.parents
    return Proposal(
        proposal.tokens[:num_nodes],
        None if parents is None else parents[:num_nodes],
        source=proposal.source,
    )


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
