"""Learning from traffic: what is collected, when a round runs, and which weights draft.

The learner knows a server only by `Server`: how to compute states, to swap weights between steps,
and whether requests run. A thread of its own calls `run_next` in idle time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from outrider.learn.collect import Collector, Row
from outrider.learn.keep import Kept
from outrider.learn.lesson import Lesson, Weights, gain, is_gain
from outrider.learn.rows import TaughtRow, TaughtTarget
from outrider.model.borrowed import Borrowed
from outrider.model.heads import Eagle3Head
from outrider.statistics import SpeculationStats

logger = logging.getLogger(__name__)

KEPT_TOKENS = 1 << 16  # ids in memory, all scopes together
ROUND_BYTES = 256 << 20  # of the states of a round's rows
HELD_SHARE = 0.25  # of the new rows: the newest, for replays
LEAST_HELD = 6
EPOCHS = 2
MOST_SCOPES = 8  # with weights of their own: those that learnt last
ACCEPTED, REJECTED, UNDRAFTED = "accepted", "rejected", "undrafted"


class Server(Protocol):
    """What learning needs of the server. Called by the learner's thread."""

    def states(self, tokens: list[int], taps: tuple[int, ...]) -> Mapping[int, Tensor]:
        """The target's states of a text, computed between two steps."""
        ...

    def swap(self, scope: str, weights: Weights | None) -> None:
        """Drafts for this scope come from these weights from the next step on; None: from those
        that the server began with."""
        ...


