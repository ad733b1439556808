"""The arithmetic of one step's choice: what any allocation of drafts is worth, and the best one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import ControlledView
from outrider.control import MAX_AUTO_DRAFT_TOKENS
from outrider.control.cost import Costs, batch_bucket, context_bucket
from outrider.control.survival import OWN_DECAY, Prior, Survival

# Plain decoding wins below this advantage, the more so the larger the batch: its price is surest,
# and what drafts add to a large batch's pass and to the work around it is known the least.
BENEFIT_OF_DOUBT, BY_DOUBLING = 1.02, 0.04
FADE_STEPS = 16  # how often a sequence that is off comes closer to the prior
LEAST_SURVIVAL = 0.02  # nodes below it pay nowhere


def heat(temperature: float) -> int:
    """Requests about as hot share what is known of a proposer."""
    return 0 if temperature == 0.0 else 1 + min(3, int(2.0 * temperature))


class Source:
    """One proposer: what its drafts are worth in general. The rest is scratch of one step.

    Greedy and sampled requests are kept apart: what one achieves says little about the other.
    """

    __slots__ = (
        "_priors",
        "credits",
        "deepest",
        "name",
        "num_checks",
        "num_sequences",
        "purses",
        "row",
        "scale",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self._priors: dict[int, Prior] = {}
        # Seconds by batch bucket: for probes, and what may be lost before drafts are stopped.
        self.purses: dict[int, float] = {}
        self.credits: dict[int, float] = {}
        self.num_checks = 0  # probes although no acceptance would have paid
        self.num_sequences = 0
        self.deepest = 0
        self.row: list[float] = []
        self.scale = 1.0

    def prior(self, temperature: float) -> Prior:
        """What requests about as hot achieved lately."""
        return self._priors.setdefault(heat(temperature), Prior())


class Track:
    """One sequence."""

    __slots__ = ("budget", "idle", "num_read", "source", "survival")

    def __init__(self, source: Source, temperature: float = 0.0) -> None:
        self.source = source
        self.survival = Survival(source.prior(temperature))
        self.budget = -1  # the last choice; -1: none yet
        self.idle = 1  # steps since its last draft: its drafter has to catch up
        self.num_read = 0  # tokens that it has read

    def rested(self, num_steps: int) -> None:
        """Steps without a draft: old evidence fades, and the prior counts for more."""
        before = self.idle // FADE_STEPS
        self.idle += num_steps
        for _ in range(self.idle // FADE_STEPS - before):
            self.survival.fade(OWN_DECAY**FADE_STEPS)


class Step:
    """Rates of allocations under the tables as they are.

    `evenly`: everybody drafts as much, as far as they may. That is best where a pass takes as long
    as if all were as wide as its widest.
    """

    __slots__ = (
        "batch",
        "bucket",
        "doubt",
        "evenly",
        "most",
        "num_sequences",
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
        self.batch = batch_bucket(len(views))
        self.doubt = BENEFIT_OF_DOUBT + BY_DOUBLING * self.batch
        self.start = num_tokens
        context = len(views[0].tokens)
        if len(views) > 1:
            context = sum([len(view.tokens) for view in views]) // len(views)
        self.bucket = context_bucket(context)
        self.row = costs.verify.row(self.bucket, num_tokens + most + extra, self.batch)
        self.scale = costs.verify.scale
        self.plain_s = self.scale * self.row[len(views)]
        self.sources: list[Source] = []
        priors: list[Prior] = []
        for track in tracks:
            source, prior = track.source, track.survival.prior
            if source not in self.sources:
                self.sources.append(source)
                source.num_sequences = 0
            if prior not in priors:
                priors.append(prior)
                prior.refresh()
            source.num_sequences += 1
            track.survival.refresh()
        for source in self.sources:
            table = costs.draft(source.name)
            source.row = table.row(batch_bucket(source.num_sequences), MAX_AUTO_DRAFT_TOKENS)
            source.scale = table.scale * self.scale

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
            source.deepest = 0
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
        return chosen, best_rate

    def _ranked(self, most: list[int]) -> list[tuple[float, int, int]]:
        """(survival, -depth, order of the track), best first; a node stands behind its parents."""
        ranked = []
        for order, (track, limit) in enumerate(zip(self.tracks, most, strict=True)):
            for k, survival in enumerate(track.survival.curve[:limit], 1):
                if survival < LEAST_SURVIVAL:
                    break
                ranked.append((survival, -k, order))
        if len(self.tracks) > 1:
            ranked.sort(reverse=True)
        return ranked[: self.most]

    def rate(self, budgets: list[int]) -> float:
        """Tokens per second of any allocation; of none, a little more than it is."""
        tokens, seconds = self.worth(budgets)
        return (1.0 if any(budgets) else self.doubt) * tokens / seconds

    def worth(self, budgets: list[int]) -> tuple[float, float]:
        """The tokens that are expected of an allocation, and the seconds."""
        n, spent_s = self.start, self.plain_s
        tokens = float(self.num_sequences)
        for source in self.sources:
            source.deepest = 0
        for track, k in zip(self.tracks, budgets, strict=True):
            if k:
                fill = track.survival.fill
                tokens += fill * track.survival.totals[k]
                spent_s += fill * self.scale * (self.row[n + k] - self.row[n])
                n += k
                track.source.deepest = max(track.source.deepest, k)
        for source in self.sources:
            spent_s += source.scale * source.row[source.deepest]
        return tokens, spent_s

    def extra_s(self, budgets: list[int], order: int, k: int) -> float:
        """What `k` drafts of one more sequence add."""
        source = self.tracks[order].source
        already = [b for b, t in zip(budgets, self.tracks, strict=True) if t.source is source]
        n = self.start + sum(budgets)
        drafts = source.row[max(k, *already)] - source.row[max(already)]
        return self.scale * (self.row[n + k] - self.row[n]) + source.scale * drafts
