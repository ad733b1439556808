"""Several proposers for one sequence: at every step, the one that promises most tokens per second.

Look-ups (ngram, suffix, prediction) take microseconds and either find something or not; a drafter
(a model, a head) always has an answer and always costs a pass of its own. So look-ups are asked
first, at every step, and a drafter only where it is expected to gain more than its time costs.

What was looked up, each drafter at its best number of tokens, and nothing are compared by their
value in tokens (`_economy`).

What to expect is learnt from this sequence lately and from all others about as hot: per position
for drafters, per size of the draft for look-ups, which are judged when they were not used as well:
whatever the text became, it says how far they would have come. A drafter is judged apart where a
look-up has found something as well: where texts repeat themselves it has it easy, too. Between two
passes every line of code is cold and takes several times as long as usual, so a step only notes
what happened; several are learnt from at once, and values are kept until then.

In the pass over the prompt look-ups alone are asked: the first token does not wait for a drafter.
One that was not asked for long has to read what it missed, a whole prompt perhaps. That is
paid where what it would have saved so far, going on like this, makes it worth while before the
request ends: so nobody pays for a drafter that is of no use.

One look-up and one drafter share a plan (`plan`): what to take of a look-up, by its size, and where
to ask the drafter instead is settled for some steps, and an executor looks up and drafts by itself.

The choice depends on finished steps and on look-ups, which are functions of the context; never on
what a drafter draws. So it is exact under ratio rules too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol, cast

from outrider.contracts import (
    Drafted,
    Draw,
    Found,
    Needs,
    Observation,
    Proposal,
    Proposer,
    ProposerContext,
    SequenceView,
)
from outrider.draft_plans import Chain, DraftPlan, Lookup, Propose
from outrider.errors import ConfigError
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.acceptance import OWN_DECAY, Acceptance, temperature_bucket
from outrider.policy.allocation import Source
from outrider.proposers._economy import BEHIND, Choice, Done, Economy
from outrider.proposers._lookup import TextProposer
from outrider.proposers._worth import OwnWorth, Worth, first_nodes, follow
from outrider.proposers.options import read_options
from outrider.registry import BESIDE_MODEL

_LEARN_EVERY = 8  # steps; after every second ...
_FIRST_STEPS = 64  # ... of the first
_LEARN_PLANNED = 4  # steps that an executor ran by plan: before nearly every call
_HORIZON = 128  # tokens to come that count, at most
_MARGIN = 0.01  # tokens that a drafter must promise more than a look-up, whose price is surer
_UNSURE = 4.0  # steps without a loss that speak against reading a long text
_SURPLUS = 1.0  # tokens a step that a drafter gains over look-ups, until anything is known, ...
_LATELY = 0.02  # ... and the weight of a step beside those before it


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    lookups: Seq[str] = (BESIDE_MODEL,)  # asked at every step: must cost next to nothing
    drafters: Seq[str] | None = None  # None: the one of the user's draft model or head, if any
    draft_tokens: int = 8  # that a drafter is asked for at most

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"hybrid needs draft_tokens of at least 1, not {self.draft_tokens}")
        for names in (self.lookups, self.drafters or ()):
            if isinstance(names, str) or HybridProposer.name in names:
                raise ConfigError(f"hybrid needs lists of other proposers' names, not {names!r}")


Place = tuple[str, bool]  # a drafter, and whether a look-up has found something as well


class _Trial(NamedTuple):
    """A looked-up draft, and how long the text was then."""

    lookup: str
    found: Proposal | Found
    start: int


class _Answer(NamedTuple):
    """A drafter's draft, and the path of it that was accepted."""

    drafter: str
    budget: int
    tokens: list[int]
    is_tree: bool
    beside: bool  # a look-up had found something, too
    path: Seq[int] = ()


