"""Speculative decoding without a model: true costs and true acceptance in, tokens per second out.

The controller under test sees what the engine would show it: finished steps and noisy clocks. It
is judged by expectation, the tokens its budgets are worth over what they truly cost, so that luck
decides nothing and short runs are enough. One unit of time is a plain pass over one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import Any, cast

from outrider.contracts import ControlledView, Draw, Proposal, StopRule, Verdict
from outrider.events import StepTiming
from outrider.policy.base import Decision, Policy
from outrider.policy.costs import USUAL_CONTEXT, Costs, draft_table, interpolate, verify_table
from outrider.policy.fixed import FixedPolicy
from outrider.sampling import SamplingParams

MOST = 16
Acceptance = Callable[[int, int], float]  # (step, sequence) -> of every draft given those before
DrawLevels = Callable[
    [int, Random], tuple[int, float]
]  # step -> a draft's level, and its true chance


@dataclass
class View:
    """As much of a sequence as a controller looks at."""

    id: int
    adaptive: bool = True
    proposer: str = "simulated"
    num_tokens: int = 100
    num_prompt_tokens: int = 99
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1 << 20))
    draw: Draw = Draw.COUPLED
    edits: None = None

    @property
    def tokens(self) -> range:
        return range(self.num_tokens)


@dataclass(frozen=True)
class Machine:
    """True costs in passes of one token: `verify` by tokens of the pass, `draft` per draft step."""

    verify: Sequence[float]
    draft: float = 0.1
    draft_batch: float = 0.005  # added to a draft step by every further sequence
    overhead: float = 0.02
    begin: float = 0.0  # of a call that computes several steps
    around_draft: float = 0.0  # what an engine does around calls, and no measurement of them shows
    around_verify: float = 0.0
    noise: float = 0.05  # standard deviation of every clock reading, relative

    def verify_s(self, num_tokens: int) -> float:
        row = self.verify
        if num_tokens < len(row):
            return row[num_tokens]
        return row[-1] + (row[-1] - row[-2]) * (num_tokens - len(row) + 1)

    def draft_s(self, budgets: Sequence[int]) -> float:
        """One pass per depth over those that go that deep."""
        widths = [sum(k > depth for k in budgets) for depth in range(max(budgets, default=0))]
        return sum(self.draft + self.draft_batch * (width - 1) for width in widths)


# verify(M)/decode(1): a native CPU step, a library matmul on a CPU, a GPU, and what they do in
# between and beyond.
NATIVE = Machine(interpolate({1: 1.0, 5: 1.1, 9: 1.38, 17: 2.5, 33: 4.6, 600: 80.0}))
LIBRARY = Machine(interpolate({1: 1.0, 3: 1.05, 5: 1.9, 9: 2.4, 17: 2.5, 33: 3.6, 600: 50.0}))
GPU = Machine(interpolate({1: 1.0, 16: 1.02, 64: 1.25, 256: 2.2, 600: 5.0}), draft=0.15)
FREE_DRAFTS = Machine(NATIVE.verify, draft=0.001, draft_batch=0.001)

# A mixture of 64 experts of which a token touches 6: a pass reads each expert that any of its
# tokens touches once, which is 60 % of a pass over one token.
MIXTURE = Machine([0.4 + 0.1 * 64 * (1.0 - (1.0 - 6 / 64) ** n) for n in range(601)])


@dataclass
class Trace:
    """What a run did, step by step: expected tokens, true seconds."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    budgets: list[list[int]] = field(default_factory=list)

    def rate(self, start: int = 0, stop: int | None = None) -> float:
        """Tokens per unit of time over some steps; plain decoding of one sequence is about 1."""
        return sum(self.tokens[start:stop]) / sum(self.seconds[start:stop])


def run(
    machine: Machine,
    acceptance: Acceptance,
    controller: Policy,
    *,
    num_steps: int = 2000,
    batch: Callable[[int], int] = lambda step: 1,
    limit: int = MOST,
    length: int = 10**9,
    fill: float = 1.0,
    tree: bool = False,
    ahead: int = 1,
    levels: DrawLevels | None = None,
    slowness: Callable[[int], float] = lambda step: 1.0,
    seed: int = 0,
) -> Trace:
    """`length` tokens each, then the next request; `fill`: how often the proposer finds a draft.

    `ahead`: steps that are computed in one call, as long as the batch and the decision stand.
    `levels`: a cautious drafter, whose acceptance it is then.
    `slowness`: what everything takes at a step, on the clocks; the trace stays comparable.
    """
    random = Random(seed)
    trace = Trace()
    views: list[View] = []
    next_id = num_left = 0
    decision = Decision([], [], 0)
    budgets: list[int] = []
    for step in range(num_steps):
        if len(views) != batch(step):
            num_left = 0
        while len(views) < batch(step):
            views.append(View(next_id, adaptive=not isinstance(controller, FixedPolicy)))
            next_id += 1
        del views[batch(step) :]
        seen = cast("list[ControlledView]", views)
        begins = num_left <= 0
        if begins:
            decision = controller.decide(seen, [limit] * len(views), len(views))
            budgets = decision.budgets
            num_left = min(ahead, decision.valid_steps)
        num_left -= 1
        assert all(0 <= k <= limit for k in budgets)
        proposals, verdicts, worth = [], [], 0.0
        asked, num_taken = budgets, 0
        if levels is not None:
            asked = []
        for i, (view, k) in enumerate(zip(views, budgets, strict=True)):
            if levels is not None:
                draws = [levels(step, random) for _ in range(k)]
                proposal, verdict, added = _stop(draws, decision.stop_rules[i], num_taken, random)
                proposals.append(proposal)
                verdicts.append(verdict)
                asked.append(len(proposal.levels or ()))
                num_taken += len(proposal)
                worth += 1 + added
                continue
            num_nodes = k if random.random() < fill else 0
            alpha = acceptance(step, view.id)
            proposal, verdict = _judge(alpha, num_nodes, tree, random)
            proposals.append(proposal)
            verdicts.append(verdict)
            worth += 1 + sum(chance for chance, _ in best_nodes(alpha, tree)[:num_nodes])
        timing = _timing(machine, asked, [len(p.tokens) for p in proposals])
        timing.other_s += machine.begin * begins
        trace.tokens.append(worth)
        trace.seconds.append(timing.draft_s + timing.verify_s + timing.other_s)
        trace.budgets.append(budgets)
        for view, verdict in zip(views, verdicts, strict=True):
            view.num_tokens += len(verdict.path) + 1
        read = _read(timing, machine.noise, slowness(step), random)
        controller.observe(seen, proposals, verdicts, read)
        for view in [v for v in views if v.num_tokens >= 100 + length]:
            controller.release(view.id)
            views.remove(view)
    return trace


