"""What the steps of one decision teach: costs, acceptance, and what drafts have gained."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import ControlledView, Proposal, StopRule, Verdict
from outrider.events import StepTiming
from outrider.policy.allocation import StepModel, Track
from outrider.policy.costs import CATCH_UP, Costs, batch_bucket

NUM_SIZES = 2  # of pass widths, the most common ones, that costs are learnt from; and the largest
FIRST_BALANCE = 3  # plain steps that a proposer may lose before it has won any
ENOUGH_STEPS = 8  # of a call: fewer do not tell what a step costs outside the models

Outcomes = tuple[StepTiming, Seq[Proposal], Seq[Verdict]]  # of one step
Member = tuple[int, Track, int]  # index of the view, track, budget


@dataclass(slots=True)
class Lesson:
    """What `learn` has to know of the decision."""

    step: StepModel  # as it was priced then
    members: list[Member]
    rules: dict[int, StopRule | None]
    views: list[ControlledView]


def undisturbed(seconds: Seq[float]) -> float:
    """The lower quartile: other load only lengthens a step."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def num_emitted(view: ControlledView) -> int:
    return len(view.tokens) - view.num_prompt_tokens


def learn(lesson: Lesson, outcomes: list[Outcomes], costs: Costs) -> float:
    """Updates costs, acceptance and balances; returns the seconds of all steps."""
    step, verify = lesson.step, costs.verify
    drafting = [member for member in lesson.members if member[2]]
    num_sequences = len(lesson.views)
    emitted = sum([len(v.path) + 1 for _, _, verdicts in outcomes for v in verdicts])
    num_read = sum([len(view.tokens) for view in lesson.views]) - emitted  # before these steps
    other_s = _usual_other_s(step, outcomes, costs)
    pass_s: dict[int, list[float]] = {}
    total_s, gained_s, num_clocked = 0.0, 0.0, 0
    took: list[float] = []
    for timing, proposals, verdicts in outcomes:
        step_s = timing.draft_s + timing.verify_s + timing.other_s
        total_s += step_s
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
            took.append(timing.draft_s + timing.verify_s)
            gained_s += num_out * step.plain_s / num_sequences - timing.other_s
            num_clocked += 1
        num_read += num_out
    plain = [] if drafting else pass_s.get(num_sequences, [])
    if len(plain) >= ENOUGH_STEPS // 2:
        costs.plain_clock[step.batch] = undisturbed(plain) / verify.base(step.batch, num_sequences)
    for num_tokens, found in _telling(pass_s):
        verify.learn(step.batch, num_tokens, undisturbed(found), len(found))
    is_first = any(not num_emitted_before(lesson, outcomes, i) for i, _, _ in drafting)
    if drafting and not is_first:
        _learn_drafts(lesson, drafting, outcomes, costs)
    if drafting and took:
        gained_s -= num_clocked * undisturbed(took)
        _settle(lesson, drafting, gained_s)
    for i, track, k in drafting:
        steps = [(proposals[i], verdicts[i].path) for _, proposals, verdicts in outcomes]
        _judge(track, lesson.rules.get(i), k, steps)
        if num_emitted_before(lesson, outcomes[-1:], i):
            track.num_read = len(lesson.views[i].tokens)  # no drafter reads in the prompt's pass
    for _, track, k in lesson.members:
        if k:
            track.idle = 0
        else:
            track.rest(len(outcomes))
    return total_s


def num_emitted_before(lesson: Lesson, outcomes: Seq[Outcomes], i: int) -> int:
    """Tokens of the sequence before these last steps."""
    in_steps = sum([len(verdicts[i].path) + 1 for _, _, verdicts in outcomes])
    return num_emitted(lesson.views[i]) - in_steps


def _usual_other_s(step: StepModel, outcomes: list[Outcomes], costs: Costs) -> float:
    """Seconds of a step outside the models. Part of them comes once a call, and the calls of a
    probe or at the end of a text have few steps."""
    other_s = sum([timing.other_s for timing, _, _ in outcomes]) / len(outcomes)
    if len(outcomes) < ENOUGH_STEPS:
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


def _learn_drafts(
    lesson: Lesson, drafting: list[Member], outcomes: list[Outcomes], costs: Costs
) -> None:
    """The table is about one proposer's drafts, of about one length."""
    sources = {track.source for _, track, _ in drafting}
    longest = max([k for _, _, k in drafting])
    confident = all(track.is_confident for _, track, _ in drafting)
    even = 4 * sum([k for _, _, k in drafting]) >= 3 * longest * len(drafting)
    if len(sources) > 1 or not (confident or even):
        return
    source = sources.pop()
    name, batch = source.name, batch_bucket(len(drafting))
    took = [(longest, timing.draft_s) for timing, _, _ in outcomes]
    if confident:
        took = []
        for timing, proposals, _ in outcomes:
            drawn = [len(proposals[i].levels or ()) for i, _, _ in drafting]
            took.append((lesson.step.rounds_of(source, drawn), timing.draft_s))
    unread = [_unread_then(lesson, outcomes, i, track) for i, track, _ in drafting]
    num_unread = sum([n for n in unread if n > CATCH_UP])
    if num_unread:
        num_rounds, first_s = took[0]
        more_s = first_s - costs.draft_s(name, batch, num_rounds)
        costs.learn_reading(name, more_s / num_unread, len(drafting))
    if 8 * sum([track.idle > 0 for _, track, _ in drafting]) > len(drafting):
        took = took[1:]  # the first draft after a pause includes catching up
    rounds: dict[int, list[float]] = {}
    for num_rounds, seconds in took:
        if num_rounds:
            rounds.setdefault(num_rounds, []).append(seconds)
    for num_rounds, found in _telling(rounds):
        costs.learn_draft(name, batch, num_rounds, undisturbed(found), len(found))


def _unread_then(lesson: Lesson, outcomes: list[Outcomes], i: int, track: Track) -> int:
    emitted = sum([len(verdicts[i].path) + 1 for _, _, verdicts in outcomes])
    return len(lesson.views[i].tokens) - emitted - track.num_read


def _judge(
    track: Track, rule: StopRule | None, k: int, drafts: Seq[tuple[Proposal, Seq[int]]]
) -> None:
    """What became of a sequence's drafts: (proposal, accepted path) of every step."""
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


def _telling(found: dict[int, list[float]]) -> list[tuple[int, list[float]]]:
    """The most common sizes and the largest, of which there are few and each matters."""
    sizes = sorted(found, key=lambda size: -len(found[size]))
    kept = {*sizes[:NUM_SIZES], *([max(sizes)] if sizes else [])}
    return [(size, found[size]) for size in sorted(kept)]