@dataclass(slots=True)
class _Track:
    """One sequence: what each source is worth to it, and what was not learnt from yet."""

    view: SequenceView
    lookups: dict[str, OwnWorth]
    drafters: dict[Place, Acceptance]
    # Kept until the next lesson: what to take of look-ups, by size, and of drafters.
    found: dict[str, list[Choice]] = field(default_factory=dict)
    drafts: dict[Place, Choice] = field(default_factory=dict)
    trials: list[_Trial] = field(default_factory=list)
    drafted: _Answer | None = None  # in the step under way
    outcomes: list[_Answer] = field(default_factory=list)
    num_steps: int = 0
    idle: int = 0  # of these, since a drafter was asked
    num_fed: dict[str, int] = field(default_factory=dict)  # tokens that a drafter has read
    missed: dict[str, float] = field(default_factory=dict)  # lost by not asking, in tokens
    sizes: list[int] = field(default_factory=list)  # of what was looked up in planned steps


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
        self.needs = Needs(taps=tuple(sorted(taps)), early=bool(self._lookups))
        self._worth: dict[tuple[str, int], Worth] = {}  # by look-up and heat
        self._surplus: dict[tuple[str, int], float] = {}  # of a drafter over look-ups, by heat
        self._sources: dict[Place, Source] = {
            (drafter.name, beside): Source(drafter.name)
            for drafter in drafters
            for beside in (False, True)
        }
        self._tracks: dict[int, _Track] = {}
        self._economy = Economy([drafter.name for drafter in drafters])
        self._step: Done | None = None  # under way
        self._pass_began = 0.0
        self._planned = _planned(self._lookups, self._drafters)
        self._news: list[Done] = []  # steps not learnt from yet
        self._num_steps = 0

    @classmethod
    def build(cls, context: ProposerContext) -> HybridProposer:
        config = read_options(HybridConfig, cls.name, context.options)
        drafters = config.drafters
        if drafters is None:
            drafters = [] if context.drafter_proposer is None else [context.drafter_proposer]
        return cls(
            [context.proposer(name) for name in config.lookups],
            [context.proposer(name) for name in drafters],
            config.draft_tokens,
        )

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        step = self._step = Done()
        every = _LEARN_EVERY if self._num_steps >= _FIRST_STEPS else 2
        if len(self._news) >= every or len(views) != self._economy.num_sequences:
            self._learn(views)
        tracks = [self._tracks.get(view.id) or self._begin(view) for view in views]
        proposals = [Proposal() for _ in views]
        values = [0.0] * len(views)
        beside = [False] * len(views)
        for lookup in self._lookups:
            name = lookup.name
            for i, found in enumerate(lookup.propose(views, budgets)):
                if found.tokens:
                    track, size = tracks[i], len(found.tokens)
                    beside[i] = True
                    track.trials.append(_Trial(name, found, len(views[i].tokens)))
                    choice = self._choices(track, name, size)[size]
                    if choice.value > values[i]:
                        proposals[i] = first_nodes(found, choice.num_tokens)
                        values[i] = choice.value
        drafter, members = self._choose(views, tracks, budgets, values, beside)
        if drafter is not None:
            for i, draft in self._ask(drafter, members, views, tracks, budgets, beside, step):
                if draft.tokens:
                    proposals[i] = draft
        if all(len(view.tokens) - view.num_computed == 1 for view in views):
            step.width = len(views) + sum([len(proposal.tokens) for proposal in proposals])
        self._pass_began = perf_counter()
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Look-ups hear of every step, drafters of those that they drafted in, unless they need
        the target's states."""
        step, self._step = self._step, None
        planned = [o.proposal.drafted for o in seen if o.proposal.drafted is not None]
        if planned:
            step = Done(draft_s=planned[0].draft_s, pass_s=planned[0].pass_s)
            step.width = planned[0].pass_tokens
            for view, observation in zip(views, seen, strict=True):
                if observation.proposal.drafted is not None:
                    self._see(step, view, observation, observation.proposal.drafted)
        if step is not None:
            step.pass_s = step.pass_s or perf_counter() - self._pass_began
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

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        if self._planned is None:
            return Propose()
        lookup, drafter = self._planned
        if len(self._news) >= _LEARN_PLANNED or len(views) != self._economy.num_sequences:
            self._learn(views)
        num_tokens: list[int] = []
        takes: list[Seq[int]] = []
        indexes: list[object] = []
        for view, budget in zip(views, budgets, strict=True):
            track = self._tracks.get(view.id) or self._begin(view)
            num_alone = num_beside = 0  # to ask the drafter for
            least = 0.0
            if drafter is not None:
                alone, beside = (
                    self._draft_choice(track, (drafter.name, found), budget)
                    for found in (False, True)
                )
                if max(alone.net, beside.net) > 0.0 and self._reads(drafter.name, view, track):
                    num_alone = alone.num_tokens if alone.net > 0.0 else 0
                    if beside.net > 0.0 and lookup is not None:
                        num_beside, least = beside.num_tokens, beside.net + _MARGIN
            num_tokens.append(max(num_alone, num_beside))
            if lookup is not None:
                indexes.append(lookup.native_index(view))
                choices = self._choices(track, lookup.name, budget)[1 : budget + 1]
                best = [c.num_tokens if c.value > least else -num_beside for c in choices]
                takes.append([-num_alone, *best])
        if None in indexes:
            return Propose()
        found = list(budgets) if lookup is not None else None
        chain = None
        if drafter is not None and (any(num_tokens) or lookup is None):
            chain = drafter.plan_beside(views, num_tokens, max_steps, found)
            if chain is None:
                return Propose()
        if lookup is not None and found is not None:
            return Lookup(lookup.name, indexes, found, takes, chain)
        return chain or Propose()

    def _see(self, step: Done, view: SequenceView, seen: Observation, drafted: Drafted) -> None:
        """Notes a step that an executor drafted by plan."""
        assert self._planned is not None
        lookup, drafter = self._planned
        track, num_tokens, chain = self._tracks[view.id], seen.start + 1, seen.proposal.tokens
        found = drafted.found
        track.sizes.append(0 if found is None else len(found.tokens))
        if lookup is not None and found is not None:
            if found.tokens:
                track.trials.append(_Trial(lookup.name, found, num_tokens))
            if found.is_taken:
                return
        if drafter is not None and chain:
            place = (drafter.name, found is not None and bool(found.tokens))
            self._note(step, place, num_tokens, track, chain, False, len(chain))

    def release(self, sequence_id: int) -> None:
        track = self._tracks.pop(sequence_id, None)
        if track is not None:
            self._judge(track)
        for part in self._parts:
            part.release(sequence_id)

    def _begin(self, view: SequenceView) -> _Track:
        temperature = view.params.temperature
        worth = {
            part.name: self._worth.setdefault(
                (part.name, temperature_bucket(temperature)), Worth(temperature=temperature)
            )
            for part in self._lookups
        }
        track = self._tracks[view.id] = _Track(
            view,
            {name: OwnWorth(shared) for name, shared in worth.items()},
            {
                place: Acceptance(source.prior(temperature))
                for place, source in self._sources.items()
            },
        )
        return track

    # --- what to do ---------------------------------------------------------------------------

    def _choices(self, track: _Track, name: str, most: int) -> list[Choice]:
        """What to take of a look-up, by the size of what was found: 0..most at least."""
        choices = track.found.get(name)
        if choices is None or len(choices) <= most:
            rates = track.lookups[name].rates(max(most, MAX_AUTO_DRAFT_TOKENS))
            choices = track.found[name] = [
                self._economy.best_length([first * further**k for k in range(size)])
                for size, (first, further) in enumerate(rates)
            ]
        return choices

    def _draft_choice(self, track: _Track, place: Place, budget: int) -> Choice:
        """How much to ask a drafter for."""
        choice = track.drafts.get(place)
        if choice is None or choice.num_tokens > budget:
            survival = track.drafters[place]
            survival.refresh()
            chances = survival.curve[: min(self._draft_tokens, budget)]
            choice = track.drafts[place] = self._economy.best_length(chances, place[0])
        return choice

    def _choose(
        self,
        views: Seq[SequenceView],
        tracks: list[_Track],
        budgets: Seq[int],
        values: list[float],
        beside: list[bool],
    ) -> tuple[Proposer | None, list[int]]:
        """Whom to ask, for which sequences; `values` are those of what was looked up, if it was."""
        best: Proposer | None = None
        best_members: list[int] = []
        best_surplus = 0.0
        for drafter in self._drafters:
            name = drafter.name
            members, surplus, longest = [], 0.0, 0
            for i, track in enumerate(tracks):
                if len(views[i].tokens) == views[i].num_prompt_tokens:
                    continue  # the first token does not wait for a drafter
                choice = self._draft_choice(track, (name, beside[i]), budgets[i])
                if choice.value > values[i] + _MARGIN:
                    members.append(i)
                    surplus += choice.value - values[i]
                    longest = max(longest, choice.num_tokens)
            if members:
                surplus -= self._economy.drafting(name, len(members), longest)
                if surplus > best_surplus:
                    share = surplus / len(members)
                    members = [
                        i for i in members if self._may_read(name, views[i], tracks[i], share)
                    ]
                    if members:
                        best, best_members, best_surplus = drafter, members, surplus
        return best, best_members

    def _may_read(self, name: str, view: SequenceView, track: _Track, gained: float) -> bool:
        """Whether a drafter may read what it missed, which gains so many tokens in this step; if
        not, the loss is noted."""
        if len(view.tokens) - track.num_fed.get(name, 0) > BEHIND:
            track.missed[name] = track.missed.get(name, 0.0) + gained
        return self._reads(name, view, track)

    def _reads(self, name: str, view: SequenceView, track: _Track) -> bool:
        """Whether it pays that a drafter reads what it missed."""
        behind = len(view.tokens) - track.num_fed.get(name, 0)
        if behind <= BEHIND:
            return True
        missed = track.missed.get(name)
        if missed is None:
            place = (name, temperature_bucket(view.params.temperature))
            missed = self._surplus.get(place, _SURPLUS)
        num_tokens = len(view.tokens) - view.num_prompt_tokens
        to_come = min(view.params.max_tokens - num_tokens, _HORIZON)
        # As many steps for these as there were for what has been written.
        num_steps = to_come * (track.num_steps + 1) / (num_tokens + 1)
        price = self._economy.reading(name, behind)
        return missed / (track.num_steps + _UNSURE) * num_steps >= price

    def _ask(
        self,
        drafter: Proposer,
        members: list[int],
        views: Seq[SequenceView],
        tracks: list[_Track],
        budgets: Seq[int],
        beside: list[bool],
        step: Done,
    ) -> list[tuple[int, Proposal]]:
        places = [(drafter.name, beside[i]) for i in members]
        asked = [
            min(tracks[i].drafts[place].num_tokens, budgets[i])
            for i, place in zip(members, places, strict=True)
        ]
        started = perf_counter()
        drafts = drafter.propose([views[i] for i in members], asked)
        step.draft_s = perf_counter() - started
        for i, place, budget, draft in zip(members, places, asked, drafts, strict=True):
            is_tree = draft.parents is not None
            self._note(step, place, len(views[i].tokens), tracks[i], draft.tokens, is_tree, budget)
        return list(zip(members, drafts, strict=True))

    @staticmethod
    def _note(
        step: Done,
        place: Place,
        num_tokens: int,
        track: _Track,
        tokens: list[int],
        is_tree: bool,
        budget: int,
    ) -> None:
        """A drafter drafted `tokens` for a text of `num_tokens`, asked for `budget` of them."""
        name, beside = place
        track.drafted = _Answer(name, budget, tokens, is_tree, beside)
        step.drafter = name
        step.num_members += 1
        step.num_drafts = max(step.num_drafts, budget)
        step.behind = max(step.behind, num_tokens - track.num_fed.get(name, 0))
        track.num_fed[name] = num_tokens

    # --- what to learn ------------------------------------------------------------------------

    def _learn(self, views: Seq[SequenceView]) -> None:
        """From the steps since the last time. `views`: whom the next ones are for."""
        news, self._news = self._news, []
        self._num_steps += len(news)
        self._economy.learn(news, len(views))
        for track in self._tracks.values():
            self._judge(track)

    def _judge(self, track: _Track) -> None:
        """What became of a sequence's drafts; its values are to be found anew."""
        if track.sizes:
            self._count_missed(track)
        for name, budget, tokens, is_tree, beside, path in track.outcomes:
            track.drafters[name, beside].observe([(budget, len(tokens), path, is_tree)])
        if not track.outcomes:
            for survival in track.drafters.values():
                survival.fade(OWN_DECAY ** min(track.idle, _LEARN_EVERY))
        open_ = []
        for trial in track.trials:
            found = trial.found
            num_accepted, is_refused = follow(found, track.view.tokens, trial.start)
            if is_refused is None:
                open_.append(trial)
            else:
                track.lookups[trial.lookup].learn(len(found.tokens), num_accepted, is_refused)
        track.trials = open_
        track.outcomes = []
        track.found.clear()
        track.drafts.clear()

    def _count_missed(self, track: _Track) -> None:
        """What the drafter would have gained over the look-ups of planned steps."""
        assert self._planned is not None
        lookup, drafter = self._planned
        sizes, track.sizes = track.sizes, []
        if drafter is None:
            return
        name, view = drafter.name, track.view
        values = [0.0]
        if lookup is not None:
            values = [found.value for found in self._choices(track, lookup.name, max(sizes))]
        place = (name, temperature_bucket(view.params.temperature))
        known = self._surplus.get(place, _SURPLUS)
        is_behind = len(view.tokens) - track.num_fed.get(name, 0) > BEHIND
        for size in sizes:
            choice = track.drafts.get((name, size > 0))
            gained = max(0.0, choice.net - values[size]) if choice is not None else 0.0
            known += _LATELY * (gained - known)
            if is_behind:
                track.missed[name] = track.missed.get(name, 0.0) + gained
        self._surplus[place] = known


class _Drafter(Proposer, Protocol):
    """One that can share a plan with a look-up."""

    def plan_beside(
        self,
        views: Seq[SequenceView],
        num_tokens: list[int],
        max_steps: int,
        max_found: Seq[int] | None = None,
    ) -> Chain | None: ...


Planned = tuple[TextProposer | None, _Drafter | None]


def _planned(lookups: list[Proposer], drafters: list[Proposer]) -> Planned | None:
    """The look-up and the drafter that can share a plan; None: there are others."""
    lookup, drafter = next(iter(lookups), None), next(iter(drafters), None)
    if len(lookups) > 1 or len(drafters) > 1 or (drafter is not None and drafter.needs.taps):
        return None
    if not isinstance(lookup, TextProposer | None):
        return None
    if drafter is not None and not hasattr(drafter, "plan_beside"):
        return None
    return lookup, cast("_Drafter | None", drafter)


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
