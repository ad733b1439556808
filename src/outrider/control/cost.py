"""What a step costs on this machine: t_verify[tokens, context] and t_draft[batch, K], in seconds.

Tables start from a measurement (`outrider.engine.calibrate`) or, without one, from a guess of the
usual shape, and follow what the engine's own steps take. A step teaches two things: how fast the
machine is now (one factor, which moves fast: machines slow down and recover as a whole) and what
the measurement left out at this count. That much is added to the counts around, too: with straight
lines between counts that steps have visited, and beyond them as a factor: who only ever takes plain
steps in a slow moment must not think that drafts would take less of it. Drafts are priced in units
of the machine's speed, so that the price of what is not done at the moment follows it too.

Clocks only ever err upwards: a busy moment makes a step dear, nothing makes it cheap. So a step
counts as at most a little dearer than is expected, and prices settle near the median of steps; but
one that is much cheaper proves the table wrong, which is then put right at once: as a whole while
no count is known, or where this one is (a slow moment of the machine is over), else where it was
seen.

Contexts and batch sizes fall into buckets that double; one that no step has visited borrows from
the next that was. Inside a bucket a token of context counts by its measured price: contexts grow
with every step, and that is not the machine's speed. Passes are measured over one sequence, and as
many tokens of several take longer (each reads its own context), so what steps add is kept by batch
size, too: else the plain steps of a large batch would make the drafts of a small one look free.
Counts (tokens of a pass, drafts per sequence) are told apart up to eight, so a cliff between four
and five stays a cliff, and then eight per doubling.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TypeGuard

FIRST_CONTEXT = 512  # contexts below it share a bucket
NUM_CONTEXT_BUCKETS = 10  # up to 256k
NUM_BATCH_BUCKETS = 11  # up to 1024
NUM_KNOWN = 100  # steps that make a guess as good as a measurement
KNOTS: list[int] = [*range(8), *(n << e for e in range(9) for n in range(8, 16)), 8192]
LOCAL_RATE = 0.004  # of what a visited count is off by that one step corrects, in the long run
SCALE_RATE = 0.05  # the same of the whole table, where a count is known
MEASURED_WEIGHT = 3  # of the measurement, in steps
KNOWN_VISITS = 16  # steps that make a count known
MOST_ERROR = 0.15  # of a step at a known count, relative: what is further off is no evidence
PROOF_RATE = 0.4  # of what a step is cheaper by, beyond that
FIRST_ERROR = 0.5  # the same at first
WORTH_DRAWING = 0.02  # relative change of a cell: drawing rows anew takes time

# A guess until something is measured: verification nearly free, a draft a tenth of a pass.
GUESS_PASS_S = 1e-3
GUESS_TOKEN = 0.03
GUESS_DRAFT = 0.1


def context_bucket(context: int) -> int:
    return min((context // FIRST_CONTEXT).bit_length(), NUM_CONTEXT_BUCKETS - 1)


def bucket_context(bucket: int) -> float:
    """The middle of a bucket."""
    return FIRST_CONTEXT / 2 if bucket == 0 else 0.75 * FIRST_CONTEXT * 2**bucket


def batch_bucket(batch: int) -> int:
    return min((batch - 1).bit_length(), NUM_BATCH_BUCKETS - 1)


Place = tuple[int, int]


class CostTable:
    """Seconds per (bucket, count): `scale * row(bucket, most)[count]`.

    `batch` is the bucket of the batch size where costs depend on it beside the count.
    """

    __slots__ = (
        "_drawn",
        "_fixes",
        "_num_buckets",
        "_num_seen",
        "_rows",
        "_undrawn",
        "_visits",
        "context_s",
        "each_s",
        "scale",
    )

    def __init__(
        self,
        rows: Sequence[Sequence[float]],
        *,
        measured: bool,
        each_s: float = 0.0,
        context_s: float = 0.0,
    ) -> None:
        """Every row has at least two cells, from count 0 on. A guess's scale is learnt at once.

        `each_s`: added by every sequence but the first, in the first bucket; in the others also
        what they take more than that one. `context_s`: by a token of context that a pass reads.
        """
        self.each_s = each_s
        self.context_s = context_s
        self._num_buckets = len(rows)
        self._num_seen = NUM_KNOWN if measured else 0
        # By (batch, bucket); a fix is what is added at a knot, what is drawn the answers of `row`.
        self._rows = {(0, bucket): list(row) for bucket, row in enumerate(rows)}
        self._fixes: dict[Place, dict[int, float]] = {}
        self._visits: dict[Place, dict[int, int]] = {}
        self._drawn: dict[Place, list[float]] = {}
        self._undrawn = 0.0  # what has changed since, relative
        self.scale = 1.0

    @property
    def is_guess(self) -> bool:
        """Whether hardly anything is known: the scale should first settle on the plainest steps."""
        return self._num_seen < 4

    @property
    def _knows_a_count(self) -> bool:
        return any(max(seen.values(), default=0) >= KNOWN_VISITS for seen in self._visits.values())

    @property
    def rows(self) -> list[list[float]]:
        """The table as it stands now, scale included."""
        return [
            [self.scale * cell for cell in self.row(bucket, len(self._rows[0, bucket]) - 1)]
            for bucket in range(self._num_buckets)
        ]

    def row(self, bucket: int, most: int, batch: int = 0) -> list[float]:
        """Unscaled cells 0..most at least; beyond what is known the last slope goes on.

        Valid until the next `row` or `refresh`; not to be changed.
        """
        place = (batch, bucket)
        drawn = self._drawn.get(place, [])
        if len(drawn) <= most:
            fixes, visits = self._nearest_fixes(place), self._visits.get(place, {})
            end = min((n for n in fixes if n > most), default=most)
            base = self._base(place, max(end, *fixes, 0))
            drawn = _fixed(base[: end + 1], fixes, self._beyond_last(place, base, fixes))
            if visits:  # what was visited often counts for more
                weights = [visits.get(n, 0) + 0.5 for n in range(1, end + 1)]
                drawn[1:] = rising(drawn[1:], weights)
            self._drawn[place] = drawn
        return drawn

    def seconds(self, bucket: int, count: int, batch: int = 0) -> float:
        return self.scale * self.row(bucket, count, batch)[count]

    def base(self, bucket: int, count: int, batch: int = 0) -> float:
        """A cell as it was before any step; the scale is 1."""
        return self._base((batch, bucket), count)[count]

    def off_middle_s(self, bucket: int, batch: int, num_read: int) -> float:
        """What passes that read so many tokens of context take more than the cells say, which are
        about the middle of their buckets; the scale is 1."""
        return self.context_s * (num_read - (1 << batch) * bucket_context(bucket))

    def refresh(
        self,
        bucket: int,
        count: int,
        seconds: float,
        batch: int = 0,
        *,
        num_steps: int = 1,
        speed: bool = True,
    ) -> None:
        """Learns from steps that took so long each; `speed`: also how fast the machine is now."""
        place = (batch, bucket)
        base = self._base(place, count)[count]
        cell = base + self._fix(place, count)
        if cell <= 0.0 or seconds <= 0.0:
            return
        is_first = self._num_seen == 0
        self._num_seen += num_steps
        if is_first:  # only the shape was guessed
            self.scale = seconds / cell
            return

        def share(rate: float) -> float:
            return 1.0 - (1.0 - rate) ** num_steps

        knot = _knot(count)
        visits = self._visits.setdefault(place, {})
        seen = visits.get(knot, 0)
        most = MOST_ERROR if seen >= KNOWN_VISITS else FIRST_ERROR
        error = min(seconds / (self.scale * cell) - 1.0, most)
        rate = max(share(LOCAL_RATE), num_steps / (MEASURED_WEIGHT + seen + num_steps - 1))
        if error < -MOST_ERROR:
            # Where nothing is known the list is wrong, where this count is the machine is faster.
            if seen >= KNOWN_VISITS or not self._knows_a_count:
                self.scale *= 1.0 + share(PROOF_RATE) * error
                return
            rate = max(rate, share(PROOF_RATE))
        is_new = self._num_seen < NUM_KNOWN
        if is_new or (speed and seen >= KNOWN_VISITS):
            rate_now = max(share(SCALE_RATE), min(1.0, num_steps / self._num_seen))
            self.scale *= 1.0 + max(error, -most) * rate_now
        visits[knot] = seen + num_steps
        fixes = self._fixes.setdefault(place, {})
        fixes[knot] = fixes.get(knot, cell - base) + error * cell * rate
        self._undrawn += abs(error) * rate
        if self._undrawn > WORTH_DRAWING or not seen:
            self._drawn.clear()
            self._undrawn = 0.0

    def _base(self, place: Place, most: int) -> list[float]:
        """What was measured or guessed."""
        row = self._rows.get(place)
        if row is None:
            batch, bucket = place
            alone = self._rows[0, bucket]
            each_s = self.each_s + alone[1] - self._rows[0, 0][1]
            row = self._rows[place] = [cell + (2**batch - 1) * each_s for cell in alone]
        if len(row) <= most:
            last, middle = len(row) - 1, len(row) // 2
            slope = max(0.0, (row[last] - row[middle]) / (last - middle)) if middle < last else 0.0
            row += [row[last] + slope * i for i in range(1, most + 1 - last)]
        return row

    def _fix(self, place: Place, count: int) -> float:
        """What steps have added at one count."""
        fixes = self._nearest_fixes(place)
        if count in fixes:
            return fixes[count]
        left = max((n for n in fixes if n < count), default=None)
        right = min((n for n in fixes if n > count), default=None)
        if left is None or right is None:
            end = left if right is None else right
            if end is None:
                return 0.0
            base = self._base(place, max(*fixes, count))
            if right is None:
                return base[count] * (self._beyond_last(place, base, fixes) - 1.0)
            return _beyond(base[count], base[end], fixes[end]) - base[count]
        share = (count - left) / (right - left)
        return fixes[left] + share * (fixes[right] - fixes[left])

    def _beyond_last(
        self, place: Place, base: Sequence[float], fixes: Mapping[int, float]
    ) -> float:
        """The factor of counts wider than any that steps have visited: that of the last one which
        is known. A few steps of a probe say nothing about them."""
        visits = self._visits.get(place, {})
        known = [n for n in fixes if visits.get(n, 0) >= KNOWN_VISITS and base[n]]
        last = max(known or [n for n in fixes if base[n]], default=None)
        return 1.0 if last is None else 1.0 + fixes[last] / base[last]

    def _nearest_fixes(self, place: Place) -> Mapping[int, float]:
        own = self._fixes.get(place)
        if own is not None or not self._fixes:
            return own or {}
        batch, bucket = place
        near = min(self._fixes, key=lambda p: (abs(p[0] - batch), abs(p[1] - bucket)))
        fixes = self._fixes[near]
        here, there = (self._base(p, max(fixes)) for p in (place, near))
        return {n: fix * here[n] / there[n] for n, fix in fixes.items() if there[n]}


def _knot(count: int) -> int:
    """The nearest count that is told apart."""
    right = bisect_left(KNOTS, min(count, KNOTS[-1]))
    left = max(0, right - 1)
    return KNOTS[left] if count - KNOTS[left] < KNOTS[right] - count else KNOTS[right]


def _fixed(base: list[float], fixes: Mapping[int, float], beyond: float) -> list[float]:
    """A row with what steps have added to it; `beyond` the last of them, a factor. No drafts go on
    costing nothing."""
    places = sorted(n for n in fixes if n < len(base))
    if not places:
        return list(base)
    first, last = places[0], places[-1]
    row = [_beyond(cell, base[first], fixes[first]) for cell in base[:first]]
    for left, right in pairwise(places):
        slope = (fixes[right] - fixes[left]) / (right - left)
        row += [base[n] + fixes[left] + slope * (n - left) for n in range(left, right)]
    row += [base[last] + fixes[last], *(beyond * cell for cell in base[last + 1 :])]
    if base[0] == 0.0:
        row[0] = 0.0
    return row


def _beyond(cell: float, visited: float, fix: float) -> float:
    """A cell on the far side of the last visited one, which `fix` was added to."""
    return cell * (1.0 + fix / visited) if visited else cell + fix


@dataclass(slots=True)
class Costs:
    """Everything the controller knows about time. What an engine does around a pass counts with
    the pass.
    """

    verify: CostTable  # its scale is the machine's speed
    drafts: dict[str, CostTable] = field(default_factory=dict)  # by proposer, at speed 1

    @classmethod
    def guess(cls) -> Costs:
        row = [GUESS_PASS_S * (1 + GUESS_TOKEN * n) for n in range(65)]
        return cls(CostTable([row] * NUM_CONTEXT_BUCKETS, measured=False))

    def draft(self, proposer: str) -> CostTable:
        """The table of a proposer; a guess in terms of the target's pass where it is new."""
        table = self.drafts.get(proposer)
        if table is None:
            step = GUESS_DRAFT * self.verify.row(0, 1)[1]
            rows = [[step * k for k in range(17)]] * NUM_BATCH_BUCKETS
            table = self.drafts[proposer] = CostTable(rows, measured=False)
        return table

    def draft_s(self, proposer: str, bucket: int, num_drafts: int) -> float:
        """What a batch of this bucket takes to draft, at the machine's present speed."""
        return self.verify.scale * self.draft(proposer).seconds(bucket, num_drafts)

    def learn_draft(
        self, proposer: str, bucket: int, num_drafts: int, seconds: float, num_steps: int = 1
    ) -> None:
        """From steps in which a batch of this bucket took so long to draft."""
        table = self.draft(proposer)
        seconds /= self.verify.scale
        table.refresh(bucket, num_drafts, seconds, num_steps=num_steps, speed=False)

    def to_dict(self) -> dict[str, object]:
        return {
            "verify": self.verify.rows,
            "each_s": self.verify.scale * self.verify.each_s,
            "context_s": self.verify.scale * self.verify.context_s,
            "drafts": {name: table.rows for name, table in self.drafts.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Costs:
        """Raises ValueError for anything that `to_dict` would not have written."""
        drafts = record.get("drafts")
        if not isinstance(drafts, dict):
            raise ValueError("no draft tables")
        each_s, context_s = record.get("each_s"), record.get("context_s")
        if not _is_cost(each_s) or not _is_cost(context_s):
            raise ValueError("not a cost of each sequence")
        verify = _read_table(record.get("verify"), NUM_CONTEXT_BUCKETS)
        verify.each_s, verify.context_s = float(each_s), float(context_s)
        return cls(
            verify,
            {str(name): _read_table(rows, NUM_BATCH_BUCKETS) for name, rows in drafts.items()},
        )


def _read_table(rows: object, num_buckets: int) -> CostTable:
    if not isinstance(rows, list) or len(rows) != num_buckets:
        raise ValueError("not a cost table")
    for row in rows:
        if not isinstance(row, list) or not 2 <= len(row) <= 1 << 16:
            raise ValueError("not a row of costs")
        if not all(map(_is_cost, row)):
            raise ValueError("not a cost")
    return CostTable(rows, measured=True)


def _is_cost(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and 0 <= value < 1e6


def verify_table(
    points: Mapping[int, Mapping[int, float]],
    batches: Mapping[int, Mapping[int, float]] | None = None,
) -> CostTable:
    """A table from measured seconds, `points[context][tokens]`: linear in both between them.

    `batches[batch][tokens]` is the same of several sequences, in the middle of the first bucket.
    """
    contexts = sorted(points)
    rows = {context: interpolate(points[context]) for context in contexts}
    width = max(map(len, rows.values()))
    for row in rows.values():  # a context measured at few widths grows like the first one
        row += [row[-1] + rows[contexts[0]][n] - rows[contexts[0]][len(row) - 1]
                for n in range(len(row), width)]  # fmt: skip
    buckets = [
        [between({c: rows[c][n] for c in contexts}, bucket_context(b)) for n in range(width)]
        for b in range(NUM_CONTEXT_BUCKETS)
    ]
    each = [
        (seconds - buckets[0][n]) / (batch - 1)
        for batch, row in (batches or {}).items()
        for n, seconds in row.items()
        if n < width
    ]
    each_s = max(0.0, median(each)) if each else 0.0
    context_s = 0.0
    if len(contexts) > 1:
        short, long = contexts[:2]
        context_s = max(0.0, rows[long][1] - rows[short][1]) / (long - short)
    return CostTable(buckets, measured=True, each_s=each_s, context_s=context_s)


def draft_table(points: Mapping[int, Mapping[int, float]], most: int) -> CostTable:
    """A table from measured seconds, `points[batch][K]`; no drafts cost nothing."""
    rows = {}
    for batch, seconds in points.items():
        row = [0.0] + [between(seconds, k) for k in range(1, most + 1)]
        rows[batch] = rising(row)
    sizes = [2**bucket for bucket in range(NUM_BATCH_BUCKETS)]
    return CostTable(
        [
            [between({b: row[k] for b, row in rows.items()}, size) for k in range(most + 1)]
            for size in sizes
        ],
        measured=True,
    )


def interpolate(points: Mapping[int, float]) -> list[float]:
    """Cells 0..max from measured counts, never falling: a wider pass does not cost less."""
    counts = sorted(points)
    known = dict(zip(counts, rising([points[n] for n in counts]), strict=True))
    return [between(known, n) for n in range(counts[-1] + 1)]


def rising(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """The nearest values that never fall: neighbours that do become their mean."""
    pools: list[tuple[float, float, int]] = []  # (weighted sum, weight, how many)
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        total, mass, size = value * weight, weight, 1
        while pools and pools[-1][0] * mass > total * pools[-1][1]:
            more, heavier, number = pools.pop()
            total, mass, size = total + more, mass + heavier, size + number
        pools.append((total, mass, size))
    return [total / mass for total, mass, size in pools for _ in range(size)]


def between(points: Mapping[int, float], x: float) -> float:
    """Piecewise linear; the end pieces go on, but never fall to the outside of the right one."""
    known = sorted(points)
    if len(known) == 1 or x <= known[0]:
        return points[known[0]]
    left, right = next((pair for pair in pairwise(known) if x <= pair[1]), (known[-2], known[-1]))
    slope = (points[right] - points[left]) / (right - left)
    if x > right:
        return points[right] + max(0.0, slope) * (x - right)
    return points[left] + slope * (x - left)
