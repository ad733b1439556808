"""The speed of one step for any numbers of drafts, and the numbers with the highest speed.

    rate = (R + sum of expected accepted drafts) / (t_draft + t_verify)

R sequences emit one token each without drafts. Drafters that stop by confidence may draw all that
their limits allow, or nothing. For all others the best numbers are found by enumeration: each draft
of each sequence is ranked by its expected tokens, and every prefix of that ranking is priced. Costs
have steps and plateaus, so the enumeration does not end at the first loss.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from math import inf

from outrider.contracts import ControlledView, StopRule
from outrider.policy import MAX_AUTO_DRAFT_TOKENS, VALID_STEPS
from outrider.policy.acceptance import OWN_DECAY, RARE, Acceptance, Prior, temperature_bucket
from outrider.policy.confidence import TOLL, Confidence, Levels, Outcome, floors
from outrider.policy.costs import Costs, batch_bucket

FIRST_BALANCE = 3.0  # plain steps that a proposer may lose before it has won any

DEPTHS = [float(k) for k in range(MAX_AUTO_DRAFT_TOKENS + 1)]  # a round for each draft

Kind = tuple[str, bool]  # of a request: how its tokens are drawn, and whether its logits are edited
Group = tuple[Levels, Kind]  # requests that start with the same estimates


class Source:
    """One proposer: what is known of its drafts, and by batch bucket what they may still lose."""

    def __init__(self, name: str, first: int | None = None, refused: int = 0) -> None:
        """`first`: drafts of each sequence until some have been judged; None: what is best.
        `refused`: drafts before the first request, of which none was accepted."""
        self.name = name
        self.first = first
        self._refused = refused
        self.confident: set[Kind] = set()  # requests for which it stops by itself
        self.balance_s: dict[int, float] = {}
        self._priors: dict[int, Prior] = {}
        self._levels: dict[int, Levels] = {}

    @property
    def first_balance(self) -> float:
        """Plain steps that it may lose at once in a batch bucket that is new to it."""
        if self.balance_s:
            return FIRST_BALANCE / 2
        return 0.0 if self._refused else FIRST_BALANCE

    def prior(self, temperature: float) -> Prior:
        bucket = temperature_bucket(temperature)
        if bucket not in self._priors:  # `setdefault` would create one each time
            prior = self._priors[bucket] = Prior()
            prior.count([(1, 1, (), False)] * self._refused, 0)
        return self._priors[bucket]

    def levels(self, temperature: float) -> Levels:
        bucket = temperature_bucket(temperature)
        if bucket not in self._levels:
            self._levels[bucket] = Levels()
        return self._levels[bucket]


class Track:
    """One sequence."""

    def __init__(
        self, source: Source, temperature: float = 0.0, kind: Kind = ("coupled", True)
    ) -> None:
        self.source = source
        self.kind = kind
        self.budget = -1  # the last decision; -1: none yet
        self.idle = 1  # steps since its last draft
        self.num_read = 0  # tokens that its drafter has read
        self._levels = source.levels(temperature)
        self.group: Group = (self._levels, kind)
        self._prior = source.prior(temperature)
        self._acceptance: Acceptance | None = None
        self._confidence: Confidence | None = None

    @property
    def is_confident(self) -> bool:
        """Whether its drafter stops by itself."""
        return self.kind in self.source.confident

    @property
    def acceptance(self) -> Acceptance:
        if self._acceptance is None:
            self._acceptance = Acceptance(self._prior)
        return self._acceptance

    @property
    def confidence(self) -> Confidence:
        """Read-only outside `judge`: sequences without evidence share the prior's."""
        return self._confidence or self._levels.newcomer

    def judge(self, outcomes: Seq[Outcome], most: int) -> None:
        """What became of drafts with levels (see `Confidence.observe`)."""
        self.source.confident.add(self.kind)
        if self._confidence is None:
            self._confidence = Confidence(self._levels)
        self._confidence.observe(outcomes, most)

    def rest(self, num_steps: int) -> None:
        """Steps without a draft: old evidence fades, and the prior counts for more."""
        before = self.idle // VALID_STEPS
        self.idle += num_steps
        for _ in range(self.idle // VALID_STEPS - before):
            for evidence in (self._confidence, self._acceptance):
                if evidence is not None:
                    evidence.fade(OWN_DECAY**VALID_STEPS)


class StepModel:
    """Tokens and seconds of a step over `views`, whose `tracks` may draft.

    `num_tokens`: of the pass without these drafts; `most`: drafts that may be priced in all.
    `evenly`: all sequences draft as much; for devices whose pass is as wide as its widest sequence.
    """

    def __init__(
        self,
        costs: Costs,
        views: Seq[ControlledView],
        tracks: list[Track],
        num_tokens: int,
        most: int,
        evenly: bool = False,
    ) -> None:
        verify, num = costs.verify, len(views)
        self.tracks = tracks
        self.num_sequences = num
        self.batch = batch_bucket(num)
        num_read = sum([len(view.tokens) for view in views])
        self._start = num_tokens
        self._most = most
        self._evenly = evenly
        self._speed = verify.speed
        self._row = verify.row(self.batch, num_tokens + most + MAX_AUTO_DRAFT_TOKENS * num + 1)
        more = verify.context_cost(num, num_read)
        self._pass0_s = self._speed * max(self._row[num] + more, self._row[num] / 2)
        self.plain_base = max(verify.base(self.batch, num) + more, self._row[num] / 2)
        # While all steps draft, the table's plain cell follows their speed; the clock does not.
        clocked_s = self.plain_base * costs.plain_clock.get(self.batch, inf)
        self.plain_s = min(self._pass0_s, clocked_s)
        self._pair_s = verify.pair_s * num_read / num
        self._sources: dict[Source, _Drafting] = {}
        for track in tracks:
            (track.confidence if track.is_confident else track.acceptance).refresh()
            if track.source not in self._sources:
                self._sources[track.source] = _Drafting()
            self._sources[track.source].num_sequences += 1
        for source, drafting in self._sources.items():
            own = [track for track in tracks if track.source is source]
            drafting.prepare(costs, source.name, own)

    @property
    def sources(self) -> list[Source]:
        return list(self._sources)

    def rate(self, budgets: Seq[int], acceptance: float | None = None) -> float:
        tokens, seconds = self.worth(budgets, acceptance)
        return tokens / seconds

    def loss_s(self, budgets: Seq[int]) -> float:
        """Expected seconds that a step loses against plain decoding; negative: it gains."""
        tokens, seconds = self.worth(budgets)
        return seconds - tokens * self.plain_s / self.num_sequences

    def worth(self, budgets: Seq[int], acceptance: float | None = None) -> tuple[float, float]:
        """Expected tokens and seconds; `acceptance`: as if that share of all drafts held."""
        if not any(budgets):
            return float(self.num_sequences), self.plain_s
        tokens, width, depths = self._expected(budgets)
        if acceptance is not None:
            tokens = self.num_sequences + acceptance * width
        drafted_s = sum([self._sources[source].seconds(depth) for source, depth in depths.items()])
        return tokens, self._pass_s(width) + self._all_or_nothing_s(budgets, width) + drafted_s

    def _all_or_nothing_s(self, budgets: Seq[int], width: float) -> float:
        """What passes cost more than one of the mean width where a look-up finds all or nothing."""
        more_s = 0.0
        for track, k in zip(self.tracks, budgets, strict=True):
            if k and not track.is_confident and (fill := track.acceptance.fill) < 1.0:
                others = width - fill * k
                nothing_s, all_s = self._pass_s(others), self._pass_s(others + k)
                more_s += (1.0 - fill) * nothing_s + fill * all_s - self._pass_s(width)
        return more_s

    def _expected(self, budgets: Seq[int]) -> tuple[float, float, dict[Source, float]]:
        """Emitted tokens, verified drafts, and drafting rounds by source."""
        tokens, width = float(self.num_sequences), 0.0
        depths = dict.fromkeys(self._sources, 0.0)
        for track, k in zip(self.tracks, budgets, strict=True):
            if k:
                accepted, verified, rounds = self._curves(track)
                tokens += accepted[k]
                width += verified[k]
                depths[track.source] = max(depths[track.source], rounds[k])
        return tokens, width, depths

    def _curves(self, track: Track) -> tuple[Seq[float], Seq[float], Seq[float]]:
        """[k]: accepted tokens, verified tokens and drafting rounds of a budget of k."""
        if track.is_confident:
            confidence = track.confidence
            return confidence.accepted, confidence.verified, self._sources[track.source].rounds
        found = track.acceptance
        if found.fill == 1.0:
            return found.totals, DEPTHS, DEPTHS
        return [found.fill * n for n in found.totals], [found.fill * k for k in DEPTHS], DEPTHS

    def _pass_s(self, width: float) -> float:
        """A pass with so many drafted tokens."""
        more = _at(self._row, self._start + width) - self._row[self._start]
        return self._pass0_s + self._speed * (more + self._pair_s * width)

    def best(self, limits: Seq[int]) -> list[int]:
        """The budgets with the highest rate."""
        if self._evenly:
            return self._best_common(limits)
        confident = [i for i, track in enumerate(self.tracks) if track.is_confident]
        chosen = [0] * len(limits)
        if confident:  # they stop by themselves: all that they may draw, or nothing
            most = [k if t.is_confident else 0 for k, t in zip(limits, self.tracks, strict=True)]
            if self.rate(most) > self.rate(chosen):
                chosen = most
        if len(confident) < len(limits):
            chosen = self._best_ranked(limits, chosen)
        return chosen

    def _best_common(self, limits: Seq[int]) -> list[int]:
        """The best common K."""
        found = [[min(k, limit) for limit in limits] for k in range(max(limits) + 1)]
        return max(found, key=self.rate)

    def _best_ranked(self, limits: Seq[int], chosen: list[int]) -> list[int]:
        """Adds drafts of the other sequences, the most valuable first."""
        ranked = []
        for i, (track, limit) in enumerate(zip(self.tracks, limits, strict=True)):
            if not track.is_confident:
                for k, value in enumerate(track.acceptance.curve[:limit], 1):
                    if value < RARE:
                        break
                    ranked.append((value, -k, i))
        ranked.sort(reverse=True)
        tokens, seconds = self.worth(chosen)
        best, best_rate = 0, tokens / seconds
        if not any(chosen):
            seconds = self._pass0_s
        width = sum([self._curves(t)[1][k] for t, k in zip(self.tracks, chosen, strict=True) if k])
        depths = dict.fromkeys(self._sources, 0)
        for count, (_, minus_depth, i) in enumerate(ranked[: self._most], 1):
            track, depth = self.tracks[i], -minus_depth
            found = track.acceptance
            tokens += found.fill * (found.totals[depth] - found.totals[depth - 1])
            others = width - found.fill * (depth - 1)
            seconds += found.fill * (
                self._pass_s(others + depth) - self._pass_s(others + depth - 1)
            )
            width += found.fill
            if depth > depths[track.source]:  # drafted in step: the first to go deeper pays
                drafting = self._sources[track.source]
                seconds += drafting.seconds(depth) - drafting.seconds(depth - 1)
                depths[track.source] = depth
            if tokens > best_rate * seconds:
                best, best_rate = count, tokens / seconds
        budgets = list(chosen)
        for _, _, i in ranked[:best]:
            budgets[i] += 1
        return budgets

    def rounds_of(self, source: Source, drawn: Seq[int]) -> int:
        """Drafting rounds of a step in which sequences drew so many tokens each."""
        share = self._sources[source].fixed_share
        return round(share * max(drawn) + (1.0 - share) * sum(drawn) / len(drawn))

    def stop_rules(self, budgets: Seq[int]) -> list[StopRule | None]:
        """For the sequences that draft, at the prices of this step."""
        rate, prices = self.rate(budgets), list[float]()
        if any(track.is_confident for track in self.tracks):
            prices = [rate * self._speed * self._pair_s + floor
                      for floor in floors(self._row, self._start, rate * self._speed)]  # fmt: skip
        found: list[StopRule | None] = []
        for track, k in zip(self.tracks, budgets, strict=True):
            rule = None
            if k and track.is_confident:
                toll = TOLL * rate * self._sources[track.source].round_s
                rule = StopRule(track.confidence.chances, prices, toll)
            elif k:
                rule = StopRule(track.confidence.chances)
            found.append(rule)
        return found


class _Drafting:
    """What one proposer's drafting takes in this step."""

    def __init__(self) -> None:
        self.num_sequences = 0

    def prepare(self, costs: Costs, name: str, tracks: Seq[Track]) -> None:
        table = costs.draft(name)
        self._row = table.row(batch_bucket(self.num_sequences), MAX_AUTO_DRAFT_TOKENS + 1)
        self._speed = table.speed * costs.verify.speed
        together, alone = _slope(self._row), _slope(table.row(0, MAX_AUTO_DRAFT_TOKENS + 1))
        self.round_s = self._speed * together
        # The share of a round's time that does not depend on how many sequences still draft.
        self.fixed_share = min(1.0, alone / together) if together else 0.0
        drawn = [track.confidence.drawn for track in tracks if track.is_confident]
        self.rounds = _rounds(drawn, self.fixed_share) if drawn else []

    def seconds(self, depth: float) -> float:
        return self._speed * _at(self._row, depth)


def _slope(row: Seq[float]) -> float:
    """Seconds of one more drafting round."""
    last = MAX_AUTO_DRAFT_TOKENS
    return (row[last] - row[1]) / (last - 1)


def _rounds(drawn: list[list[float]], fixed_share: float) -> list[float]:
    """[k]: drafting rounds for limits of k. A round counts `fixed_share` if any sequence takes part
    in it, and the rest by how many do."""
    num = len(drawn)
    means = [sum(places) / num for places in zip(*drawn, strict=True)]
    found = [0.0]
    for before, now in pairwise(means):
        any_takes_part = 1.0 - (1.0 - min(1.0, now - before)) ** num
        found.append(found[-1] + fixed_share * any_takes_part + (1 - fixed_share) * (now - before))
    return found


def _at(row: Seq[float], x: float) -> float:
    """Linear between two cells."""
    left = int(x)
    share = x - left
    return row[left] if not share else row[left] + share * (row[left + 1] - row[left])
