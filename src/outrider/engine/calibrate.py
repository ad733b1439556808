"""Measures what a pass and a draft cost on this machine: under two seconds, once.

A target that prepares its steps prepares some now and clocks those. Any other target runs over
sequences that exist only as reserved KV slots: their contents do not change the time. The proposer
drafts for synthetic texts. Between two drafts the target runs a pass, as in a real step, so that
the processor's caches hold nothing of the drafter. Where an executor runs several steps in one
call, the measurement does the same. The costs of a proposer that needs a real step first are
learnt from the first steps.

A drafter with a model also drafts in a short text, which shows whether it is ever right.

The tokens of a pass all differ, as those of a text do: a mixture of experts reads each expert that
its tokens touch, so a pass over one repeated token would be too cheap.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch

from outrider import __version__, native
from outrider.contracts import (
    HasModel,
    IntArray,
    Model,
    Observation,
    Proposal,
    Recommends,
    Verdict,
)
from outrider.engine.request import Request, Sequence, Speculation
from outrider.layout import Slice, pack, stack_tables
from outrider.model.capabilities import PacksLater, PrefersThinPasses
from outrider.policy import MAX_AUTO_DRAFT_TOKENS, cache
from outrider.policy.costs import USUAL_CONTEXT, Costs, CostTable, draft_table, verify_table
from outrider.sampling import RowParams, SamplingParams

if TYPE_CHECKING:
    from outrider.draft_plans import DraftPlan
    from outrider.engine.engine import Engine
    from outrider.executors.planned import Decoding, PlannedExecutor

VERIFY_S, DRAFT_S = 1.1, 0.7  # time limits; counts that are not reached are interpolated
# The most informative first. Kernels have cliffs after multiples of eight.
WIDTHS = (1, 5, 2, 9, 3, 17, 33, 65, 12, 13, 4, 6, 8, 16, 24, 25, 32, 64)
FEW_WIDTHS = (1, 9)  # of the longer contexts
CONTEXTS = (64, 1024, 4096)
WIDE = ((16, 1), (16, 2))  # sequences and the width of each: the cost of one more sequence, ...
WIDE_CONTEXT = USUAL_CONTEXT  # ... at the context that the rows refer to
BATCHES = (1, 4, 16)
DRAFTS = (1, 4, 8, 12)
FEW_BUCKETS = ((1, 0), (1, 8))  # of the longer contexts, and always of the shortest
USUAL_DRAFTS = 8
NUM_ROUNDS = 10
NUM_CYCLES = 3  # in one call, where they are computed so
# Figures are not saved if the median of a kind's runs over its fastest is larger, or if threads
# waited for a processor for a larger share of the time.
DISTURBED, WAITED = 1.25, 0.05
PROMPT = [1, 2, 3, 4, 5, 6, 7, 2] * 6  # repeats itself, so that look-ups find something
STRIDE = 7919  # between the ids of a pass: a prime, so that they differ in every vocabulary

Kind = TypeVar("Kind")
Bucket = tuple[int, int]  # (sequences, drafts of each): steps that a target prepares as a whole
Clocked = defaultdict[tuple[int, int], list[float]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Calibration:
    """Fills cost tables from the cache or by measuring. Call it between two passes of the target.

    `identity`: models, device and types, on which the figures depend as well.
    """

    engine: Engine
    identity: Mapping[str, object] = field(default_factory=dict)
    buckets: Seq[Bucket] | None = None  # steps that a target prepares; None: the usual ones
    _disturbances: list[float] = field(default_factory=list)
    _scratch: list[int] = field(init=False)  # of sequences whose slots are read and written

    def __post_init__(self) -> None:
        self._scratch = self.engine.kv.scratch(max(batch for batch, _ in WIDE))

    def __call__(self, costs: Costs, proposer: str) -> None:
        """Sets `costs.verify`, unless it is known, and the table of `proposer`, if possible."""
        drafter = self.engine.proposers[proposer]
        if isinstance(drafter, Recommends) and drafter.recommended is not None:
            costs.first[proposer] = drafter.recommended
        if self.engine.thin_passes is not None:
            self._prepare(self.engine.thin_passes, costs, proposer)
            return
        identity = {**self.identity, **machine(self.engine.target), "proposer": proposer}
        known = cache.load(identity)
        if known is None:
            from outrider.engine.trial import num_refused

            known = Costs.guess()
            self._disturbances.clear()
            for model in (self.engine.target, getattr(drafter, "model", None)):
                if isinstance(model, PacksLater):
                    model.pack()
            began, waited_s = perf_counter(), seconds_waited()
            verify = self._verify() if costs.verify.is_guess else costs.verify
            if verify is None:
                return
            known.verify = verify
            drafts = self._draft(proposer)
            if drafts is not None:
                known.drafts[proposer] = drafts
            waited = (seconds_waited() - waited_s) / (perf_counter() - began)
            known.refused[proposer] = num_refused(self.engine, proposer)
            if waited <= WAITED and not self._was_disturbed:
                cache.save(identity, known)
        if costs.verify.is_guess:
            costs.verify = known.verify
        costs.drafts |= known.drafts
        costs.refused |= known.refused

    def _prepare(self, target: PrefersThinPasses, costs: Costs, name: str) -> None:
        """Measures prepared steps by the device's clock; they cannot be cached."""
        proposer, longest = self.engine.proposers[name], self.engine.scheduler.max_positions
        drafter, fast = proposer.model if isinstance(proposer, HasModel) else None, self._fast
        assert fast is not None  # all targets that prepare passes have one
        verify: dict[int, dict[int, float]] = {}
        drafts: dict[int, dict[int, float]] = {}
        buckets = self.buckets or usual_buckets(target, self.engine.scheduler.config.max_sequences)
        for context in CONTEXTS:
            first = context == CONTEXTS[0]
            for size, k in dict.fromkeys([*FEW_BUCKETS, *buckets]) if first else FEW_BUCKETS:
                if first or context + k < longest:
                    took = fast.measure(drafter, size, k, min(context, longest - k - 1))
                    if took is not None:
                        verify.setdefault(context, {}).setdefault(size * (k + 1), took[1])
                        if first and k:
                            drafts.setdefault(size, {})[k] = took[0]
        if costs.verify.is_guess:
            costs.verify = verify_table(verify)
        table = draft_table(drafts, MAX_AUTO_DRAFT_TOKENS) if drafter else self._draft(name)
        if table is not None:
            costs.drafts[name] = table

    def _verify(self) -> CostTable | None:
        """None if the KV pool has no room for the measurement."""
        kv, longest = self.engine.kv, self.engine.scheduler.max_positions
        seconds: Clocked = defaultdict(list)
        batches: Clocked = defaultdict(list)
        try:
            kinds = [
                (context, 1, width)
                for context in CONTEXTS
                for width in (WIDTHS if context == CONTEXTS[0] else FEW_WIDTHS)
                if context + width <= longest and kv.reserve(self._scratch[0], context + width)
            ]
            if len(kinds) < 2:
                return None
            kinds[2:2] = [
                (WIDE_CONTEXT, batch, width)
                for batch, width in WIDE
                if WIDE_CONTEXT + width <= longest
                and all(kv.reserve(self._scratch[i], WIDE_CONTEXT + width) for i in range(batch))
            ]
            self._pass_s(*kinds[0])  # touches memory for the first time
            for context, batch, width in _rounds(kinds, VERIFY_S):
                found = seconds[context, width] if batch == 1 else batches[batch, batch * width]
                found.append(self._pass_s(context, batch, width))
        finally:
            for scratch in self._scratch:
                kv.free(scratch)
        return verify_table(self._typical(seconds), self._typical(batches))

    def _typical(self, seconds: Clocked) -> dict[int, dict[int, float]]:
        """The median of each kind's runs. The fastest would make wide passes look cheap: they are
        bound by arithmetic and vary more than narrow ones, which wait for memory. The ratio of
        median and fastest shows a busy machine.
        """
        points: dict[int, dict[int, float]] = {}
        for (first, second), took in seconds.items():
            points.setdefault(first, {})[second] = median(took)
            if len(took) > 2:
                self._disturbances.append(median(took) / min(took))
        return points

    @property
    def _was_disturbed(self) -> bool:
        return bool(self._disturbances) and median(self._disturbances) > DISTURBED

    def _pass_s(self, context: int, batch: int, width: int) -> float:
        """A pass over `batch` sequences with `width` tokens each, in slots of their own: reading
        them is most of the cost of one more sequence."""
        tables = [self.engine.kv.table(self._scratch[i]) for i in range(batch)]
        from outrider.draft_plans import Script

        fast, num_tokens = self._fast, self.engine.target.spec.num_tokens
        texts = [
            [STRIDE * (i * width + j) % num_tokens for j in range(width)] for i in range(batch)
        ]
        if fast is not None:  # as most steps will run
            script = Script("", [ids[1:] for ids in texts], [range(width - 1, 0, -1)] * batch,
                            [width - 1] * batch)  # fmt: skip
            decoding = self._decoding(
                context, tables, width, script if width > 1 else None, [ids[0] for ids in texts]
            )
            steps = fast.decode(decoding, 1, 1.0)
            if steps:
                return steps[0].pass_s
        packed = pack(
            [
                Slice(ids[:1], context, table, Proposal(ids[1:]))
                for ids, table in zip(texts, tables, strict=True)
            ]
        )
        started = perf_counter()
        # Reading a number waits for asynchronous devices.
        self.engine.target.forward(packed).logits_RV[0, 0].item()
        return perf_counter() - started

    @property
    def _fast(self) -> PlannedExecutor | None:
        from outrider.executors.planned import PlannedExecutor

        fast = self.engine.executors.fast
        return fast[0] if fast and isinstance(fast[0], PlannedExecutor) else None

    def _decoding(
        self,
        context: int,
        tables: list[IntArray],
        num_left: int,
        plan: DraftPlan | None,
        last: list[int] | None = None,
    ) -> Decoding:
        from outrider.executors.planned import Decoding

        batch = len(tables)
        return Decoding(
            last_S=last or [0] * batch,
            before_S=[0] * batch,
            context_S=[context] * batch,
            tables_SW=stack_tables(tables),
            num_left_S=[num_left] * batch,
            finish_ids=[frozenset()] * batch,
            rows=RowParams.of([SamplingParams()] * batch, [1] * batch),
            keys=[0] * batch,
            plan=plan,
            members=list(range(batch)) if plan is not None else [],
        )

    def _draft(self, name: str) -> CostTable | None:
        """None for a proposer that drafts after a real step only."""
        proposer, kv = self.engine.proposers[name], self.engine.kv
        if proposer.needs.taps:
            return None
        seconds: Clocked = defaultdict(list)
        views: list[Sequence] = []
        deadline = perf_counter() + DRAFT_S
        is_prepared = self.engine.thin_passes is not None
        try:
            for batch in BATCHES:
                if seconds and perf_counter() > deadline:
                    break
                views += [self._view(name, i) for i in range(len(views), batch)]
                for k in DRAFTS if is_prepared else DRAFTS[:2]:
                    self._propose(name, views, k)  # it has read the prompts after two of them
                for k in _rounds(DRAFTS, DRAFT_S / len(BATCHES)):
                    took = self._draft_planned_s(name, views, k)
                    seconds[batch, k] += took or [self._draft_s(name, views, k)]
        except Exception as error:  # a proposer that fails here is measured by real steps
            logger.debug("%s is not measured beforehand: %s", name, error)
            return None
        finally:
            kv.free(self._scratch[0])
            for view in views:
                proposer.release(view.id)
        return draft_table(self._typical(seconds), MAX_AUTO_DRAFT_TOKENS)

    def _draft_planned_s(self, name: str, views: list[Sequence], k: int) -> list[float]:
        """The same in one call of an executor; no entries if it cannot run such steps."""
        from outrider.draft_plans import planner
        from outrider.executors.planned import chain_of

        fast, make_plan = self._fast, planner(self.engine.proposers[name])
        context, batch = CONTEXTS[0], len(views)
        num_left = NUM_CYCLES * (k + 1)
        if (
            fast is None
            or make_plan is None
            or not self.engine.kv.reserve(self._scratch[0], context + num_left)
        ):
            return []
        plan = make_plan(views, [k] * batch, NUM_CYCLES)
        chain = chain_of(plan)
        if chain is None:
            return []
        # The target's slots are the same for all: only the drafter is clocked.
        table = self.engine.kv.table(self._scratch[0])
        try:
            decoding = self._decoding(context, [table] * batch, num_left, plan)
            return [step.draft_s for step in fast.decode(decoding, NUM_CYCLES, 1.0)]
        finally:
            for view in views:
                chain.kv.hold(view.id, 0)

    def _draft_s(self, name: str, views: list[Sequence], k: int) -> float:
        if self.engine.kv.reserve(self._scratch[0], CONTEXTS[0] + 1):
            self._pass_s(CONTEXTS[0], 1, 1)
        seconds, drafted = self._propose(name, views, k)
        if not drafted:
            raise LookupError("it returned no draft for a synthetic text")
        return seconds

    def _propose(self, name: str, views: list[Sequence], k: int) -> tuple[float, bool]:
        """Seconds, and whether every sequence got a draft."""
        proposer = self.engine.proposers[name]
        started = perf_counter()
        proposals = proposer.propose(views, [k] * len(views))
        seconds = perf_counter() - started
        for view in views:
            view.tokens.append(view.tokens[len(view.tokens) % len(PROMPT)])
        proposer.observe(
            views,
            [
                Observation(p, Verdict([], v.tokens[-1]))
                for p, v in zip(proposals, views, strict=True)
            ],
        )
        return seconds, all(proposal.tokens for proposal in proposals)

    def _view(self, proposer: str, index: int) -> Sequence:
        """A text under a salt of its own: no request drafts from it."""
        num_tokens = self.engine.target.spec.num_tokens
        request = Request(
            id=f"calibration-{index}",
            prompt=[token % num_tokens for token in PROMPT],
            params=SamplingParams(ignore_eos=True),
            speculation=Speculation(proposer=proposer),
            seed=index,
            salt="outrider calibration",
        )
        return self.engine.make_sequence(request, 0)