@dataclass(slots=True)
class Drafting:
    """The weights of one scope."""

    current: Weights
    previous: Weights | None = None  # before the last swap, until a replay confirmed it
    next_number: int = 0  # rows below were in an earlier round


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a round found and did."""

    scope: str
    action: str  # "swap", "rollback", "rollback and swap" or "none"
    before: float  # acceptance lengths on the newest rows
    after: float
    error: float  # of the relative gain
    num_rows: int
    num_steps: int
    seconds: float


class Learner:
    def __init__(
        self,
        head: Eagle3Head,
        borrowed: Borrowed,
        num_layers: int,
        server: Server,
        *,
        every: int,
        folder: Path | None = None,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        """`every`: answer tokens between two rounds of a scope; `pause` is called between pieces
        of work. The weights of `head` are those that every scope begins with."""
        self._taps = head.taps
        self._layers = tuple(sorted({*head.taps, num_layers}))
        self._server, self._every, self._pause = server, every, pause
        self._target = TaughtTarget(borrowed, head.taps, head.target_ids)
        self._lesson = Lesson(head, self._target, pause)
        self._first = self._lesson.weights()
        self._collector = Collector(KEPT_TOKENS)
        self._lock = threading.Lock()
        self.drafting: OrderedDict[str, Drafting] = OrderedDict()
        self._kept = None if folder is None else Kept(folder, head)
        self.positions: Counter[str] = Counter({ACCEPTED: 0, REJECTED: 0, UNDRAFTED: 0})
        self.num_trainings = self.num_swaps = self.num_rollbacks = 0

    @property
    def num_kept_tokens(self) -> int:
        return self._collector.num_tokens

    def restore(self, only: str | None = None) -> None:
        """Drafts with the weights that an earlier process saved; `only`: of this scope. What one
        key has taught must not draft for all."""
        if self._kept is None:
            return
        there = [scope for scope in self._kept.scopes() if only in (None, scope)]
        for scope in reversed(there[:MOST_SCOPES]):
            self._begin(scope)

    def see(
        self,
        scope: str,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        stats: SpeculationStats,
        *,
        temperature: float,
    ) -> None:
        """Collects a finished request. For any thread."""
        rejected = sum(stats.refused_after)
        self.positions[ACCEPTED] += stats.num_accepted
        self.positions[REJECTED] += rejected
        self.positions[UNDRAFTED] += stats.num_tokens - stats.num_accepted - rejected
        with self._lock:
            for answer in answers:
                self._collector.add(scope, prompt, answer, temperature)

    def run_next(self) -> Outcome | None:
        """Runs a round if a scope has enough new traffic."""
        with self._lock:
            scope = self._collector.ready(self._every)
            if scope is None:
                return None
            kept = self._collector.scopes[scope]
            kept.num_new = 0
            rows = list(kept.rows)
        if len(rows) < 2:
            return None
        if scope not in self.drafting:
            self._begin(scope)
        self.drafting.move_to_end(scope)
        while len(self.drafting) > MOST_SCOPES:
            dropped, _ = self.drafting.popitem(last=False)
            self._server.swap(dropped, None)
        outcome = self._round(scope, self.drafting[scope], rows)
        logger.info(
            "learning: %s",
            outcome.action,
            extra={
                "acceptance_length": f"{outcome.before:.3f} -> {outcome.after:.3f}",
                "error": f"{outcome.error:.1%}",
                "rows": outcome.num_rows,
                "steps": outcome.num_steps,
                "seconds": round(outcome.seconds, 1),
                **({"scope": scope[:8]} if scope else {}),
            },
        )
        return outcome

    def _begin(self, scope: str) -> None:
        """A scope goes on from what it saved last, if it did."""
        saved = None if self._kept is None else self._kept.load(scope)
        self.drafting[scope] = Drafting(self._first if saved is None else saved)
        if saved is not None:
            self._server.swap(scope, saved)

    def _round(self, scope: str, drafting: Drafting, rows: list[Row]) -> Outcome:
        began = time.monotonic()
        held, trained = split(rows, drafting.next_number)
        drafting.next_number = rows[-1].number + 1
        judged = self._teach(held, ROUND_BYTES // 4)
        now, actions = self._lesson.replay(judged, drafting.current), []
        if drafting.previous is not None:
            earlier = self._lesson.replay(judged, drafting.previous)
            if is_gain(earlier, now):
                self._use(scope, drafting, drafting.previous)
                drafting.previous, now = None, earlier
                self.num_rollbacks += 1
                actions.append("rollback")
        taught = self._teach(trained, ROUND_BYTES * 3 // 4)
        weights, num_steps = self._lesson.train(
            taught, drafting.current, EPOCHS, seed=drafting.next_number
        )
        self.num_trainings += 1
        after = self._lesson.replay(judged, weights)
        if is_gain(after, now):
            drafting.previous = drafting.current
            self._use(scope, drafting, weights)
            self.num_swaps += 1
            actions.append("swap")
        return Outcome(
            scope,
            " and ".join(actions) or "none",
            now.length,
            after.length,
            gain(after, now)[1],
            len(judged) + len(taught),
            num_steps,
            time.monotonic() - began,
        )

    def _use(self, scope: str, drafting: Drafting, weights: Weights) -> None:
        drafting.current = weights
        self._server.swap(scope, weights)
        if self._kept is not None:
            self._kept.save(scope, weights)

    def _teach(self, rows: Sequence[Row], most_bytes: int) -> list[TaughtRow]:
        """Rows with their states, the newest first, as many as fit."""
        found: list[TaughtRow] = []
        for row in reversed(rows):
            self._pause()
            states = self._server.states(list(row.tokens), self._layers)
            found.append(self._target.teach(row, states))
            most_bytes -= found[-1].num_bytes
            if most_bytes < 0:
                break
        return found


def split(rows: Sequence[Row], first_new: int) -> tuple[list[Row], list[Row]]:
    """The newest rows, for replays, and those to train on: the other new ones and, against
    forgetting, as many older ones, spread over the time."""
    new = [row for row in rows if row.number >= first_new]
    num_held = min(max(LEAST_HELD, round(HELD_SHARE * len(new))), len(rows) // 2)
    held, rest = list(rows[-num_held:]), list(rows[:-num_held])
    fresh = [row for row in rest if row.number >= first_new] or rest[-1:]
    older = [row for row in rest if row.number < fresh[0].number] if fresh else []
    wanted = min(len(older), len(fresh))
    spread = [older[index * len(older) // wanted] for index in range(wanted)]
    return held, [*spread, *fresh]
