"""What a decision's steps tell: the prices, what drafts have won or lost, and how far they hold.

Both purses and credits are seconds, by batch size. Every step puts `SHARE` of its time into both. A
probe is paid from the purse, and what its drafts save comes back; what decisions to draft have won
or lost against plain decoding goes to the credit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median

from outrider.contracts import ControlledView, Proposal, StopRule, Verdict
from outrider.control.allocation import MOST_OFF, Group, Source, Track
from outrider.control.cost import Costs, CostTable, batch_bucket
from outrider.events import StepTiming

SHARE = 0.005  # of all time that may be lost
MOST_PURSE = 6  # plain steps that may be saved up
FIRST_CREDIT, MOST_CREDIT = 4, 16  # plain steps
LEAST_STEPS = 8  # that a decision about an unchanged batch stands for
LEAST_EVIDENCE = 4  # steps that tell whether drafts gain
STARTING = 0.1  # of a plain step: what one of a probe costs at least, with what surrounds it
MOST_DEARER = 2  # times its price: what a probe may have cost at most, the rest is the machine's
# Of a drafting step, by doubling of the batch: what no clock of a step sees. Sequences that would
# have ended together end one by one, and prompts are read that way.
UNSEEN = 0.02
MOST_AGE = 128  # decisions for which a tried plain step stands
MOST_SIZES = 2  # of a decision's steps, the most common ones, that prices are learnt from

News = tuple[StepTiming, Seq[Proposal], Seq[Verdict]]  # what became of one step
Asked = tuple[int, Track, int]  # (index of the view, track, budget)


@dataclass(slots=True)
class Decision:
    """What stands, and for whom."""

    ids: list[int]
    num_tokens: int  # of the pass before any draft
    asked: list[Asked]
    most_steps: int
    views: Seq[ControlledView] = ()  # none where nothing is to be learnt
    bucket: int = 0  # of the context
    plain_s: float = 0.0
    plain_base: float = 1.0  # of the table
    num_read: int = 0  # tokens of context, of all sequences together
    behind: int = 0  # tokens that drafters have to read first
    probed: Track | None = None
    probe_s: float = 0.0  # what it adds to a step
    least_steps: int = LEAST_STEPS
    num_steps: int = 1  # that it has stood for, the one under way included
    # Whose purse lacks what for a probe; infinitely much where none could tell anything new.
    missing: tuple[Source, int, float] | None = None
    groups: frozenset[Group] = frozenset()  # whom it was made for then
    num_rested: int = 0  # steps for which it was left standing before
    is_first: bool = False  # somebody drafted in the pass over its prompt
    cautions: dict[int, StopRule | None] = field(default_factory=dict)  # by index of the view

    def rest(self, source: Source, batch: int, price_s: float, tracks: Seq[Track]) -> None:
        """Nobody drafts, and there is no probe."""
        self.missing = source, batch, price_s
        self.groups = frozenset([track.group for track in tracks])

    def has_grown(self, num_tokens: int, verify: CostTable) -> None:
        """The sequences' contexts, all together."""
        self.num_read += num_tokens
        self.plain_base += verify.context_s * num_tokens
        self.plain_s += verify.scale * verify.context_s * num_tokens


