"""What a step costs on this machine: t_verify[tokens, context] and t_draft[batch, K], in seconds.

Tables start from a measurement (`outrider.engine.calibrate`) or, without one, from a guess of the
usual shape, and follow what the engine's own steps take. A step teaches two things at once: how
fast the machine is now (one factor, which moves fast: machines slow down and recover as a whole)
and what its own cell costs. Drafts are priced in units of that factor, so that the price of what
is not done at the moment follows the machine too.

Clocks only ever err upwards: a busy moment makes a step dear, nothing makes it cheap. So a step
counts as at most a little dearer than expected, and prices settle near the median of steps. And
where a measured table is much too dear it was itself measured in a busy moment: then the first few
steps overrule it, and what no step has visited yet becomes cheaper with them.

Contexts and batch sizes fall into buckets that double. Counts (tokens of a pass, drafts per
sequence) have a knot each up to eight, so a cliff between four and five stays a cliff, and then
eight per doubling, with straight lines between: what a further token costs is a difference of two
noisy numbers, and must not be taken over a distance of one where there are fifty.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

FIRST_CONTEXT = 512  # contexts below it share a bucket
NUM_CONTEXT_BUCKETS = 10  # up to 256k
NUM_BATCH_BUCKETS = 11  # up to 1024
NUM_KNOWN = 100  # steps that make a guess as good as a measurement
KNOTS = [*range(8), *(n << e for e in range(9) for n in range(8, 16)), 8192]
LOCAL_RATE = 0.03  # of a knot's error that one step corrects
SCALE_RATE = 0.05  # of the whole table's, once it is known
RISE = 0.8  # the same for steps that took longer, in these terms ...
MOST_RISE = 1.3  # ... and as if by this factor at most
TOO_DEAR = 0.75  # below this part of what the table says, a cell's first steps ...
NEW_VISITS = 12  # ... as many ...
MEASURED_WEIGHT = 3  # ... overrule it: it counts like this many of them
MOST_ERROR = 2.0  # of a step, either way

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


class CostTable:
    """Seconds per (bucket, count): `scale * row(bucket, most)[count]`."""

    __slots__ = ("_num_seen", "_rows", "_visits", "scale")

    def __init__(self, rows: Sequence[Sequence[float]], *, measured: bool) -> None:
        """Every row has at least two cells, from count 0 on. A guess's scale is learnt at once."""
        self._rows = [list(row) for row in rows]
        self._num_seen = NUM_KNOWN if measured else 0
        self._visits = [[0] * len(KNOTS) for _ in rows]
        self.scale = 1.0

    @property
    def is_guess(self) -> bool:
        """Whether hardly anything is known: the scale should first settle on the plainest steps."""
        return self._num_seen < 4

    @property
    def rows(self) -> list[list[float]]:
        """The table as it stands now, scale included."""
        return [[self.scale * cell for cell in row] for row in self._rows]

    def row(self, bucket: int, most: int) -> list[float]:
        """Unscaled cells 0..most at least; beyond what is known the last slope goes on.

        Valid until the next `row` or `refresh`; not to be changed.
        """
        row = self._rows[bucket]
        if len(row) <= most:
            last, middle = len(row) - 1, len(row) // 2
            slope = max(0.0, (row[last] - row[middle]) / (last - middle)) if middle < last else 0.0
            end = KNOTS[bisect_left(KNOTS, min(most, KNOTS[-1]))]
            row += [row[last] + slope * i for i in range(1, max(most, end) + 1 - last)]
        return row

    def seconds(self, bucket: int, count: int) -> float:
        return self.scale * self.row(bucket, count)[count]

    def refresh(self, bucket: int, count: int, seconds: float) -> None:
        """Moves the scale and the knots around `count` towards what a step of this kind took."""
        right = bisect_left(KNOTS, min(count, KNOTS[-1]))
        row = self.row(bucket, KNOTS[right])
        said = self.scale * row[count]
        if said <= 0.0 or seconds <= 0.0:
            return
        self._num_seen += 1
        if self._num_seen == 1:  # only the shape was guessed
            self.scale = seconds / row[count]
            return
        is_new = self._num_seen < NUM_KNOWN
        error = min(max(seconds / said, 1.0 / MOST_ERROR), MOST_ERROR)
        slowly = 1.0
        if error > 1.0 and not is_new:
            error, slowly = min(error, MOST_RISE), RISE
        visits = self._visits[bucket]
        left = right if count >= KNOTS[right] else right - 1
        num_visits = min(visits[left], visits[right])
        rate = slowly * LOCAL_RATE
        if error < TOO_DEAR and num_visits < NEW_VISITS:
            rate = 1.0 / (MEASURED_WEIGHT + num_visits)
            self._carry_along(row, visits, 1.0 + (error - 1.0) * rate, (left, right))
        else:  # the machine's speed, and this cell
            self.scale *= 1.0 + (error - 1.0) * max(slowly * SCALE_RATE, 1.0 / self._num_seen)
            if is_new:
                rate = 1.0 / (MEASURED_WEIGHT + num_visits)
        step = (error - 1.0) * rate
        if left == right:
            visits[right] += 1
            self._bend(row, right, row[count] * (1.0 + step))
            return
        low, high = KNOTS[left], KNOTS[right]
        share = (count - low) / (high - low)
        visits[left if share < 0.5 else right] += 1
        self._bend(row, left, row[low] * (1.0 + step * (1.0 - share)))
        self._bend(row, right, row[high] * (1.0 + step * share))

    def _carry_along(
        self, row: list[float], visits: list[int], factor: float, but: tuple[int, int]
    ) -> None:
        """Prices the unvisited knots anew, as far as visited ones leave room, and redraws all."""
        knots = [k for k in range(len(KNOTS)) if KNOTS[k] < len(row)]
        for k in knots:
            if not visits[k] and k not in but:
                row[KNOTS[k]] *= factor
        for k in reversed(knots[1:]):  # what was visited stands; the others give way to it
            if not visits[k - 1] and row[KNOTS[k - 1]] > row[KNOTS[k]]:
                row[KNOTS[k - 1]] = row[KNOTS[k]]
        for k in knots[1:]:
            row[KNOTS[k]] = max(row[KNOTS[k]], row[KNOTS[k - 1]])
        self._redraw(row, knots)

    def _bend(self, row: list[float], knot: int, seconds: float) -> None:
        """Sets a knot, pushes along neighbours that would make the row fall, redraws the lines."""
        first = last = knot
        row[KNOTS[knot]] = seconds
        while first > 1 and row[KNOTS[first - 1]] > seconds:
            first -= 1
            row[KNOTS[first]] = seconds
        while last + 1 < len(KNOTS) and KNOTS[last + 1] < len(row):
            if row[KNOTS[last + 1]] >= seconds:
                break
            last += 1
            row[KNOTS[last]] = seconds
        self._redraw(row, range(max(0, first - 1), min(last + 2, len(KNOTS))))

    def _redraw(self, row: list[float], knots: Sequence[int]) -> None:
        """Straight lines between these neighbouring knots."""
        for left, right in pairwise(KNOTS[knots[0] : knots[-1] + 1]):
            if right - left > 1 and right < len(row):
                slope = (row[right] - row[left]) / (right - left)
                row[left + 1 : right] = [row[left] + slope * i for i in range(1, right - left)]


