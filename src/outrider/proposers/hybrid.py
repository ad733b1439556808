"""Proposes with several others: at every step, the one that promises most tokens per second.

Look-ups (ngram, suffix, prediction) take microseconds and find something or not; a drafter (a
model, a head) always has an answer and always costs a pass of its own. So look-ups are asked at
every step, and a drafter only where it is expected to gain more than its time costs. Which source
pays, and how many of its tokens, is the question of `policy.sources`.

In the pass over the prompt only look-ups are asked: the first token does not wait for a drafter.
Between two passes every line of code is cold and takes several times as long as usual, so a step
only notes what happened; several steps are learnt from at once.

One look-up and one drafter share a plan (`plan`): what to take of a look-up, by its size, and where
to ask the drafter instead is settled for some steps, and an executor looks up and drafts by itself.

The choice depends on finished steps and on look-ups, which are functions of the context; never on
what a drafter draws. So it is exact under ratio rules too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, cast

from outrider.contracts import (
    Drafted,
    Draw,
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
from outrider.policy.learning import PROBE_STEPS
from outrider.policy.sources import Answer, Place, SourcePolicy, Step, Track, Trial
from outrider.proposers._lookup import TextProposer
from outrider.proposers.options import read_options
from outrider.registry import BESIDE_MODEL


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


class HybridProposer:
    name = "hybrid"

    def __init__(
        self, lookups: Seq[Proposer], drafters: Seq[Proposer], draft_tokens: int = 8
    ) -> None:
        self._lookups = list(lookups)
        self._drafters = list(drafters)
        self._parts = [*lookups, *drafters]
        if not self._parts:
            raise ConfigError("hybrid needs at least one look-up or drafter")
        self.draws = common_draws(self._parts)
        self.trees = any(part.trees for part in self._parts)
        taps = {tap for part in self._parts for tap in part.needs.taps}
        self.needs = Needs(taps=tuple(sorted(taps)), early=bool(self._lookups))
        self.policy = SourcePolicy(
            [lookup.name for lookup in lookups],
            [drafter.name for drafter in drafters],
            min(draft_tokens, MAX_AUTO_DRAFT_TOKENS),
        )
        self._planned = _planned(self._lookups, self._drafters)
        self._step: Step | None = None  # under way
        self._asked: dict[int, Answer] = {}  # drafts of the step under way, by sequence
        self._pass_began = 0.0
        self._news: list[Step] = []  # steps not learnt from yet

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
        self._learn(len(views))
        step = self._step = Step()
        tracks = [self.policy.track(view) for view in views]
        proposals = [Proposal() for _ in views]
        values = [0.0] * len(views)
        beside = [False] * len(views)
        for lookup in self._lookups:
            for i, found in enumerate(lookup.propose(views, budgets)):
                if found.tokens:
                    track, size = tracks[i], len(found.tokens)
                    beside[i] = True
                    track.trials.append(Trial(lookup.name, found, len(views[i].tokens)))
                    offer = self.policy.of_lookup(track, lookup.name, size)[size]
                    if offer.value > values[i]:
                        proposals[i] = _first_nodes(found, offer.num_tokens)
                        values[i] = offer.value
        drafter, members = self._choose(tracks, budgets, values, beside)
        if drafter is not None:
            drafts = self._ask(drafter, members, tracks, budgets, beside, step)
            for i, draft in zip(members, drafts, strict=True):
                if draft.tokens:
                    proposals[i] = draft
        if all(len(view.tokens) - view.num_computed == 1 for view in views):
            step.width = len(views) + sum([len(proposal.tokens) for proposal in proposals])
        self._pass_began = perf_counter()
        return proposals

    def _choose(
        self, tracks: list[Track], budgets: Seq[int], values: list[float], beside: list[bool]
    ) -> tuple[Proposer | None, list[int]]:
        """The drafter to ask, and for which sequences; `values` are those of the look-ups."""
        best: tuple[float, Proposer | None, list[int]] = (0.0, None, [])
        for drafter in self._drafters:
            name = drafter.name
            members, surplus, longest = [], [], 0
            for i, track in enumerate(tracks):
                if len(track.view.tokens) == track.view.num_prompt_tokens:
                    continue  # the first token does not wait for a drafter
                offer = self.policy.of_drafter(track, (name, beside[i]), budgets[i])
                if offer.value > values[i] + self.policy.margin:
                    members.append(i)
                    surplus.append(offer.value - values[i])
                    longest = max(longest, offer.num_tokens)
            gained = self.policy.pays(name, surplus, longest) if members else 0.0
            members = [i for i in members if self.policy.reads(name, tracks[i])]
            if members and gained > best[0]:
                best = (gained, drafter, members)
        for i, track in enumerate(tracks):
            track.passed.append((beside[i], values[i]))
        return best[1:]

    def _ask(
        self,
        drafter: Proposer,
        members: list[int],
        tracks: list[Track],
        budgets: Seq[int],
        beside: list[bool],
        step: Step,
    ) -> list[Proposal]:
        places = [(drafter.name, beside[i]) for i in members]
        asked = [
            self.policy.of_drafter(tracks[i], place, budgets[i]).num_tokens
            for i, place in zip(members, places, strict=True)
        ]
        started = perf_counter()
        drafts = drafter.propose([tracks[i].view for i in members], asked)
        step.draft_s = perf_counter() - started
        for i, place, budget, draft in zip(members, places, asked, drafts, strict=True):
            answer = Answer(place, budget, draft.tokens, draft.parents is not None)
            self._note(step, tracks[i], answer, len(tracks[i].view.tokens))
        return drafts

    def _note(self, step: Step, track: Track, answer: Answer, num_tokens: int) -> None:
        """A drafter has drafted for a text of `num_tokens`."""
        name = step.drafter = answer.place[0]
        self._asked[track.view.id] = answer
        step.num_members += 1
        step.num_drafts = max(step.num_drafts, answer.budget)
        step.num_unread = max(step.num_unread, num_tokens - track.num_read.get(name, 0))
        track.num_read[name] = num_tokens

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Look-ups get every step, drafters those that they drafted in, unless they need the
        target's states."""
        step, self._step = self._step, None
        planned = [o.proposal.drafted for o in seen if o.proposal.drafted is not None]
        if planned:
            step = Step(draft_s=planned[0].draft_s, pass_s=planned[0].pass_s)
            step.width = planned[0].pass_tokens
            for view, observation in zip(views, seen, strict=True):
                if observation.proposal.drafted is not None:
                    self._see(step, view, observation, observation.proposal.drafted)
        if step is not None:
            step.pass_s = step.pass_s or perf_counter() - self._pass_began
            self._news.append(step)
        drafted: list[int] = []
        for i, (view, observation) in enumerate(zip(views, seen, strict=True)):
            track, verdict = self.policy.tracks.get(view.id), observation.verdict
            if track is None:
                continue
            track.num_steps += 1
            track.idle += 1
            if verdict is not None and step is not None:
                step.num_tokens += len(verdict.path) + 1
            answer = self._asked.pop(view.id, None)
            if answer is not None:
                drafted.append(i)
                track.idle = 0
                if verdict is not None and observation.proposal.tokens is answer.tokens:
                    track.answers.append(answer._replace(path=verdict.path))
        for part in self._parts:
            if part not in self._drafters or part.needs.taps:
                part.observe(views, seen)
            elif step is not None and step.drafter == part.name:
                part.observe([views[i] for i in drafted], [seen[i] for i in drafted])

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        if self._planned is None:
            return Propose()
        lookup, drafter = self._planned
        self._learn(len(views))
        num_tokens: list[int] = []
        takes: list[Seq[int]] = []
        indexes: list[object] = []
        for view, budget in zip(views, budgets, strict=True):
            track = self.policy.track(view)
            num_alone = num_beside = 0  # to ask the drafter for
            least = 0.0
            if drafter is not None:
                alone, beside = (
                    self.policy.of_drafter(track, (drafter.name, found), budget)
                    for found in (False, True)
                )
                if max(alone.net, beside.net) > 0.0 and self.policy.reads(drafter.name, track):
                    num_alone = alone.num_tokens if alone.net > 0.0 else 0
                    if beside.net > 0.0 and lookup is not None:
                        num_beside, least = beside.num_tokens, beside.net + self.policy.margin
            num_tokens.append(max(num_alone, num_beside))
            if lookup is not None:
                indexes.append(lookup.native_index(view))
                offers = self.policy.of_lookup(track, lookup.name, budget)[1 : budget + 1]
                best = [o.num_tokens if o.value > least else -num_beside for o in offers]
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

    def _see(self, step: Step, view: SequenceView, seen: Observation, drafted: Drafted) -> None:
        """Notes a step that an executor drafted by plan."""
        assert self._planned is not None
        lookup, drafter = self._planned
        track, num_tokens, chain = self.policy.track(view), seen.start + 1, seen.proposal.tokens
        found, size = drafted.found, 0
        if lookup is not None and found is not None and found.tokens:
            size = len(found.tokens)
            track.trials.append(Trial(lookup.name, found, num_tokens))
        value = 0.0
        if lookup is not None and size:
            value = self.policy.of_lookup(track, lookup.name, size)[size].value
        track.passed.append((size > 0, value))
        if drafter is not None and chain and not (found is not None and found.is_taken):
            place: Place = (drafter.name, size > 0)
            is_tree = seen.proposal.parents is not None
            self._note(step, track, Answer(place, len(chain), chain, is_tree), num_tokens)

    def release(self, sequence_id: int) -> None:
        self.policy.release(sequence_id)
        self._asked.pop(sequence_id, None)
        for part in self._parts:
            part.release(sequence_id)

    def _learn(self, num_sequences: int) -> None:
        """From the steps since the last time, if they are enough or the batch has changed."""
        if len(self._news) >= PROBE_STEPS or num_sequences != self.policy.num_sequences:
            self.policy.learn(self._news, num_sequences)
            self._news = []


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
    if len(lookups) > 1 or len(drafters) > 1:
        return None
    if drafter is not None and drafter.needs.taps and not getattr(drafter, "reads_taps", False):
        return None
    if not isinstance(lookup, TextProposer | None):
        return None
    if drafter is not None and not hasattr(drafter, "plan_beside"):
        return None
    return lookup, cast("_Drafter | None", drafter)


def _first_nodes(proposal: Proposal, num_nodes: int) -> Proposal:
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
    """The draws that every part which samples can make; the others never sample."""
    sampling = [part.draws for part in parts if part.draws != {Draw.DETERMINISTIC}]
    if not sampling:
        return frozenset({Draw.DETERMINISTIC})
    common = frozenset.intersection(*sampling)
    if not common:
        names = ", ".join(part.name for part in parts)
        raise ConfigError(f"hybrid: no way to draw is common to {names}")
    return common