class Learner:
    """Refreshes `costs` and the tracks of whoever was asked."""

    def __init__(self, costs: Costs) -> None:
        self.read_s: float | None = None  # what a token takes that a drafter has to read
        self._costs = costs
        self._other_s: dict[int, float] = {}  # of a step, outside the models, by batch bucket
        # By batch bucket: what plain steps took over the table's base, and decisions since.
        self._tried: dict[int, tuple[float, int]] = {}
        # Too few to tell anything yet: plain steps over the base, and (seconds, what plain decoding
        # would have needed) of drafting ones. Calls are short where clients come and go.
        self._few_plain: dict[int, list[float]] = {}
        self._few_drafting: dict[int, list[tuple[float, float]]] = {}

    def learn(self, now: Decision, news: list[News]) -> None:
        """From the decision's steps since the last time."""
        drafting = [(i, track, k) for i, track, k in now.asked if k]
        num_sequences = len(now.ids)
        batch = batch_bucket(num_sequences)
        other_s = self._usual_other_s(batch, news)
        pass_s: dict[int, list[float]] = {}  # of steps that held sequences and our drafts alone
        total_s = 0.0
        steps: list[tuple[float, float]] = []  # of these, the ones with drafts: and what they saved
        plain: list[float] = []  # steps without drafts, over the table's base
        verify = self._costs.verify
        tried = self.tried_s(batch, 1.0)  # over the base
        for timing, proposals, verdicts in news:
            step_s = timing.draft_s + timing.verify_s + timing.other_s
            total_s += step_s
            num_tokens = num_emitted = num_sequences
            for i, _, _ in drafting:
                num_tokens += len(proposals[i].tokens)
                num_emitted += len(verdicts[i].path)
            if num_tokens == timing.num_tokens:
                took_s = timing.verify_s + other_s + (0.0 if drafting else timing.draft_s)
                more_s = verify.scale * verify.off_middle_s(now.bucket, batch, now.num_read)
                pass_s.setdefault(num_tokens, []).append(took_s - min(more_s, MOST_OFF * took_s))
                if drafting:
                    plain_s = min(now.plain_s, (tried or math.inf) * now.plain_base)
                    steps.append((step_s, num_emitted * plain_s / num_sequences))
                else:
                    plain.append(took_s / now.plain_base)
            now.has_grown(num_emitted, verify)
        if batch in self._tried:
            over_base, age = self._tried[batch]
            self._tried[batch] = over_base, age + 1
        few = self._few_plain.setdefault(batch, [])
        few += plain
        if len(few) >= LEAST_EVIDENCE:
            self._tried[batch] = median(few), 0
            few.clear()
        for num_tokens, took in _telling(pass_s):
            self._costs.verify.refresh(
                now.bucket, num_tokens, median(took), batch, num_steps=len(took)
            )
        if drafting and not now.is_first:
            self._learn_drafts(now, drafting, news)
        if now.probed is None and steps:
            unsettled = self._few_drafting.setdefault(batch, [])
            unsettled += steps
            if len(unsettled) >= LEAST_EVIDENCE:
                # A hiccup is nobody's fault.
                spent_s = len(unsettled) * median([step_s for step_s, _ in unsettled])
                saved_s = sum([saved_s for _, saved_s in unsettled])
                _settle(now, drafting, batch, saved_s - (1.0 + UNSEEN * batch) * spent_s)
                unsettled.clear()
        for i, track, k in drafting:
            if track is now.probed:
                track.source.purses[batch] += _earned_s(now, i, news)
            _judge(track, now.cautions.get(i), k, [(p[i], v[i].path) for _, p, v in news])
            if num_emitted_by(now.views[i]) > len(news[-1][2][i].path) + 1:
                track.num_read = len(now.views[i].tokens)  # no drafter reads in the prompt's pass
        share_s = SHARE * total_s
        for source in {track.source for _, track, _ in now.asked}:
            purse_s, credit_s = source.purses[batch] + share_s, source.credits[batch] + share_s
            source.purses[batch] = min(purse_s, MOST_PURSE * now.plain_s)
            source.credits[batch] = min(credit_s, MOST_CREDIT * now.plain_s)
        for _, track, k in now.asked:
            if k:
                track.idle = 0
            else:
                track.rested(len(news))
        now.behind = 0

    def tried_s(self, batch: int, base: float) -> float | None:
        """What a plain step takes, as one was clocked lately; None where none was. While all steps
        draft, the table follows them, and its plain steps with it."""
        over_base, age = self._tried.get(batch, (0.0, MOST_AGE))
        return over_base * base if age < MOST_AGE else None

    def _usual_other_s(self, batch: int, news: list[News]) -> float:
        """What a step takes besides. Some of it comes once a call, and calls at the end of a text,
        or of a probe, have few steps: that is not what their drafts cost."""
        other_s = sum([timing.other_s for timing, _, _ in news]) / len(news)
        if len(news) < LEAST_STEPS:
            return min(other_s, self._other_s.get(batch, other_s))
        self._other_s[batch] = other_s
        return other_s

    def _learn_drafts(self, now: Decision, drafting: list[Asked], news: list[News]) -> None:
        """The table is about one proposer's drafts, of about one length."""
        costs = self._costs
        sources = {track.source for _, track, _ in drafting}
        longest = max([k for _, _, k in drafting])
        is_sure = all(track.is_sure for _, track, _ in drafting)
        is_even = 4 * sum([k for _, _, k in drafting]) >= 3 * longest * len(drafting)
        if len(sources) > 1 or not (is_sure or is_even):
            return
        source = sources.pop()
        name, bucket = source.name, batch_bucket(len(drafting))
        took = [(longest, timing.draft_s) for timing, _, _ in news]
        if is_sure:  # whole rounds of a step, as `Source.rounds` counts them
            took = []
            for timing, proposals, _ in news:
                drawn = [len(proposals[i].levels or ()) for i, _, _ in drafting]
                mean = sum(drawn) / len(drawn)
                num_rounds = source.lone * max(drawn) + (1.0 - source.lone) * mean
                took.append((round(num_rounds), timing.draft_s))
        if now.behind:
            # Reading is no slower than drafting; the first time it meets untouched memory, too.
            first, first_s = took[0]
            read_s = max(0.0, first_s - costs.draft_s(name, bucket, first)) / now.behind
            read_s = min(read_s, costs.draft_s(name, bucket, 1) / len(drafting))
            known_s = self.read_s
            self.read_s = read_s if known_s is None else known_s + 0.3 * (read_s - known_s)
        # A drafter that has to catch up first takes longer than the table is about.
        if 8 * sum([track.idle > 0 for _, track, _ in drafting]) > len(drafting):
            took = took[1:] or [(n, s) for n, s in took if s < costs.draft_s(name, bucket, n)]
        by_rounds: dict[int, list[float]] = {}
        for num_rounds, seconds in took:
            by_rounds.setdefault(num_rounds, []).append(seconds)
        by_rounds.pop(0, None)
        for num_rounds, some in _telling(by_rounds):
            costs.learn_draft(name, bucket, num_rounds, median(some), len(some))