@dataclass(slots=True)
class Costs:
    """Everything the controller knows about time.

    `overhead_s` is what a step takes outside drafting and the target's pass, whatever K;
    `plan_s` the part of it that is clocked with drafting.
    """

    verify: CostTable  # its scale is the machine's speed
    drafts: dict[str, CostTable] = field(default_factory=dict)  # by proposer, at speed 1
    overhead_s: float = 0.0
    plan_s: float = 0.0

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

    def to_dict(self) -> dict[str, object]:
        return {
            "verify": self.verify.rows,
            "drafts": {name: table.rows for name, table in self.drafts.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Costs:
        """Raises ValueError for anything that `to_dict` would not have written."""
        drafts = record.get("drafts")
        if not isinstance(drafts, dict):
            raise ValueError("no draft tables")
        return cls(
            _read_table(record.get("verify"), NUM_CONTEXT_BUCKETS),
            {str(name): _read_table(rows, NUM_BATCH_BUCKETS) for name, rows in drafts.items()},
        )


def _read_table(rows: object, num_buckets: int) -> CostTable:
    if not isinstance(rows, list) or len(rows) != num_buckets:
        raise ValueError("not a cost table")
    for row in rows:
        if not isinstance(row, list) or not 2 <= len(row) <= 1 << 16:
            raise ValueError("not a row of costs")
        if not all(isinstance(cell, float | int) and 0 <= cell < 1e6 for cell in row):
            raise ValueError("not a cost")
    return CostTable(rows, measured=True)


def verify_table(points: Mapping[int, Mapping[int, float]]) -> CostTable:
    """A table from measured seconds, `points[context][tokens]`: linear in both between them."""
    contexts = sorted(points)
    rows = {context: interpolate(points[context]) for context in contexts}
    width = max(map(len, rows.values()))
    for row in rows.values():  # a context measured at few widths grows like the first one
        row += [row[-1] + rows[contexts[0]][n] - rows[contexts[0]][len(row) - 1]
                for n in range(len(row), width)]  # fmt: skip
    return CostTable(
        [
            [between({c: rows[c][n] for c in contexts}, bucket_context(b)) for n in range(width)]
            for b in range(NUM_CONTEXT_BUCKETS)
        ],
        measured=True,
    )


def draft_table(points: Mapping[int, Mapping[int, float]], most: int) -> CostTable:
    """A table from measured seconds, `points[batch][K]`; no drafts cost nothing."""
    rows = {}
    for batch, seconds in points.items():
        row = [0.0] + [between(seconds, k) for k in range(1, most + 1)]
        rows[batch] = [max(row[: k + 1]) for k in range(most + 1)]
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
    row = [between(points, n) for n in range(max(points) + 1)]
    return [max(row[: n + 1]) for n in range(len(row))]


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
