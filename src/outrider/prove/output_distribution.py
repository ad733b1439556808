"""Tests, with a stated power, whether the real code has the target's output distribution.

The tensor verifiers decode many short sequences of a `SmallPair`: from logits through
`sampling.RowDistributions` and the noise of `outrider.noise` to verdicts, several steps each, as
the engine does. The joint distribution of the first tokens is known exactly, and `power.plan`
computes how many sequences show any error of one percent total variation in it.

Mistakes from `prove.biased` run in their reference implementation with random dice: they have no
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, cast

import torch

from outrider.contracts import Draw, Proposal, SequenceView, Stream, Verifier
from outrider.noise import draw_key, mix
from outrider.prove.enumerate import Dice, Experiment, Model, Tokens
from outrider.prove.power import ERROR, Plan, Verdict, examine, plan
from outrider.prove.reference import Distribution
from outrider.sampling import RowDistributions, RowParams, SamplingParams, draw_tokens

HORIZON = 3  # tokens of a sequence: both drafts accepted and the bonus, or several steps
CHAIN = [-1, 0]
TREE = [-1, -1, 0]
BATCH = 2048
SEED = 20240229

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=HORIZON)

Report = Callable[[int, int], None]  # sequences done, of how many


@dataclass(frozen=True, slots=True)
class OutputTest:
    """The plan and its verdict."""

    plan: Plan
    verdict: Verdict


class Sampler(Protocol):
    """Decodes sequences: `next` returns the outputs of `count` further ones."""

    def next(self, count: int) -> Counter[Tokens]: ...


def examine_output(
    dist: dict[Tokens, float],
    sampler: Sampler,
    report: Report = lambda done, of: None,
    *,
    error: float = ERROR,
) -> OutputTest:
    """Samples as planned, and stops at the first look that rejects."""
    planned = plan(dist, error=error)
    counts: Counter[Tokens] = Counter()
    verdict = Verdict(0, 0.0, 1.0, False)
    for look in planned.looks:
        while (done := counts.total()) < look:
            counts += sampler.next(min(BATCH, look - done))
            report(counts.total(), planned.num_samples)
        verdict = examine(planned, dist, counts)
        if verdict.rejected:
            break
    return OutputTest(planned, verdict)


def joint_distribution(target: Model, horizon: int) -> dict[Tokens, float]:
    """P of every sequence of `horizon` tokens."""
    dist: dict[Tokens, float] = {(): 1.0}
    for _ in range(horizon):
        dist = {
            (*prefix, token): mass * float(p)
            for prefix, mass in dist.items()
            for token, p in enumerate(target(prefix))
        }
    return dist


# --- the real rules ------------------------------------------------------------------------


@dataclass(slots=True)
class View:
    """The part of contracts.SequenceView that sampling and verifiers read."""

    sample_index: int
    seed: int = SEED
    tokens: list[int] = field(default_factory=list)
    params: SamplingParams = PARAMS


class RuleSampler:
    """Sequences decoded by a tensor verifier from drafts of the given kind and shape."""

    def __init__(self, target: Model, draft: Model, verifier: Verifier, draw: Draw) -> None:
        self._verifier = verifier
        self._draw = draw
        self._parents = TREE if verifier.trees and draw is not Draw.COUPLED else CHAIN
        size = len(target(()))
        self._target, self._draft = _LogTable(target, size), _LogTable(draft, size)
        self._num_done = 0

    def next(self, count: int) -> Counter[Tokens]:
        views = [View(self._num_done + i) for i in range(count)]
        self._num_done += count
        active = views
        while active:
            self._step(active)
            active = [view for view in active if len(view.tokens) < HORIZON]
        return Counter(tuple(view.tokens[:HORIZON]) for view in views)

    def _step(self, views: list[View]) -> None:
        proposals = self.propose(views)
        contexts = [
            (*view.tokens, *before)
            for view, proposal in zip(views, proposals, strict=True)
            for before in self._paths(proposal.tokens)
        ]
        seen = cast("list[SequenceView]", views)
        logits_RV = self._target.rows(contexts)
        dists = RowDistributions(
            logits_RV, seen, proposals, [None] * len(views), num_tokens=logits_RV.shape[1]
        )
        verdicts = self._verifier.verify(seen, proposals, dists)
        for view, proposal, verdict in zip(views, proposals, verdicts, strict=True):
            view.tokens += [proposal.tokens[node] for node in verdict.path]
            view.tokens.append(verdict.next_token)

    def _paths(self, tokens: list[int]) -> Iterator[Tokens]:
        """The drafted tokens before each row: the root's, then every node's."""
        paths: list[Tokens] = [()]
        for node, token in enumerate(tokens):
            paths.append((*paths[self._parents[node] + 1], token))
        return iter(paths)

    def propose(self, views: list[View]) -> list[Proposal]:
        """Drafts every node for all sequences at once; each draw has noise of its own."""
        drafted: list[list[int]] = [[] for _ in views]
        dists: list[torch.Tensor] = []
        rows = RowParams.of([PARAMS] * len(views), [1] * len(views))
        for node, parent in enumerate(self._parents):
            contexts = [
                (*view.tokens, *list(self._paths(tokens))[parent + 1])
                for view, tokens in zip(views, drafted, strict=True)
            ]
            logits_SV = self._draft.rows(contexts)
            dists.append(logits_SV.exp())
            if self._draw in (Draw.DETERMINISTIC, Draw.WITHOUT_REPLACEMENT):
                for sibling in [n for n in range(node) if self._parents[n] == parent]:
                    taken = torch.tensor([tokens[sibling] for tokens in drafted])
                    logits_SV.scatter_(1, taken[:, None], -torch.inf)
            if self._draw is Draw.DETERMINISTIC:
                tokens = logits_SV.argmax(-1).tolist()
            else:
                tokens = draw_tokens(logits_SV, rows, [self._key(view, node) for view in views])
            for mine, token in zip(drafted, tokens, strict=True):
                mine.append(token)
        parents = None if self._parents is CHAIN else self._parents
        q_SNV = torch.stack(dists, dim=1)
        known = self._draw in (Draw.SAMPLED, Draw.WITHOUT_REPLACEMENT)
        return [
            Proposal(tokens, parents, self._draw, q_SNV[i] if known else None)
            for i, tokens in enumerate(drafted)
        ]

    def _key(self, view: View, node: int) -> int:
        if self._draw is Draw.COUPLED:  # chains: the target's own noise at that position
            position = len(view.tokens) + node
            return draw_key(view.seed, view.sample_index, position, Stream.TARGET)
        step = draw_key(view.seed, view.sample_index, len(view.tokens), Stream.DRAFT)
        return mix(step + node)


class _LogTable:
    """The logs of a model's distributions, row by row; each context is evaluated once."""

    def __init__(self, model: Model, size: int) -> None:
        self._model = model
        self._index: dict[Tokens, int] = {}
        self._table_CV = torch.empty(0, size)

    def rows(self, contexts: list[Tokens]) -> torch.Tensor:
        new = [c for c in dict.fromkeys(contexts) if c not in self._index]
        if new:
            dists = torch.tensor([[float(p) for p in self._model(c)] for c in new])
            self._table_CV = torch.cat([self._table_CV, dists.log()])
            self._index |= {c: len(self._index) + i for i, c in enumerate(new)}
        return self._table_CV[[self._index[c] for c in contexts]]


