"""The arithmetic of one step's choice: what any allocation of drafts is worth, and the best one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

from outrider.contracts import ControlledView, StopRule
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.control.caution import TOLL, Outcome, Shared, Sureness, floors
from outrider.control.cost import Costs, batch_bucket, context_bucket
from outrider.control.survival import OWN_DECAY, Prior, Survival

# Plain decoding wins below this advantage, the more so the larger the batch: its price is surest,
# and what drafts add to a large batch's pass and to the work around it is known the least.
BENEFIT_OF_DOUBT, BY_SEQUENCE, MOST_DOUBT = 1.02, 0.017, 1.28
FADE_STEPS = 16  # how often a sequence that is off comes closer to the prior
MOST_OFF = 0.5  # of a pass: what short contexts may take less than the middle of their bucket
LEAST_SURVIVAL = 0.02  # nodes below it pay nowhere


def heat(temperature: float) -> int:
    """Requests about as hot share what is known of a proposer."""
    return 0 if temperature == 0.0 else 1 + min(3, int(2.0 * temperature))


Kind = tuple[str, bool]  # of a request: how it is drawn, and whether its logits are left alone
Group = tuple[Shared, Kind]  # requests that begin with the same estimates


class Source:
    """One proposer: what its drafts are worth in general. The rest is scratch of one step.

    Greedy and sampled requests are kept apart: what one achieves says little about the other.
    """

    __slots__ = (
        "_priors",
        "_shared",
        "credits",
        "deepest",
        "lone",
        "name",
        "num_checks",
        "num_sequences",
        "purses",
        "rounds",
        "row",
        "scale",
        "sure",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self._priors: dict[int, Prior] = {}
        self._shared: dict[int, Shared] = {}
        self.sure: set[Kind] = set()  # requests for which it has said how sure it is
        # Seconds by batch bucket: for probes, and what may be lost before drafts are stopped.
        self.purses: dict[int, float] = {}
        self.credits: dict[int, float] = {}
        self.num_checks = 0  # probes although no acceptance would have paid
        self.num_sequences = 0
        self.deepest = 0.0
        self.row: list[float] = []
        self.scale = 1.0
        self.lone = 0.0  # of a round of drafting, what it takes however few still draft
        self.rounds: list[float] = []  # [k]: whole rounds that drafts of its sure ones amount to

    def prior(self, temperature: float) -> Prior:
        """What requests about as hot achieved lately."""
        kind = heat(temperature)
        if kind not in self._priors:  # not `setdefault`, which would make one each time
            self._priors[kind] = Prior()
        return self._priors[kind]

    def shared(self, temperature: float) -> Shared:
        """The same of how sure it is of its drafts."""
        kind = heat(temperature)
        if kind not in self._shared:
            self._shared[kind] = Shared()
        return self._shared[kind]


class Track:
    """One sequence."""

    __slots__ = (
        "_shared",
        "_sureness",
        "_survival",
        "_temperature",
        "budget",
        "group",
        "idle",
        "kind",
        "num_read",
        "source",
    )

    def __init__(
        self, source: Source, temperature: float = 0.0, kind: Kind = ("coupled", True)
    ) -> None:
        self.source = source
        self.kind = kind
        self._temperature = temperature
        self._survival: Survival | None = None
        self._shared = source.shared(temperature)
        self.group: Group = (self._shared, kind)
        self._sureness: Sureness | None = None
        self.budget = -1  # the last choice; -1: none yet
        self.idle = 1  # steps since its last draft: its drafter has to catch up
        self.num_read = 0  # tokens that it has read

    @property
    def survival(self) -> Survival:
        """Of whoever is not sure; made when it is first asked for."""
        if self._survival is None:
            self._survival = Survival(self.source.prior(self._temperature))
        return self._survival

    @property
    def sureness(self) -> Sureness:
        """Not to be changed but by `judge`: who has shown nothing yet is like everybody."""
        return self._sureness or self._shared.newcomer

    def judge(self, outcomes: Seq[Outcome], most: int) -> None:
        """What became of drafts of a drafter that says how sure it is (see `Sureness.observe`)."""
        self.source.sure.add(self.kind)
        if self._sureness is None:
            self._sureness = Sureness(self._shared)
        self._sureness.observe(outcomes, most)

    @property
    def is_sure(self) -> bool:
        """Whether its drafter stops by itself: how much it drafts is not to be chosen then."""
        return self.kind in self.source.sure

    def rested(self, num_steps: int) -> None:
        """Steps without a draft: old evidence fades, and the prior counts for more."""
        before = self.idle // FADE_STEPS
        self.idle += num_steps
        for _ in range(self.idle // FADE_STEPS - before):
            for evidence in (self._sureness, self._survival):
                if evidence is not None:
                    evidence.fade(OWN_DECAY**FADE_STEPS)


class Plain:
    """What a pass over these sequences takes without drafts, under the tables as they are; `row`
    has as many cells as one of so many tokens needs."""

    __slots__ = ("base", "batch", "bucket", "num_read", "row", "seconds")

    def __init__(self, costs: Costs, views: Seq[ControlledView], widest: int = 0) -> None:
        verify, num_sequences = costs.verify, len(views)
        self.batch = batch_bucket(num_sequences)
        self.num_read = sum([len(view.tokens) for view in views])  # of context
        self.bucket = context_bucket(self.num_read // num_sequences)
        base = verify.base(self.bucket, num_sequences, self.batch)
        more_s = verify.off_middle_s(self.bucket, self.batch, self.num_read)
        more_s = max(more_s, -MOST_OFF * base)
        self.base = base + more_s  # before any step, at scale 1
        self.row = verify.row(self.bucket, max(num_sequences, widest), self.batch)
        self.seconds = verify.scale * (self.row[num_sequences] + more_s)


class Step:
    """Rates of allocations under the tables as they are.

    `evenly`: everybody drafts as much, as far as they may. That is best where a pass takes as long
    as if all were as wide as its widest.
    """

    __slots__ = (
        "batch",
        "doubt",
        "evenly",
        "most",
        "num_sequences",
        "plain",
        "plain_s",
        "row",
        "scale",
        "sources",
        "start",
        "tracks",
    )

    def __init__(
        self,
        costs: Costs,
        views: Seq[ControlledView],
        tracks: list[Track],
        num_tokens: int,
        most: int,
        evenly: bool = False,
        extra: int = 0,
    ) -> None:
        """`num_tokens`: of the pass before any draft of ours; `most`: drafts at most, and `extra`
        that may be added to any allocation (`extra_s`)."""
        self.tracks = tracks
        self.evenly = evenly
        self.most = most
        self.num_sequences = len(views)
        self.doubt = min(BENEFIT_OF_DOUBT + BY_SEQUENCE * (len(views) - 1), MOST_DOUBT)
        self.start = num_tokens
        self.sources: list[Source] = []
        priors: list[Prior] = []
        for track in tracks:
            source = track.source
            if source not in self.sources:
                self.sources.append(source)
                source.num_sequences = 0
            source.num_sequences += 1
            if track.is_sure:
                track.sureness.refresh()
                continue
            prior = track.survival.prior
            if prior not in priors:
                priors.append(prior)
                prior.refresh()
            track.survival.refresh()
        most += sum([int(track.sureness.taken[-1]) + 1 for track in tracks if track.is_sure])
        self.plain = Plain(costs, views, num_tokens + most + extra)
        self.plain_s, self.batch, self.row = self.plain.seconds, self.plain.batch, self.plain.row
        self.scale = costs.verify.scale
        for source in self.sources:
            table = costs.draft(source.name)
            alone = _slope(table.row(0, MAX_AUTO_DRAFT_TOKENS))
            source.row = table.row(batch_bucket(source.num_sequences), MAX_AUTO_DRAFT_TOKENS)
            source.scale = table.scale * self.scale
            together = _slope(source.row)
            source.lone = min(1.0, alone / together) if together else 0.0
            drawn = [t.sureness.drawn for t in tracks if t.source is source and t.is_sure]
            source.rounds = _rounds(drawn, source.lone) if drawn else []

    def best(self, most: list[int]) -> tuple[list[int], float]:
        """The allocation with the highest `rate`, and that rate."""
        if self.evenly:
            even = [[min(k, limit) for limit in most] for k in range(max(most) + 1)]
            rates = [self.rate(budgets) for budgets in even]
            return even[rates.index(max(rates))], max(rates)
        row, scale, n = self.row, self.scale, self.start
        tokens, spent_s = float(self.num_sequences), self.plain_s
        best, best_rate = 0, self.doubt * tokens / spent_s
        ranked = self._ranked(most)
        for source in self.sources:
            source.deepest = 0.0
        for count, (_, minus_depth, order) in enumerate(ranked, 1):
            track = self.tracks[order]
            source, fill, totals = track.source, track.survival.fill, track.survival.totals
            tokens += fill * (totals[-minus_depth] - totals[-minus_depth - 1])
            n += 1
            spent_s += fill * scale * (row[n] - row[n - 1])
            if -minus_depth > source.deepest:  # drafted in step: the first to go deeper pays
                drafts = source.row
                spent_s += source.scale * (drafts[-minus_depth] - drafts[-minus_depth - 1])
                source.deepest = -minus_depth
            if tokens > best_rate * spent_s:
                best, best_rate = count, tokens / spent_s
        chosen = [0] * len(self.tracks)
        for _, _, order in ranked[:best]:
            chosen[order] += 1
        return self._with_sure(chosen, best_rate, most)

    def _with_sure(
        self, chosen: list[int], best_rate: float, most: list[int]
    ) -> tuple[list[int], float]:
        """The same with whoever of the sure had better draft, too: as much as they may."""
        sure = [order for order, track in enumerate(self.tracks) if track.is_sure and most[order]]
        if not sure:
            return chosen, best_rate
        most = self._capped(chosen, sure, most)
        tokens, spent_s = self.worth(chosen)
        width = float(self.start + sum(chosen))
        sure.sort(key=lambda o: -self._sureness(o).kept[most[o]] / self._sureness(o).taken[most[o]])
        best = 0
        for count, order in enumerate(sure, 1):
            source, sureness, k = self.tracks[order].source, self._sureness(order), most[order]
            tokens += sureness.kept[k]
            spent_s += self.scale * (
                _at(self.row, width + sureness.taken[k]) - _at(self.row, width)
            )
            width += sureness.taken[k]
            if source.rounds[k] > source.deepest:
                deeper_s = _at(source.row, source.rounds[k]) - _at(source.row, source.deepest)
                spent_s += source.scale * deeper_s
                source.deepest = source.rounds[k]
            if tokens > best_rate * spent_s:
                best, best_rate = count, tokens / spent_s
        for order in sure[:best]:
            chosen[order] = most[order]
        return chosen, best_rate

    def _capped(self, chosen: list[int], sure: list[int], most: list[int]) -> list[int]:
        """Limits: the best single one for whoever stops by himself. It ends drafting for those few
        that would go on while the others wait."""
        best, best_rate = 0, 0.0
        for k in range(1, max(most[order] for order in sure) + 1):
            budgets = list(chosen)
            for order in sure:
                budgets[order] = min(k, most[order])
            rate = self.rate(budgets)
            if rate > best_rate:
                best, best_rate = k, rate
            elif k > best + 2:  # a cliff is behind it, not just a step
                break
        return [min(best, limit) for limit in most]

    def _sureness(self, order: int) -> Sureness:
        return self.tracks[order].sureness

    def _ranked(self, most: list[int]) -> list[tuple[float, int, int]]:
        """(survival, -depth, order of the track), best first; a node stands behind its parents."""
        ranked = []
        for order, (track, limit) in enumerate(zip(self.tracks, most, strict=True)):
            if track.is_sure:
                continue
            for k, survival in enumerate(track.survival.curve[:limit], 1):
                if survival < LEAST_SURVIVAL:
                    break
                ranked.append((survival, -k, order))
        if len(self.tracks) > 1:
            ranked.sort(reverse=True)
        return ranked[: self.most]

    def rate(self, budgets: list[int], held: float | None = None) -> float:
        """Tokens per second of any allocation; of none, a little more than it is. `held`: if so
        many of the drafts were right."""
        tokens, seconds = self.worth(budgets, held)
        return (1.0 if any(budgets) else self.doubt) * tokens / seconds

    def worth(self, budgets: list[int], held: float | None = None) -> tuple[float, float]:
        """The tokens that are expected of an allocation, and the seconds."""
        n, spent_s = float(self.start), self.plain_s
        tokens = float(self.num_sequences)
        for source in self.sources:
            source.deepest = 0.0
        for track, k in zip(self.tracks, budgets, strict=True):
            if k:
                source, fill = track.source, 1.0
                if track.is_sure:
                    sureness = track.sureness
                    added, width, depth = sureness.kept[k], sureness.taken[k], source.rounds[k]
                else:
                    added, width, depth = track.survival.totals[k], float(k), float(k)
                    fill = track.survival.fill
                tokens += fill * (added if held is None else held * width)
                spent_s += fill * self.scale * (_at(self.row, n + width) - _at(self.row, n))
                n += width
                source.deepest = max(source.deepest, depth)
        for source in self.sources:
            spent_s += source.scale * _at(source.row, source.deepest)
        return tokens, spent_s

    def extra_s(self, budgets: list[int], order: int, k: int) -> float:
        """What `k` drafts of one more sequence add."""
        _, before_s = self.worth(budgets)
        _, after_s = self.worth([k if i == order else b for i, b in enumerate(budgets)])
        return after_s - before_s

    def cautions(self, budgets: list[int]) -> list[StopRule | None]:
        """For whoever drafts: at the prices of this step."""
        rate = self.rate(budgets)
        prices = floors(self.row, self.start, rate * self.scale)
        found: list[StopRule | None] = []
        for track, k in zip(self.tracks, budgets, strict=True):
            caution = None
            if k and track.is_sure:
                source = track.source
                round_s = source.scale * _slope(source.row)
                caution = StopRule(track.sureness.chances, prices, TOLL * rate * round_s)
            elif k:
                caution = StopRule(track.sureness.chances)
            found.append(caution)
        return found


def _slope(drafts: Seq[float]) -> float:
    """What another round of drafting takes."""
    return (drafts[-1] - drafts[1]) / (len(drafts) - 2)


def _rounds(drawn: list[list[float]], lone: float) -> list[float]:
    """[k]: of drafts of at most k. A round counts in part by how many take part in it (`drawn`, see
    `Sureness`), and for the rest whenever somebody does."""
    num = len(drawn)
    means = [sum(places) / num for places in zip(*drawn, strict=True)]
    found = [0.0]
    for before, now in pairwise(means):
        somebody = 1.0 - (1.0 - min(1.0, now - before)) ** num
        found.append(found[-1] + lone * somebody + (1.0 - lone) * (now - before))
    return found


def _at(row: Seq[float], x: float) -> float:
    """Between two cells; none is asked for beyond the last but one."""
    left = int(x)
    share = x - left
    return row[left] if not share else row[left] + share * (row[left + 1] - row[left])