def _settle(now: Decision, drafting: list[Asked], batch: int, gain_s: float) -> None:
    """What drafts have won goes to whoever made them."""
    sources = {track.source for _, track, _ in drafting}
    for source in sources:
        held_s = source.credits[batch]
        left_s = held_s + gain_s / len(sources)
        if held_s > FIRST_CREDIT * now.plain_s:
            # A slow moment is no proof against drafts that have paid so far.
            left_s = max(left_s, held_s / 2)
        source.credits[batch] = left_s


def _earned_s(now: Decision, index: int, news: list[News]) -> float:
    """What a probe has brought, less what it has cost."""
    plain_s, num_steps = now.plain_s, len(news)
    took_s = sum([timing.draft_s + timing.verify_s + timing.other_s for timing, _, _ in news])
    cost_s = max(num_steps * STARTING * plain_s, took_s - num_steps * plain_s)
    num_kept = sum([len(verdicts[index].path) for _, _, verdicts in news])
    brought_s = num_kept * plain_s / len(now.ids)
    return brought_s - min(cost_s, MOST_DEARER * num_steps * now.probe_s)


def _judge(
    track: Track, caution: StopRule | None, k: int, drafts: Seq[tuple[Proposal, Seq[int]]]
) -> None:
    """What became of a sequence's drafts: (proposal, accepted path) of every step."""
    outcomes = [
        (proposal.levels, len(proposal), len(path))
        for proposal, path in drafts
        if proposal.levels is not None
    ]
    if outcomes:
        track.judge(outcomes, k if caution is not None and caution.floors else 0)
    elif any(proposal.tokens for proposal, _ in drafts) or not track.is_sure:
        track.source.sure.discard(track.kind)
        track.survival.observe([(k, len(p), path, p.parents is not None) for p, path in drafts])


def _telling(found: dict[int, list[float]]) -> list[tuple[int, list[float]]]:
    """The most common sizes and the largest, of which there are few and each matters."""
    sizes = sorted(found, key=lambda size: -len(found[size]))
    kept = {*sizes[:MOST_SIZES], *([max(sizes)] if sizes else [])}
    return [(size, found[size]) for size in sorted(kept)]


def num_emitted_by(view: ControlledView) -> int:
    return len(view.tokens) - view.num_prompt_tokens
