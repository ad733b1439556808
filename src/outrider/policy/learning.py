"""What the steps of one decision teach: costs, acceptance, and what drafts have gained."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.contracts import ControlledView, Proposal, StopRule, Verdict
from outrider.events import StepTiming
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.allocation import FIRST_BALANCE, StepModel, Track
from outrider.policy.costs import Costs, batch_bucket

PROBE_TOKENS = 2  # of a probe: enough to see whether first drafts are accepted
PROBE_STEPS = 4  # of a probe: a call of fewer steps tells little about costs

Outcomes = tuple[StepTiming, Seq[Proposal], Seq[Verdict]]  # of one step
Member = tuple[int, Track, int]  # index of the view, track, budget


@dataclass(slots=True)
class Part:
    """Steps of one decision with the same sequences."""

    views: list[ControlledView]
    members: list[Member]
    rules: dict[int, StopRule | None]  # by index of the view
    num_tokens: list[int]  # of each text before the first of these steps
    outcomes: list[Outcomes] = field(default_factory=list)

    @classmethod
    def begin(
        cls, views: Seq[ControlledView], members: list[Member], rules: dict[int, StopRule | None]
    ) -> Part:
        return cls(list(views), members, rules, [len(view.tokens) for view in views])

    @property
    def drafting(self) -> list[Member]:
        return [member for member in self.members if member[2]]

    def is_first(self, i: int) -> bool:
        """Whether the first of these steps is over a prompt."""
        return self.num_tokens[i] == self.views[i].num_prompt_tokens


@dataclass(slots=True)
class Lesson:
    """What `learn` has to know of a decision."""

    step: StepModel  # as it was priced then
    parts: list[Part]  # a new one for every sequence that came or went meanwhile


def undisturbed(seconds: Seq[float]) -> float:
    """The lower quartile: other load only lengthens a step."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def num_emitted(view: ControlledView) -> int:
    return len(view.tokens) - view.num_prompt_tokens


def learn(lesson: Lesson, costs: Costs) -> float:
    """Updates costs, acceptance and balances; returns the seconds of all steps."""
    step, parts = lesson.step, [part for part in lesson.parts if part.outcomes]
    if not parts:
        return 0.0
    other_s = _usual_other_s(step, [o for part in parts for o in part.outcomes], costs)
    pass_s: dict[int, list[float]] = {}
    took: list[float] = []
    gained_s = sum([_clock(part, step, costs, other_s, pass_s, took) for part in parts])
    sizes = {len(part.views) for part in parts if not part.drafting}
    plain = [seconds for size in sizes for seconds in pass_s.get(size, [])]
    if len(plain) >= PROBE_STEPS:
        unit_s = costs.verify.base(step.batch, step.num_sequences)
        costs.clock_plain(step.batch, undisturbed(plain) / unit_s)
    for num_tokens, found in _telling(pass_s):
        costs.verify.learn(step.batch, num_tokens, undisturbed(found), len(found))
    _learn_drafts(lesson, [part for part in parts if part.drafting], costs)
    drafting = [member for part in parts for member in part.drafting]
    if drafting and took:
        _settle(lesson, drafting, gained_s - len(took) * undisturbed(took))
    _judge_all(parts)
    return sum(
        timing.draft_s + timing.verify_s + timing.other_s
        for part in parts
        for timing, _, _ in part.outcomes
    )


def _clock(
    part: Part,
    step: StepModel,
    costs: Costs,
    other_s: float,
    pass_s: dict[int, list[float]],
    took: list[float],
) -> float:
    """Adds the steps' passes by their width to `pass_s`, and what draft and pass took to `took`;
    returns the seconds of plain steps that their tokens are worth."""
    verify, drafting, num_sequences = costs.verify, part.drafting, len(part.views)
    num_read, gained_s = sum(part.num_tokens), 0.0
    for timing, proposals, verdicts in part.outcomes:
        num_tokens = num_out = num_sequences
        for i, _, _ in drafting:
            num_tokens += len(proposals[i].tokens)
            num_out += len(verdicts[i].path)
        if num_tokens == timing.num_tokens:  # else prompts or other requests' drafts are in it
            own_s = timing.verify_s + other_s + (0.0 if drafting else timing.draft_s)
            context_s = verify.speed * (
                verify.context_cost(num_sequences, num_read)
                + verify.pair_s * num_read * (num_tokens / num_sequences - 1.0)
            )
            pass_s.setdefault(num_tokens, []).append(max(own_s / 2, own_s - context_s))
            if drafting:
                took.append(timing.draft_s + timing.verify_s)
                gained_s += num_out * step.plain_s / num_sequences - timing.other_s
        num_read += num_out
    return gained_s


