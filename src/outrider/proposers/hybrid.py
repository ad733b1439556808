"""Several proposers for one sequence: at every step, the one that promises most tokens per second.

Look-ups (suffix, ngram, prediction) take microseconds and either find something or not; a drafter
(a model, a head) always has an answer and always costs a pass of its own. So look-ups are asked
first, at every step, and a drafter only where it is expected to gain more than its time costs:

    rate = (sum over the batch of 1 + expected accepted tokens) / (t_draft + t_target)

is compared for "no drafter" and for each drafter, every sequence taking the better of the drafter
and its own look-up. What to expect is learnt per source and size of the draft, from this sequence
lately and from all others. Look-ups that were not used are judged as well: whatever the text
became, it says how far they would have come.

The choice depends on finished steps and on look-ups, which are functions of the context; never on
what a drafter draws. So it is exact under ratio rules too.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
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
from outrider.errors import ConfigError
from outrider.proposers._options import read_options

_START = 0.7  # acceptance of a token nobody has seen a draft of yet
_PRIOR_WEIGHT = 4.0  # what all sequences together are worth beside this one, in drafts
_OWN_DECAY = 0.95
_SHARED_DECAY = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    lookups: Seq[str] = ("suffix",)  # asked at every step: must cost next to nothing
    drafters: Seq[str] | None = None  # None: draft-model, where there is a draft model
    draft_tokens: int = 6  # that a drafter is asked for at most; look-ups are free

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ConfigError(f"hybrid needs draft_tokens of at least 1, not {self.draft_tokens}")
        for names in (self.lookups, self.drafters or ()):
            if isinstance(names, str) or HybridProposer.name in names:
                raise ConfigError(f"hybrid needs lists of other proposers' names, not {names!r}")


class Worth:
    """How many tokens of a source's drafts are accepted, by the size of the draft."""

    def __init__(self, shared: Worth | None = None) -> None:
        """`shared`: what is known from everybody; None: this one is."""
        self._shared = shared
        self._decay = _SHARED_DECAY if shared is None else _OWN_DECAY
        self._seen: dict[int, tuple[float, float]] = {}  # bucket -> decayed (drafts, accepted)

    def expected(self, size: int) -> float:
        if self._shared is not None:
            prior = self._shared.expected(size)
        else:  # every token as likely as the one before it
            prior = _START * (1 - _START**size) / (1 - _START)
        num, accepted = self._seen.get(size.bit_length(), (0.0, 0.0))
        return (accepted + _PRIOR_WEIGHT * prior) / (num + _PRIOR_WEIGHT)

    def learn(self, size: int, num_accepted: int) -> None:
        if self._shared is not None:
            self._shared.learn(size, num_accepted)
        num, accepted = self._seen.get(size.bit_length(), (0.0, 0.0))
        self._seen[size.bit_length()] = (
            self._decay * num + 1.0,
            self._decay * accepted + num_accepted,
        )


class PassPrices:
    """What a pass of the target takes, by how many nodes it verifies, in buckets that double."""

    def __init__(self) -> None:
        self._by_width: dict[int, Seconds] = {}

    def add(self, num_nodes: int, seconds: float) -> None:
        self._by_width.setdefault(num_nodes.bit_length(), Seconds()).add(seconds)

    def of(self, num_nodes: int) -> float:
        """As seen, or as the nearest width that was; 0 where none was."""
        if not self._by_width:
            return 0.0
        width = num_nodes.bit_length()
        nearest = min(self._by_width, key=lambda known: (abs(known - width), known))
        return self._by_width[nearest].mean


class Seconds:
    """What something takes lately; single outliers (a prompt to catch up on) count little."""

    def __init__(self) -> None:
        self.mean = 0.0

    def add(self, seconds: float) -> None:
        if not self.mean:
            self.mean = seconds
        rate = 0.3 if seconds < self.mean else 0.1
        self.mean += rate * (min(seconds, 2 * self.mean) - self.mean)


@dataclass(slots=True)
class _Trial:
    """A draft that the text has not yet contradicted or run out of."""

    proposal: Proposal
    start: int  # how long the text was then
    size: int  # what `Worth` files it under


@dataclass(slots=True)
class _Track:
    """One sequence: what each source is worth to it, and drafts still to be judged."""

    worth: dict[str, Worth]
    trials: dict[str, _Trial] = field(default_factory=dict)


