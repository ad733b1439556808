"""The reference: every batch, every model. The other executors must give its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import numpy as np

from outrider.contracts import Draw, Model, Proposal, Proposer, StepBatch, Stream, Verdict, Verifier
from outrider.executors.base import (
    RunningSequence,
    StepPlan,
    StepResult,
    by_proposer,
    taps_for,
)
from outrider.executors.forward import forward
from outrider.kv.cache import KVCache
from outrider.layout import stack_tables
from outrider.noise import mix, sequence_key
from outrider.sampling import RowDistributions, RowParams, draw_tokens, true_vocabulary


class PythonExecutor:
    name = "python"

    def __init__(
        self,
        target: Model,
        kv: KVCache,
        proposers: Mapping[str, Proposer],
        verifiers: Mapping[str, Verifier],
    ) -> None:
        self._target = target
        self._kv = kv
        self._proposers = proposers
        self._verifiers = verifiers
        self._drafting = Drafting(kv, proposers, verifiers, target.spec.num_tokens)

    def can_run(self, plan: StepPlan) -> bool:
        return True

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        """One step; several only where nothing is drafted. Raises TurnedAway if memory is short."""
        if max_steps > 1 and not any(plan.budgets) and plan.needs_draws_only(self._verifiers):
            results = self._decode(plan, max_steps, limit_s)
            if results:
                return results
        return [self._step(plan)]

    def _step(self, plan: StepPlan) -> StepResult:
        started = perf_counter()
        proposals = self._drafting.propose(plan)
        drafted = perf_counter()
        taps = taps_for(self._proposers, [line.sequence for line in plan.lines])
        passed = forward(self._target, self._kv, plan.lines, proposals, taps)
        verdicts = self._verify(plan, proposals, passed.distributions)
        for line, proposal, verdict in zip(plan.ends, proposals, verdicts, strict=True):
            if proposal.parents is not None:
                first_slot = len(line.sequence.tokens)  # where node 0 of the draft was written
                source, target = self._kv.compact(line.sequence.id, first_slot, verdict.path)
                if len(source):
                    self._target.copy_slots(source, target)
        return StepResult(
            proposals,
            verdicts,
            drafted - started,
            perf_counter() - drafted,
            passed.distributions,
            passed.taps,
            passed.failures,
        )

    def _verify(
        self, plan: StepPlan, proposals: list[Proposal], distributions: RowDistributions
    ) -> list[Verdict]:
        sequences = [line.sequence for line in plan.ends]
        groups: dict[str, list[int]] = {}
        for i, sequence in enumerate(sequences):
            groups.setdefault(sequence.verifier, []).append(i)
        if len(groups) == 1:
            (name,) = groups
            return self._verifiers[name].verify(sequences, proposals, distributions)
        verdicts: dict[int, Verdict] = {}
        for name, members in groups.items():
            found = self._verifiers[name].verify(
                [sequences[i] for i in members],
                [proposals[i] for i in members],
                distributions.select(members),
            )
            verdicts.update(zip(members, found, strict=True))
        return [verdicts[i] for i in range(len(sequences))]

    def _decode(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        """Plain steps in a row: the pass and the draws. None where KV is short or one fails."""
        sequences = [line.sequence for line in plan.lines]
        if taps_for(self._proposers, sequences):
            return []
        max_steps = min(max_steps, *plan.num_left())
        for s in sequences:
            if not plan.hold(self._kv, s.id, len(s.tokens) + max_steps):
                return []
        starts_S1 = np.arange(len(sequences) + 1, dtype=np.int32)
        context_S = np.array([s.num_computed for s in sequences], np.int32)
        batch = StepBatch(
            tokens_T=np.array([s.tokens[-1] for s in sequences], np.int32),
            positions_T=context_S,
            starts_S1=starts_S1,
            context_S=context_S,
            tables_SW=stack_tables([self._kv.table(s.id) for s in sequences]),
            logit_rows_R=starts_S1[:-1],
        )
        rows = RowParams.of([s.params for s in sequences], [1] * len(sequences))
        keys = [sequence_key(s.seed, s.sample_index, Stream.TARGET) for s in sequences]
        results: list[StepResult] = []
        begun = ended = perf_counter()
        duration = 0.0
        while len(results) < max_steps:
            is_late = ended + duration - begun > limit_s
            if results and (is_late or plan.interrupt.value):
                break
            tokens = self._draw_next(batch, rows, keys)
            if tokens is None:
                break
            started, ended = ended, perf_counter()
            duration = ended - started
            verdicts = [Verdict([], token) for token in tokens]
            results.append(StepResult([Proposal() for _ in tokens], verdicts, 0.0, duration))
            if any(t in s.finish_ids for t, s in zip(tokens, sequences, strict=True)):
                break
            batch.tokens_T = np.array(tokens, np.int32)
            batch.positions_T = batch.context_S = batch.context_S + 1
        return results

    def _draw_next(self, batch: StepBatch, rows: RowParams, keys: list[int]) -> list[int] | None:
        """None if the pass fails or a row is NaN: `_step` repeats and handles it."""
        try:
            logits_SV = self._target.forward(batch).logits_RV
        except Exception:
            return None
        tokens = draw_tokens(
            true_vocabulary(logits_SV, self._target.spec.num_tokens),
            rows,
            [mix(k + n + 1) for k, n in zip(keys, batch.context_S.tolist(), strict=True)],
        )
        return None if min(tokens) < 0 else tokens


class Drafting:
    """Asks the proposers for drafts. A proposer's fault costs speed, never the request."""

    def __init__(
        self,
        kv: KVCache,
        proposers: Mapping[str, Proposer],
        verifiers: Mapping[str, Verifier],
        num_tokens: int,
    ) -> None:
        """`num_tokens`: the target's true vocabulary."""
        self._kv = kv
        self._proposers = proposers
        self._verifiers = verifiers
        self._num_tokens = num_tokens

    def propose(self, plan: StepPlan) -> list[Proposal]:
        """A proposal for each line at its end; empty without a budget, a proposer or KV slots."""
        ends, budgets = plan.ends, plan.budgets
        sequences = [line.sequence for line in ends]
        proposals = [Proposal() for _ in ends]
        for i, line in enumerate(ends):
            if line.sequence.matcher is not None and line.draft_limit:
                proposals[i] = self._forced(line.sequence, budgets[i] or line.draft_limit)
        for name, members in by_proposer(sequences).items():
            members = [i for i in members if budgets[i] > 0 and not proposals[i].tokens]
            if not members or name in plan.broken:
                continue
            asked, limits = [sequences[i] for i in members], [budgets[i] for i in members]
            try:
                answers = self._proposers[name].propose(asked, limits)
                for sequence, limit, answer in zip(asked, limits, answers, strict=True):
                    rule = self._verifiers[sequence.verifier]
                    _check_proposal(answer, limit, self._num_tokens, rule.draws)
            except Exception:
                plan.note_broken(name)
                continue
            for i, answer in zip(members, answers, strict=True):
                proposals[i].levels = answer.levels  # also where a stop rule left all drafts out
                if answer.tokens and self._has_room(sequences[i], answer):
                    proposals[i] = answer
        return proposals

    def _forced(self, sequence: RunningSequence, budget: int) -> Proposal:
        """The tokens that the request's grammar forces: a draft without cost."""
        assert sequence.matcher is not None
        proposal = Proposal(sequence.matcher.forced(sequence.tokens)[:budget], source="grammar")
        is_exact = Draw.DETERMINISTIC in self._verifiers[sequence.verifier].draws
        if proposal.tokens and is_exact and self._has_room(sequence, proposal):
            return proposal
        return Proposal()

    def _has_room(self, sequence: RunningSequence, proposal: Proposal) -> bool:
        return self._kv.reserve(sequence.id, len(sequence.tokens) + len(proposal.tokens))


def _check_proposal(
    proposal: Proposal, budget: int, num_tokens: int, allowed: frozenset[Draw]
) -> None:
    """Raises ValueError for what a correct proposer never returns."""
    tokens, parents, q = proposal.tokens, proposal.parents, proposal.q
    if not tokens:
        return
    if len(tokens) > budget:
        raise ValueError(f"{len(tokens)} nodes drafted, {budget} allowed")
    if not 0 <= min(tokens) <= max(tokens) < num_tokens:
        raise ValueError(f"drafted ids outside 0..{num_tokens - 1}")
    if parents is not None and (
        len(parents) != len(tokens) or any(not -1 <= p < i for i, p in enumerate(parents))
    ):
        raise ValueError("every node needs one parent that comes before it")
    if proposal.draw not in allowed:
        raise ValueError(f"a {proposal.draw.value} draft is not exact under this request's rule")
    needs_q = proposal.draw is not Draw.DETERMINISTIC and Draw.COUPLED not in allowed
    if needs_q and (q is None or q.shape != (len(tokens), num_tokens)):
        raise ValueError("a sampled draft needs its distribution q, one row per node")