def _judge_all(parts: list[Part]) -> None:
    """Updates the acceptance of all that drafted; evidence of the others fades."""
    drafts: dict[Track, tuple[StopRule | None, int, list[tuple[Proposal, Seq[int]]]]] = {}
    for part in parts:
        for i, track, k in part.members:
            if not k:
                track.rest(len(part.outcomes))
                continue
            track.idle = 0
            found = drafts.setdefault(track, (part.rules.get(i), k, []))[2]
            found += [(proposals[i], verdicts[i].path) for _, proposals, verdicts in part.outcomes]
            if len(part.outcomes) > 1 or not part.is_first(i):  # no drafter reads beside a prompt
                track.num_read = len(part.views[i].tokens)
    for track, (rule, k, steps) in drafts.items():
        _judge(track, rule, k, steps)


def _usual_other_s(step: StepModel, outcomes: list[Outcomes], costs: Costs) -> float:
    """Seconds of a step outside the models. Part of them comes once a call, and the calls of a
    probe or at the end of a text have few steps."""
    other_s = sum([timing.other_s for timing, _, _ in outcomes]) / len(outcomes)
    if len(outcomes) < 2 * PROBE_STEPS:
        return min(other_s, costs.other_s.get(step.batch, other_s))
    costs.other_s[step.batch] = other_s
    return other_s


def _settle(lesson: Lesson, drafting: list[Member], gained_s: float) -> None:
    """What drafts have gained or lost goes to the balances of their proposers."""
    batch, first_s = lesson.step.batch, FIRST_BALANCE * lesson.step.plain_s
    sources = {track.source for _, track, _ in drafting}
    for source in sources:
        before_s = source.balance_s[batch]
        after_s = before_s + gained_s / len(sources)
        if before_s > first_s:  # a slow moment of the machine does not end drafts that have paid
            after_s = max(after_s, before_s / 2)
        source.balance_s[batch] = max(after_s, -first_s)


def _learn_drafts(lesson: Lesson, parts: list[Part], costs: Costs) -> None:
    """The table is about one proposer's drafts, of about one length."""
    sources = {track.source for part in parts for _, track, _ in part.drafting}
    if len(sources) != 1:
        return
    source = sources.pop()
    rounds: dict[int, dict[int, list[float]]] = {}  # by batch bucket and number of rounds
    for part in parts:
        drafting = part.drafting
        longest = max([k for _, _, k in drafting])
        confident = all(track.is_confident for _, track, _ in drafting)
        even = 4 * sum([k for _, _, k in drafting]) >= 3 * longest * len(drafting)
        if not (confident or even) or any(part.is_first(i) for i, _, _ in drafting):
            continue
        took = [(longest, timing.draft_s) for timing, _, _ in part.outcomes]
        if confident:
            took = []
            for timing, proposals, _ in part.outcomes:
                drawn = [len(proposals[i].levels or ()) for i, _, _ in drafting]
                took.append((lesson.step.rounds_of(source, drawn), timing.draft_s))
        batch = batch_bucket(len(drafting))
        unread = [part.num_tokens[i] - track.num_read for i, track, _ in drafting]
        num_unread = sum([n for n in unread if n > MAX_AUTO_DRAFT_TOKENS])
        if num_unread:
            num_rounds, first_s = took[0]
            more_s = first_s - costs.draft_s(source.name, batch, num_rounds)
            costs.learn_reading(source.name, more_s / num_unread, len(drafting))
        if num_unread or 8 * sum([t.idle > 0 for _, t, _ in drafting]) > len(drafting):
            took = took[1:]  # the first draft after a pause includes catching up
        for num_rounds, seconds in took:
            if num_rounds:
                rounds.setdefault(batch, {}).setdefault(num_rounds, []).append(seconds)
    for batch, found in sorted(rounds.items()):
        for num_rounds, times in _telling(found):
            costs.learn_draft(source.name, batch, num_rounds, undisturbed(times), len(times))


def _telling(times: dict[int, list[float]]) -> list[tuple[int, list[float]]]:
    """Those of the most common width, and of the widest, which are few and matter most."""
    if not times:
        return []
    kept = {max(times, key=lambda width: len(times[width])), max(times)}
    return [(width, times[width]) for width in sorted(kept)]


def _judge(
    track: Track, rule: StopRule | None, k: int, drafts: Seq[tuple[Proposal, Seq[int]]]
) -> None:
    """What became of a sequence's drafts: (proposal, accepted path) of every step."""
    if any(proposal.tokens for proposal, _ in drafts):
        track.source.first = None
    outcomes = [
        (proposal.levels, len(proposal), len(path))
        for proposal, path in drafts
        if proposal.levels is not None
    ]
    if outcomes:
        track.judge(outcomes, k if rule is not None and rule.floors else 0)
    elif any(proposal.tokens for proposal, _ in drafts) or not track.is_confident:
        track.source.confident.discard(track.kind)
        track.acceptance.observe([(k, len(p), path, p.parents is not None) for p, path in drafts])
