"""Measures what the advice needs, with the engine's own steps on the user's own prompts.

Costs: the seconds of a step by tokens of its pass, batch size and draft length, and of a proposer's
reading of a prompt. Worth: how many drafts are accepted. All kinds of steps take turns, so that a
busy moment of the machine slows all of them, and medians are kept. A slow model gets fewer rounds,
shorter texts and smaller batches, so that the user waits about a minute at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from time import perf_counter

from outrider.bench.contenders import Job, Ours, fit_together
from outrider.bench.measure import Tell
from outrider.engine.engine import Engine
from outrider.engine.lane import Lane, take_turns
from outrider.engine.request import Speculation
from outrider.policy.costs import rising
from outrider.policy.fixed import FixedPolicy
from outrider.policy.measured import StepCosts, best_k
from outrider.statistics import SpeculationStats

# Draft lengths that are timed, by batch.
COUNTS = {1: (1, 3, 5, 8, 12), 2: (1, 3, 5, 8), 4: (1, 3, 6), 8: (1, 3), 16: (1, 4)}
LEAST_JOBS = 4  # that are timed for a batch, and for the reading of prompts
ROUNDS = 3
BUDGET_S = 45.0
SURVIVAL_SHARE = 0.35  # of the budget: how many drafts are accepted
WARM_SHARE = 0.25  # the first round, which tells what the others take
WARM_TOKENS, LEAST_TOKENS = 4, 16  # of a text in the first round, and in the others
LEAST_STEPS = 12  # in which acceptance is counted, whatever they take
HICCUPS = 0.02  # of steps: slowed by other processes
TIMED_TOKENS = 32
SURVIVAL_TOKENS = 96
READING_STEPS = 6  # of which the first drafts after it has read the prompt
DEEPEST = 12

Kind = tuple[str, int]  # proposer and draft length; ("", 0) is plain decoding
Drafted = tuple[int, int]  # tokens of a draft, and how many of them were accepted
Sizes = dict[int, float]  # tokens of a draft -> share of the steps


@dataclass(slots=True)
class Worth:
    """How many of a proposer's drafts are accepted, and how much of its budget it uses."""

    survival: list[float]  # S_1..S_DEEPEST, of drafts as long as that
    accepted: list[float]  # [k]: of a step's drafts with a budget of k
    sizes: list[Sizes]  # [k]: shares of the numbers drafted then; a look-up may find fewer

    @property
    def fill(self) -> float:
        """Of the largest budget."""
        return self.drafted(DEEPEST) / DEEPEST

    def drafted(self, budget: int) -> float:
        """Tokens of a step, on average."""
        return sum([share * size for size, share in self.sizes[budget].items()])

    def spread(self, budget: int, batch: int) -> Iterator[tuple[float, float]]:
        """(tokens of each sequence, share of the steps); a batch averages over its sequences."""
        usual = self.drafted(budget)
        for size, share in self.sizes[budget].items():
            yield usual + (size - usual) / batch**0.5, share

    @property
    def alpha(self) -> float:
        """Acceptance per draft that gives the same expected tokens for four drafts."""
        wanted, low, high = self.accepted[4], 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            below = sum(middle**k for k in range(1, 5)) < wanted
            low, high = (middle, high) if below else (low, middle)
        return high