# --- mistakes ------------------------------------------------------------------------------


class ExperimentSampler:
    """Sequences of an `Experiment` with random dice."""

    def __init__(self, experiment: Experiment, seed: int = SEED) -> None:
        self._experiment = experiment
        self._random = Random(seed)

    def next(self, count: int) -> Counter[Tokens]:
        return Counter(self._one() for _ in range(count))

    def _one(self) -> Tokens:
        dice = RandomDice(self._random)
        out = self._experiment.run(cast("Dice", dice))
        while len(out) < self._experiment.horizon:  # the target completes the sequence
            out += (dice.choose(("rest", len(out)), self._experiment.target(out)),)
        return out


class RandomDice:
    """`enumerate.Dice` for one random run: one uniform per name."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._uniforms: dict[Hashable, float] = {}

    def choose(self, name: Hashable, dist: Distribution) -> int:
        u = self._uniform(name)
        for token, mass in enumerate(dist):
            u -= mass
            if u < 0:
                return token
        return max(token for token, mass in enumerate(dist) if mass > 0)  # rounding

    def below(self, name: Hashable, threshold: object) -> bool:
        return self._uniform(name) < threshold  # type: ignore[operator]

    def _uniform(self, name: Hashable) -> float:
        if name not in self._uniforms:
            self._uniforms[name] = self._random.random()
        return self._uniforms[name]


def in_floats(model: Model) -> Model:
    """The same distributions as floats: the reference rules work on any numbers."""
    table: dict[Tokens, Distribution] = {}

    def dist(context: Tokens) -> Distribution:
        if context not in table:
            table[context] = cast("Distribution", tuple(float(p) for p in model(context)))
        return table[context]

    return dist
