"""The formula's speedup at this machine's bare costs: calls of the models without the engine.

    speedup = E[tokens] / (t_draft(K) + t_verify(K + 1)) * t_verify(1)

The costs are medians of passes and drafts in turns, after a text of a few hundred tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from outrider.contracts import Observation, Proposal, Verdict
from outrider.engine.engine import Engine
from outrider.engine.lane import fresh_salt
from outrider.engine.request import Request, Speculation
from outrider.engine.request import Sequence as Sequence_
from outrider.layout import Slice, pack
from outrider.sampling import SamplingParams
from outrider.theory import expected_tokens_from_survival

CONTEXT = 192
NUM_ROUNDS = 15


class BareCosts:
    """Seconds of passes and drafts of one engine's models, measured on first use."""

    def __init__(self, engine: Engine, proposer: str) -> None:
        self._engine = engine
        self._proposer = proposer
        self._context = min(CONTEXT, engine.scheduler.max_positions // 2)
        self._known: dict[int, tuple[float, float]] = {}

    def speedup(self, num_drafts: int, survival: Sequence[float]) -> float:
        """`survival[k]`: share of drafts whose first k + 1 tokens were all accepted."""
        plain_s, cycle_s = self.seconds(num_drafts)
        tokens = expected_tokens_from_survival([min(1.0, s) for s in survival[:num_drafts]])
        return tokens * plain_s / cycle_s

    def seconds(self, num_drafts: int) -> tuple[float, float]:
        """Seconds of a plain pass, and of drafting and verifying `num_drafts` tokens."""
        if num_drafts not in self._known:
            self._known[num_drafts] = self._measure(num_drafts)
        return self._known[num_drafts]

    def _measure(self, num_drafts: int) -> tuple[float, float]:
        took: defaultdict[str, list[float]] = defaultdict(list)
        with BareCycle(self._engine, self._proposer, num_drafts, self._context) as bare:
            for _ in range(NUM_ROUNDS):
                took["plain"].append(bare.plain_s())
                took["cycle"].append(bare.cycle_s())
        return median(took["plain"][1:]), median(took["cycle"][1:])


class BareCycle:
    """The model calls of a step, timed one by one; a context manager."""

    def __init__(self, engine: Engine, proposer: str, num_drafts: int, context: int) -> None:
        self._engine = engine
        self._num_drafts = num_drafts
        self._context = context
        self._proposer = engine.proposers[proposer]
        self._request = Request(
            id="bare costs",
            prompt=[1 + i % 50 for i in range(context)],
            params=SamplingParams(ignore_eos=True, max_tokens=1024),
            speculation=Speculation(proposer=proposer, num_draft_tokens=num_drafts),
            seed=0,
            prediction=[1] * 1024,
        )
        self._view = self._make()
        [self._scratch] = self._engine.kv.scratch(1)

    def __enter__(self) -> BareCycle:
        assert self._engine.kv.reserve(self._scratch, self._context + self._num_drafts + 1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.kv.free(self._scratch)
        self._proposer.release(self._view.id)

    def _make(self) -> Sequence_:
        return self._engine.make_sequence(replace(self._request, salt=fresh_salt()), 0)

    def plain_s(self) -> float:
        """A pass over one token."""
        return self._pass_s(0)

    def cycle_s(self) -> float:
        """A draft, and the pass that verifies it."""
        last = min(2 * self._context, self._engine.scheduler.max_positions) - self._num_drafts - 1
        if len(self._view.tokens) >= last:  # start again; reading the text is not timed
            self._proposer.release(self._view.id)
            self._view = self._make()
            self._draft()
        drafted_s = self._draft()
        return drafted_s + self._pass_s(self._num_drafts)

    def _draft(self) -> float:
        view = self._view
        started = perf_counter()
        proposal = self._proposer.propose([view], [self._num_drafts])[0]
        seconds = perf_counter() - started
        # As after a full accept: the last draft, which the proposer has not read, and the bonus.
        view.tokens += [*proposal.tokens, 1]
        self._proposer.observe([view], [Observation(proposal, Verdict([], view.tokens[-1]))])
        return seconds

    def _pass_s(self, num_drafts: int) -> float:
        table = self._engine.kv.table(self._scratch)
        batch = pack([Slice([1], self._context, table, Proposal([1] * num_drafts))])
        started = perf_counter()
        self._engine.target.forward(batch).logits_RV[0, 0].item()
        return perf_counter() - started