@dataclass(slots=True)
class Curves(StepCosts):
    """The measured costs, and what drafts are worth."""

    verify: dict[int, float] = field(default_factory=dict)  # tokens of a pass -> s, any batch
    worth: dict[str, Worth] = field(default_factory=dict)

    def most_drafts(self, batch: int) -> int:
        """The largest K whose pass was measured in batches of about this size."""
        below = max((n for n in self.passes if n <= batch), default=min(self.passes))
        above = min((n for n in self.passes if n >= batch), default=below)
        widths = [max(self.passes[n]) // n for n in (below, above)]
        return max(1, min(DEEPEST + 1, *widths) - 1)

    def step_s(self, proposer: str, batch: int, num_drafts: int) -> float:
        """A step in which every sequence of the batch drafts that much."""
        # Not the pass of the mean width: wide passes add more than narrow ones save.
        spread = self.worth[proposer].spread(num_drafts, batch)
        passed = sum([share * self.pass_s(batch, 1 + size) for size, share in spread])
        return passed + self.draft_s(proposer, batch, num_drafts) + self.overhead_s(batch)

    def speedup(self, proposer: str, batch: int, num_drafts: int) -> float:
        """Over plain decoding, by the formula with these curves."""
        if num_drafts == 0:
            return 1.0
        tokens = 1.0 + self.worth[proposer].accepted[num_drafts]
        return tokens * self.plain_s(batch) / self.step_s(proposer, batch, num_drafts)

    def best_k(self, proposer: str, batch: int) -> int:
        return best_k(lambda k: self.speedup(proposer, batch, k), self.most_drafts(batch))


@dataclass(slots=True)
class _Samples:
    """Seconds of steps: by tokens of their pass, and by (proposer, draft length, batch)."""

    verify: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    passes: dict[int, defaultdict[int, list[float]]] = field(default_factory=dict)
    around: defaultdict[tuple[str, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    draft: defaultdict[tuple[str, int, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(
        self, kind: Kind, batch: int, width: int, draft_s: float, verify_s: float, other_s: float
    ) -> None:
        self.verify[width].append(verify_s)
        self.passes.setdefault(batch, defaultdict(list))[width].append(verify_s)
        self.draft[*kind, batch].append(draft_s)
        self.around[*kind, batch].append(other_s)

    @property
    def all_s(self) -> Iterator[float]:
        for found in (*self.verify.values(), *self.draft.values(), *self.around.values()):
            yield from found

    def overhead(self) -> dict[int, float]:
        return {batch: _usual(found) for (_, k, batch), found in self.around.items() if k == 0}

    def drafts(self, proposers: Sequence[str]) -> dict[str, dict[int, dict[int, float]]]:
        overhead = self.overhead()
        drafts: dict[str, dict[int, dict[int, float]]] = {name: {} for name in proposers}
        for (name, count, batch), found in self.draft.items():
            if count:  # what surrounds a draft costs as well
                more_s = max(0.0, _usual(self.around[name, count, batch]) - overhead[batch])
                drafts[name].setdefault(batch, {})[count] = median(found) + more_s
        return drafts


def measure_curves(
    engine: Engine, jobs: Sequence[Job], proposers: Sequence[str], tell: Tell
) -> Curves:
    started = perf_counter()
    worth = {}
    for i, name in enumerate(proposers, 1):
        tell(f"acceptance of {name}")
        until = started + SURVIVAL_SHARE * BUDGET_S * i / len(proposers)
        worth[name] = _worth(engine, jobs, name, until)
    samples = _Samples()
    tell("costs, a first round")
    first = _warm_up(engine, jobs, proposers)
    plan = first.plan(started + BUDGET_S - perf_counter(), min(LEAST_JOBS, len(jobs)))
    for turn in range(1, plan.rounds + 1):
        tell(f"costs, round {turn} of {plan.rounds}")
        for batch in first.prompts_s:
            group = _some(jobs, max(batch, plan.jobs), plan.tokens)
            _one_round(engine, group, proposers, batch, samples)
    return Curves(
        {batch: typical for batch, found in samples.passes.items() if (typical := _typical(found))},
        samples.overhead(),
        samples.drafts(proposers),
        {name: _reading(engine, jobs, name) for name in proposers},
        _typical(samples.verify),
        worth,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    jobs: int  # of a batch, if it is not larger
    tokens: int  # of a text


@dataclass(slots=True)
class _FirstRound:
    """By batch: the seconds of its prompts, and those of a token of every text."""

    prompts_s: dict[int, float] = field(default_factory=dict)
    token_s: dict[int, float] = field(default_factory=dict)

    def round_s(self, num_jobs: int, num_tokens: float) -> float:
        return sum(
            max(batch, num_jobs) / batch * (prompts_s + num_tokens * self.token_s[batch])
            for batch, prompts_s in self.prompts_s.items()
        )

    def plan(self, left_s: float, most_jobs: int) -> _Plan:
        """The most that fits into `left_s`: first longer texts, then more rounds."""
        num_jobs = most_jobs if self.round_s(most_jobs, LEAST_TOKENS) <= left_s else 1
        sizes = range(TIMED_TOKENS, LEAST_TOKENS, -1)
        fitting = (n for n in sizes if ROUNDS * self.round_s(num_jobs, n) <= left_s)
        num_tokens = next(fitting, min(LEAST_TOKENS, TIMED_TOKENS))
        rounds = int(left_s / self.round_s(num_jobs, num_tokens))
        return _Plan(min(max(1, rounds), ROUNDS), num_jobs, num_tokens)


def _warm_up(engine: Engine, jobs: Sequence[Job], proposers: Sequence[str]) -> _FirstRound:
    """Short texts in the batch sizes that there is time for."""
    first = _FirstRound()
    for batch in COUNTS:
        started, samples = perf_counter(), _Samples()
        _one_round(engine, _some(jobs, batch, WARM_TOKENS), proposers, batch, samples)
        steps_s = sum(samples.all_s)
        first.prompts_s[batch] = max(0.0, perf_counter() - started - steps_s)
        first.token_s[batch] = steps_s / WARM_TOKENS
        if first.round_s(1, WARM_TOKENS) > WARM_SHARE * BUDGET_S:
            break
    return first


def _some(jobs: Sequence[Job], count: int, num_tokens: int) -> list[Job]:
    picked = [(jobs[i % len(jobs)], i) for i in range(count)]
    return [replace(j, params=replace(j.params, max_tokens=num_tokens, seed=i)) for j, i in picked]


def _one_round(
    engine: Engine, jobs: Sequence[Job], proposers: Sequence[str], batch: int, samples: _Samples
) -> None:
    kinds = [("", 0), *((name, k) for name in proposers for k in COUNTS[batch])]
    for kind, draft_s, verify_s, other_s, width in _steps(engine, jobs, batch, kinds):
        samples.add(kind, batch, width, draft_s, verify_s, other_s)


def _reading(engine: Engine, jobs: Sequence[Job], proposer: str) -> dict[int, float]:
    """Seconds in which a proposer reads a prompt: its first draft takes so much longer."""
    wish = Speculation(proposer=proposer, num_draft_tokens=1)
    each_s = []
    for job in jobs[:LEAST_JOBS]:
        with Lane(engine, FixedPolicy()) as lane:
            params = replace(job.params, max_tokens=READING_STEPS + 1)
            lane.add(job.prompt, params, speculation=wish, prediction=job.prediction)
            # A model drafts after the first token; a look-up in the step of the prompt already.
            first, *others = [report.timing.draft_s for report in lane if report.timing.draft_s]
        if others:
            each_s.append(max(0.0, first - median(others)) / len(job.prompt))
    usual = round(median([len(job.prompt) for job in jobs]))
    return {usual: usual * median(each_s)} if each_s else {}


def _usual(found: list[float]) -> float:
    """The mean without the longest: most of it comes once a call, and a call has several steps."""
    kept = sorted(found)[: max(1, round((1.0 - HICCUPS) * len(found)))]
    return sum(kept) / len(kept)


def _typical(found: dict[int, list[float]]) -> dict[int, float]:
    """Never falling: if a wider pass took less, that is noise."""
    seen = {n: median(s) for n, s in sorted(found.items()) if len(s) >= ROUNDS}
    weights = [float(len(found[n])) for n in seen]
    return dict(zip(seen, rising([*seen.values()], weights), strict=True))


def _steps(
    engine: Engine, jobs: Sequence[Job], batch: int, kinds: Sequence[Kind]
) -> Iterator[tuple[Kind, float, float, float, int]]:
    """(kind, draft, verify, other, tokens) of the steps in which a whole batch decoded."""
    contenders = [
        Ours(
            f"{name} {count}",
            engine,
            Speculation(proposer=name or None, num_draft_tokens=count),
            FixedPolicy(),
        )
        for name, count in kinds
    ]
    together = fit_together(contenders, jobs, batch)
    numbers = range(len(kinds))
    for some in [numbers] if together else [[i] for i in numbers]:
        lanes = {contenders[i].start(jobs, batch): kinds[i] for i in some}
        for lane, report in take_turns([*lanes], lambda lane: lane.progress):
            t = report.timing
            yield lanes[lane], t.draft_s, t.verify_s, t.other_s, t.num_tokens
        for lane in lanes:
            lane.finish()


def _worth(engine: Engine, jobs: Sequence[Job], proposer: str, until: float) -> Worth:
    """`until`: when the texts end that are not complete."""
    wish = Speculation(proposer=proposer, num_draft_tokens=DEEPEST)
    texts: defaultdict[str, list[Drafted]] = defaultdict(list)
    is_tree = False
    with Lane(engine) as lane:
        for job in jobs:
            params = replace(job.params, max_tokens=SURVIVAL_TOKENS)
            lane.add(job.prompt, params, speculation=wish, prediction=job.prediction)
        for num_steps, report in enumerate(lane):
            for event in report.events:
                texts[event.request_id].append((len(event.draft_tokens), len(event.path)))
                is_tree = is_tree or event.draft_parents is not None
            if num_steps >= LEAST_STEPS and perf_counter() > until:
                break
    stats = SpeculationStats()
    for result in lane.results:
        stats.merge(result.stats)
    share = stats.num_proposals / max(1, stats.num_steps)
    reached = [share * s for s in stats.unconditional_acceptance[:DEEPEST]]
    reached += [0.0] * (DEEPEST - len(reached))
    if is_tree:  # its first nodes are the best ones at every budget
        found = [num_drafted for text in texts.values() for num_drafted, _ in text]
        sizes = [_shares(Counter(min(size, k) for size in found)) for k in range(DEEPEST + 1)]
        return Worth(reached, [0.0, *accumulate(reached)], sizes)
    both = [shorter(texts.values(), k) for k in range(DEEPEST + 1)]
    return Worth(reached, [accepted for accepted, _ in both], [sizes for _, sizes in both])


def _shares(counts: Counter[int]) -> Sizes:
    return {size: number / counts.total() for size, number in sorted(counts.items())} or {0: 1.0}


def shorter(texts: Iterable[Sequence[Drafted]], budget: int) -> tuple[float, Sizes]:
    """How many of a step's drafts would be accepted with a smaller budget, and their sizes.

    A model's draft that agrees with a text is the same wherever it begins; a look-up's mostly is.
    So after a short draft that was accepted, the next one is the rest of the long draft: it begins
    in the middle of a run. Long drafts mostly begin after a refusal. Counted by their positions,
    short drafts would look worse than they are. One thing is not known: whether the target's own
    token after a fully accepted draft would have been drafted. It counts as drafted.
    """
    num_accepted, sizes = 0, Counter[int]()
    for text in texts:
        at: list[Drafted] = []  # a draft that begins there: its tokens, and those accepted
        for i, (size, held) in enumerate(text):
            is_full = size == DEEPEST  # with a larger budget it would be longer
            further = 0
            if is_full and held == size:  # it would go on over the target's token
                further = 1 + (text[i + 1][1] if i + 1 < len(text) else 0)
            for k in range(held + 1):
                at.append((DEEPEST if is_full else size - k, held - k + further))
        place = 0
        while place < len(at):
            drafted = min(budget, at[place][0])
            accepted = min(drafted, at[place][1], len(at) - 1 - place)
            sizes[drafted] += 1
            num_accepted += accepted
            place += accepted + 1
    return num_accepted / max(1, sizes.total()), _shares(sizes)