def usual_buckets(target: PrefersThinPasses, max_sequences: int) -> list[Bucket]:
    """Every size of a batch, with the draft lengths from which `auto` mostly chooses."""
    sizes = [1 << e for e in range((max_sequences - 1).bit_length() + 1)]
    return [
        (size, k) for size in sizes for k in range(min(USUAL_DRAFTS, target.most_drafts(size)) + 1)
    ]


def machine(target: Model) -> dict[str, object]:
    """Properties of the machine and of the build that the figures depend on."""
    return {
        "version": __version__,
        "torch": torch.__version__,
        "host": platform.node(),
        "cpu": [platform.machine(), os.cpu_count()],
        "threads": [torch.get_num_threads(), native.num_threads() if native.available() else 0],
        "kernels": _kernels() if native.available() else "torch",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "target": [target.spec.name, target.spec.num_parameters, type(target).__name__],
    }


def _kernels() -> list[object]:
    """Identifies the build of the native library."""
    built = os.stat(native.library()._name)
    return [native.isa(), built.st_size, built.st_mtime_ns]


def seconds_waited() -> float:
    """For how long threads of this process could have run and did not; 0 where no system tells."""
    waited_ns = 0
    with suppress(OSError):  # also of a thread that ends meanwhile
        for stat in Path("/proc/self/task").glob("*/schedstat"):
            waited_ns += int(stat.read_text().split()[1])
    return 1e-9 * waited_ns


def _rounds(kinds: Seq[Kind], limit_s: float) -> Iterator[Kind]:
    """Every kind in turn, many times: a disturbance then hits no kind in all its runs.

    The first two are always yielded, the rest as time allows.
    """
    deadline = perf_counter() + limit_s
    for number, kind in enumerate([*kinds] * NUM_ROUNDS):
        if number >= 2 and perf_counter() > deadline:
            return
        yield kind