def _stop(
    draws: Sequence[tuple[int, float]], caution: StopRule | None, num_taken: int, random: Random
) -> tuple[Proposal, Verdict, float]:
    """A chain of drafts that ends where the drafter is not sure, and what it is expected to add."""
    levels: list[int] = []
    num_drafts = num_kept = 0
    believed = true = 1.0
    added, holds = 0.0, True

    def floor() -> float:
        if caution is None or not caution.floors:
            return 0.0
        return caution.floors[min(num_taken + num_drafts, len(caution.floors) - 1)]

    for level, chance in draws:
        levels.append(level)
        believed *= 1.0 if caution is None else caution.chances[level]
        if believed < floor():
            break
        num_drafts += 1
        true *= chance
        added += true
        holds = holds and random.random() < chance
        num_kept += holds
        if caution is not None and caution.floors and believed < floor() + caution.toll:
            break
    proposal = Proposal([0] * num_drafts, levels=levels)
    return proposal, Verdict(list(range(num_kept)), 0), added


@cache
def best_nodes(alpha: float, tree: bool) -> list[tuple[float, int]]:
    """(probability of being on the accepted path, parent) of 16 nodes, as drafters choose them.

    A chain's node holds with probability alpha. In a tree each node has two children, of which
    the second holds with half of what the first leaves; the most probable nodes come first.
    """
    found: list[tuple[float, int]] = []
    waiting = [(alpha, -1), (0.5 * (1 - alpha), -1)] if tree else [(alpha, -1)]
    while len(found) < MOST:
        waiting.sort()
        chance, parent = waiting.pop()
        waiting.append((chance * alpha, len(found)))
        if tree:
            waiting.append((chance * 0.5 * (1 - alpha), len(found)))
        found.append((chance, parent))
    return found


def _judge(alpha: float, num_nodes: int, tree: bool, random: Random) -> tuple[Proposal, Verdict]:
    nodes = best_nodes(alpha, tree)[:num_nodes]
    path: list[int] = []
    last, here = -1, 1.0
    while True:
        children, u = [i for i, (_, parent) in enumerate(nodes) if parent == last], random.random()
        for node in children:
            u -= nodes[node][0] / here
            if u < 0:
                path.append(node)
                last, here = node, nodes[node][0]
                break
        else:
            break
    parents = [parent for _, parent in nodes] if tree else None
    return Proposal([0] * num_nodes, parents), Verdict(path, 0)


def _timing(machine: Machine, budgets: Sequence[int], drafted: Sequence[int]) -> StepTiming:
    num_tokens = len(budgets) + sum(drafted)
    return StepTiming(
        draft_s=machine.draft_s(budgets)
        + machine.around_draft * (max(budgets) > 0)
        + 0.2 * machine.overhead,
        verify_s=machine.verify_s(num_tokens) + machine.around_verify,
        other_s=0.8 * machine.overhead,
        num_sequences=len(budgets),
        num_tokens=num_tokens,
    )


def _read(true: StepTiming, noise: float, slowness: float, random: Random) -> StepTiming:
    """What the clocks say."""

    def clock(seconds: float) -> float:
        return slowness * seconds * max(0.5, random.gauss(1.0, noise))

    return replace(
        true,
        draft_s=clock(true.draft_s),
        verify_s=clock(true.verify_s),
        other_s=clock(true.other_s),
    )


def fixed(machine: Machine, acceptance: Acceptance, k: int, **options: Any) -> Trace:
    """The same with one K throughout."""
    return run(machine, acceptance, FixedPolicy(), limit=k, **options)


def best_fixed(machine: Machine, acceptance: Acceptance, **options: Any) -> tuple[int, float]:
    """The K of 0..16 with the highest rate, and that rate."""
    rates = {
        k: fixed(machine, acceptance, k, **options).rate() for k in (*range(9), 10, 12, 14, 16)
    }
    best = max(rates, key=lambda k: rates[k])
    return best, rates[best]


def measured(machine: Machine, seed: int = 0) -> Costs:
    """The cost tables a start-up measurement would give: few points, noisy clocks."""
    random = Random(seed)

    def clock(seconds: float) -> float:
        return min(seconds * max(0.5, random.gauss(1.0, machine.noise)) for _ in range(3))

    widths = (1, 2, 3, 5, 9, 17, 33, 65)
    verify = {n: clock(machine.verify_s(n)) for n in widths}
    draft = {b: {k: clock(machine.draft_s([k] * b)) for k in (1, 4)} for b in (1, 4, 16)}
    costs = Costs(verify_table({USUAL_CONTEXT: verify}))
    costs.drafts["simulated"] = draft_table(draft, MOST)
    return costs