class HybridProposer:
    name = "hybrid"

    def __init__(
        self, lookups: Seq[Proposer], drafters: Seq[Proposer], draft_tokens: int = 6
    ) -> None:
        self._draft_tokens = draft_tokens
        self._lookups = list(lookups)
        self._drafters = list(drafters)
        self._parts = [*lookups, *drafters]
        if not self._parts:
            raise ConfigError("hybrid needs at least one look-up or drafter")
        self.draws = common_draws(self._parts)
        self.trees = any(part.trees for part in self._parts)
        taps = {tap for part in self._parts for tap in part.needs.taps}
        self.needs = Needs(taps=tuple(sorted(taps)))
        self._shared = {part.name: Worth() for part in self._parts}
        self._tracks: dict[int, _Track] = {}
        self._draft_s = {drafter.name: Seconds() for drafter in drafters}
        self._target_s = PassPrices()
        self._num_nodes = 0  # of the pass that is under way
        self._proposed_at: float | None = None

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
        tracks = [self._track(view) for view in views]
        proposals = [Proposal() for _ in views]
        gains = [0.0] * len(views)  # expected of `proposals`
        for lookup in self._lookups:
            for i, found in enumerate(lookup.propose(views, budgets)):
                if found.tokens:
                    size = len(found)
                    self._try(lookup, views[i], tracks[i], found, size)
                    gain = tracks[i].worth[lookup.name].expected(size)
                    if gain > gains[i]:
                        proposals[i], gains[i] = found, gain
        budgets = [min(budget, self._draft_tokens) for budget in budgets]
        sizes = [len(proposal) for proposal in proposals]
        drafter, members = self._choose(tracks, budgets, gains, sizes)
        if drafter is not None:
            started = perf_counter()
            drafts = drafter.propose([views[i] for i in members], [budgets[i] for i in members])
            self._draft_s[drafter.name].add(perf_counter() - started)
            for i, draft in zip(members, drafts, strict=True):
                if draft.tokens:
                    self._try(drafter, views[i], tracks[i], draft, budgets[i])
                    proposals[i] = draft
        self._num_nodes = sum(map(len, proposals))
        self._proposed_at = perf_counter()
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        if self._proposed_at is not None:
            self._target_s.add(self._num_nodes, perf_counter() - self._proposed_at)
            self._proposed_at = None
        for part in self._parts:
            part.observe(views, seen)
        for view in views:
            track = self._tracks.get(view.id)
            if track is not None:
                self._judge(track, view.tokens)

    def release(self, sequence_id: int) -> None:
        self._tracks.pop(sequence_id, None)
        for part in self._parts:
            part.release(sequence_id)

    def _track(self, view: SequenceView) -> _Track:
        track = self._tracks.get(view.id)
        if track is None:
            worth = {name: Worth(shared) for name, shared in self._shared.items()}
            track = self._tracks[view.id] = _Track(worth)
        return track

    def _choose(
        self, tracks: list[_Track], budgets: Seq[int], gains: list[float], sizes: list[int]
    ) -> tuple[Proposer | None, list[int]]:
        """The drafter to ask in this step, if any, and for which sequences.

        `sizes` and `gains` are of the look-ups' drafts, which the others keep.
        """
        best: tuple[Proposer | None, list[int]] = (None, [])
        target_s = self._target_s.of(sum(sizes))
        rate = (len(gains) + sum(gains)) / target_s if target_s else 0.0
        for drafter in self._drafters:
            expected = [
                track.worth[drafter.name].expected(budget)
                for track, budget in zip(tracks, budgets, strict=True)
            ]
            # Where it promises more, or everywhere: its drafts may make for a narrower pass.
            better = [i for i, gain in enumerate(gains) if expected[i] > gain]
            for members in (better, list(range(len(gains)))):
                tokens, num_nodes = float(len(gains)), 0
                for i, gain in enumerate(gains):
                    tokens += expected[i] if i in members else gain
                    num_nodes += budgets[i] if i in members else sizes[i]
                seconds = self._draft_s[drafter.name].mean + self._target_s.of(num_nodes)
                # Until it is known what things take, a drafter that promises more is worth a try.
                if members and (tokens / seconds > rate if seconds else members is better):
                    best = (drafter, members)
                    rate = tokens / seconds if seconds else rate
        return best

    def _try(
        self, part: Proposer, view: SequenceView, track: _Track, proposal: Proposal, size: int
    ) -> None:
        """Remembers a draft until the text has judged it; one per source at a time."""
        track.trials.setdefault(part.name, _Trial(proposal, len(view.tokens), size))

    @staticmethod
    def _judge(track: _Track, tokens: list[int]) -> None:
        for name, trial in list(track.trials.items()):
            num_accepted, is_over = follow(trial.proposal, tokens, trial.start)
            if is_over:
                track.worth[name].learn(trial.size, num_accepted)
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
