"""What a step costs on this machine: a pass by tokens, sequences and context; a draft by length.

A table starts from a measurement (`outrider.engine.calibrate`) or from a guess of the usual shape.
For each batch size, finished steps fit three numbers to it, by least squares with a prior:

    seconds(n) = speed * (offset + factor * measured(n) + slope * n)

So the shape of the measurement stays, cliffs and all, and a disturbed step at one count moves the
prices of all counts a little instead of its own by much. `speed` is one factor for all costs. It
moves fast: a machine slows down and recovers as a whole.

Timing noise is one-sided: other load only lengthens a step. So a step that took longer than
expected counts at most `MAX_ERROR` longer. If the first step takes less than half of what was
measured, the measurement had other load beside it, and its level is taken from plain steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import TypeGuard

from outrider.policy import MEMORY, VALID_STEPS

SPEED_RATE = 0.05  # of an error goes to the machine's speed: 20 steps follow it
MAX_ERROR = 0.15  # relative; a larger error of a fit that is trusted is a disturbance
GUESS = 0.03  # of a pass: what a further token in it costs before it is measured, and to draft one
USUAL_CONTEXT = 256  # tokens of each sequence to which the rows refer: most texts are short


def batch_bucket(num_sequences: int) -> int:
    """Batch sizes that share corrections: 1, 2, 3-4, 5-8, ..."""
    return (num_sequences - 1).bit_length()


class _Fit:
    """Offset, factor and slope of one batch size, in units of the measured plain cell.

    Least squares over decayed steps; the prior (0, 1, 0) weighs as much as one step.
    """

    def __init__(self) -> None:
        self.num_steps = 0.0
        self.offset, self.factor, self.slope = 0.0, 1.0, 0.0
        self._products = [0.0] * 6  # sums of x_i * x_j over steps, upper triangle
        self._targets = [0.0] * 3  # sums of x_i * (y - prior's y)

    def learn(self, shape: float, more: float, target: float, num_steps: int) -> None:
        """Steps of `target` plain cells, where the measurement has `shape`; `more`: the count over
        the plain one, less one."""
        fade = MEMORY**num_steps
        self.num_steps = fade * self.num_steps + num_steps
        x = (1.0, shape, more)
        pairs = [x[i] * x[j] for i in range(3) for j in range(i, 3)]
        self._products = [
            fade * old + num_steps * new for old, new in zip(self._products, pairs, strict=True)
        ]
        rest = num_steps * (target - shape)
        self._targets = [fade * t + rest * xi for t, xi in zip(self._targets, x, strict=True)]
        a, b, c, d, e, f = self._products
        a, d, f = a + 1.0, d + 1.0, f + 1.0
        u, v, w = self._targets
        # Cramer's rule; the prior keeps the determinant above 1.
        det = a * (d * f - e * e) - b * (b * f - c * e) + c * (b * e - c * d)
        self.offset = (u * (d * f - e * e) - b * (v * f - w * e) + c * (v * e - w * d)) / det
        self.factor = 1.0 + (a * (v * f - w * e) - u * (b * f - c * e) + c * (b * w - c * v)) / det
        self.slope = (a * (d * w - e * v) - b * (b * w - c * v) + u * (b * e - c * d)) / det


class CostTable:
    """Seconds by batch bucket and count: `speed * row(batch, most)[count]`.

    Counts are tokens of a pass, or drafts of a sequence.
    """

    def __init__(
        self,
        rows: Mapping[int, Sequence[float]],
        *,
        measured: bool,
        context_s: float = 0.0,
        pair_s: float = 0.0,
    ) -> None:
        """`rows[num_sequences][count]`, linear in the number of sequences between those given.

        `context_s`: added by each token of context that a pass reads; `pair_s`: by each pair of a
        token of the pass and a token of its context.
        """
        self.context_s = context_s
        self.pair_s = pair_s
        self.speed = 1.0
        self._measured = {size: list(row) for size, row in rows.items()}
        self._num_seen = VALID_STEPS if measured else 0
        self._was_tried = not measured  # by a step
        self._bases: dict[int, list[float]] = {}  # by batch bucket: before any fit
        self._fits: dict[int, _Fit] = {}
        self._rows: dict[int, list[float]] = {}  # answers of `row`

    @property
    def is_guess(self) -> bool:
        """Whether hardly anything is known: the speed first settles on plain steps."""
        return self._num_seen < 4

    @property
    def is_known(self) -> bool:
        """Whether steps have confirmed it."""
        return any(fit.num_steps >= VALID_STEPS / 2 for fit in self._fits.values())

    def row(self, batch: int, most: int) -> list[float]:
        """Cells 0..most at least, never falling, at speed 1.

        Valid until the next `row` or `learn`; not to be changed.
        """
        row = self._rows.get(batch, [])
        if len(row) <= most:
            base, plain = self._base(batch, most), self._plain(batch)
            unit, fit = base[plain], self._nearest_fit(batch)
            if unit and fit is not None:
                first, more = unit * (fit.offset - fit.slope), unit * fit.slope / plain
                factor = fit.factor
                row = [first + factor * cell + more * n for n, cell in enumerate(base)]
                if base[0] == 0.0:
                    row[0] = 0.0  # no drafts
                row = list(accumulate(row, max))
            else:
                row = base
            self._rows[batch] = row
        return row

    def seconds(self, batch: int, count: int) -> float:
        return self.speed * self.row(batch, count)[count]

    def base(self, batch: int, count: int) -> float:
        """A measured cell, at speed 1."""
        return self._base(batch, count)[count]

    def context_cost(self, num_sequences: int, num_read: int) -> float:
        """What reading `num_read` tokens of context adds to the row's pass, at speed 1."""
        return self.context_s * (num_read - num_sequences * USUAL_CONTEXT)

    def learn(
        self, batch: int, count: int, seconds: float, num_steps: int = 1, *, speed: bool = True
    ) -> None:
        """From `num_steps` steps of `seconds` each; `speed`: they tell the machine's speed, too."""
        cell, plain = self.row(batch, count)[count], self._plain(batch)
        unit = self.base(batch, plain)
        if cell <= 0.0 or seconds <= 0.0 or unit <= 0.0:
            return
        was_tried, self._was_tried = self._was_tried, True
        if not was_tried and seconds < cell / 2:  # something else ran beside the measurement
            self._num_seen = 0
            if count != plain and not self._is_draft:
                return  # plain steps are next, and set the speed
        is_first = self._num_seen == 0
        self._num_seen += num_steps
        if is_first:  # the guess is one of shape
            self.speed = seconds / cell
            return
        fit = self._fits.get(batch)
        if fit is None:
            fit = self._fits[batch] = _Fit()
        is_known = fit.num_steps >= VALID_STEPS
        largest = MAX_ERROR if is_known else 3 * MAX_ERROR
        error = seconds / (self.speed * cell) - 1.0
        if speed and is_known:
            share = 1.0 - (1.0 - SPEED_RATE) ** num_steps
            self.speed *= 1.0 + share * min(error, largest)
        target = min(seconds / self.speed, (1.0 + largest) * cell) / unit
        fit.learn(self.base(batch, count) / unit, count / plain - 1.0, target, num_steps)
        self._rows.clear()

    def _plain(self, batch: int) -> int:
        """The count in whose terms a fit is: a pass of one token each, or one draft."""
        return 1 if self._is_draft else 1 << batch

    @property
    def _is_draft(self) -> bool:
        return next(iter(self._measured.values()))[0] == 0.0

    def _base(self, batch: int, most: int) -> list[float]:
        row = self._bases.get(batch)
        if row is None or len(row) <= most:
            width = max(most + 1, len(row or ()), self._plain(batch) + 1)
            rows = {size: _longer(found, width - 1) for size, found in self._measured.items()}
            row = self._bases[batch] = [
                between({size: found[n] for size, found in rows.items()}, 1 << batch)
                for n in range(width)
            ]
        return row

    def _nearest_fit(self, batch: int) -> _Fit | None:
        """A batch size without steps borrows the fit of the nearest one."""
        if not self._fits:
            return None
        return self._fits[min(self._fits, key=lambda other: abs(other - batch))]

    def to_dict(self) -> dict[str, object]:
        """The table as it stands, speed included."""
        most = max(map(len, self._measured.values())) - 1
        return {
            "rows": {
                str(size): [self.speed * cell for cell in self.row(batch_bucket(size), most)]
                for size in self._measured
            },
            "context_s": self.speed * self.context_s,
            "pair_s": self.speed * self.pair_s,
        }

    @classmethod
    def from_dict(cls, record: object) -> CostTable:
        """Raises ValueError for anything that `to_dict` would not have written."""
        if not isinstance(record, dict) or not isinstance(record.get("rows"), dict):
            raise ValueError("not a cost table")
        rows = {int(size): row for size, row in record["rows"].items()}
        context_s, pair_s = record.get("context_s"), record.get("pair_s")
        if not rows or min(rows) < 1 or not _is_cost(context_s) or not _is_cost(pair_s):
            raise ValueError("not a cost table")
        for row in rows.values():
            if not isinstance(row, list) or not 2 <= len(row) <= 1 << 16:
                raise ValueError("not a row of costs")
            if not all(map(_is_cost, row)):
                raise ValueError("not a cost")
        return cls(rows, measured=True, context_s=float(context_s), pair_s=float(pair_s))


@dataclass(slots=True)
class Costs:
    """All that is known about time. What an engine does around a pass counts with the pass."""

    verify: CostTable  # its speed is the machine's
    drafts: dict[str, CostTable] = field(default_factory=dict)  # by proposer, at speed 1
    other_s: dict[int, float] = field(default_factory=dict)  # a step's rest, by batch bucket
    # By batch bucket: seconds of the latest plain steps over the table's uncorrected ones.
    plain_clock: dict[int, float] = field(default_factory=dict)
    read_s: dict[str, float] = field(default_factory=dict)  # a drafter reads a token, at speed 1
    first: dict[str, int] = field(default_factory=dict)  # drafts that a checkpoint recommends
    # By proposer: drafts of a short text before any request, if all of them were refused.
    refused: dict[str, int] = field(default_factory=dict)

    @classmethod
    def guess(cls) -> Costs:
        # A millisecond, like any other time: the first step sets the speed.
        row = [1e-3 * (1 + GUESS * n) for n in range(65)]
        return cls(CostTable({1: row}, measured=False))

    def clock_plain(self, batch: int, share: float) -> None:
        """Plain steps took `share` of what the table had at first. Too long a clock would make
        drafts look better than they are: a longer one is believed step by step."""
        before = self.plain_clock.get(batch, share if self.verify.is_guess else self.verify.speed)
        self.plain_clock[batch] = min(share, (1.0 + MAX_ERROR) * before)

    def draft(self, proposer: str) -> CostTable:
        """The table of a proposer; a new one's is a guess from the target's pass."""
        table = self.drafts.get(proposer)
        if table is None:
            step = GUESS * self.verify.row(0, 1)[1]
            table = CostTable({1: [step * k for k in range(17)]}, measured=False)
            self.drafts[proposer] = table
        return table

    def draft_s(self, proposer: str, batch: int, num_drafts: int) -> float:
        """Drafting for a batch of this bucket, at the machine's present speed."""
        return self.verify.speed * self.draft(proposer).seconds(batch, num_drafts)

    def learn_draft(
        self, proposer: str, batch: int, num_drafts: int, seconds: float, num_steps: int = 1
    ) -> None:
        table = self.draft(proposer)
        table.learn(batch, num_drafts, seconds / self.verify.speed, num_steps, speed=False)

    def reading_s(self, proposer: str, num_readers: int = 1) -> float:
        """Seconds in which a drafter reads a token: as measured, or at most as to draft one."""
        read_s = self.read_s.get(proposer)
        if read_s is None:
            return self.draft_s(proposer, batch_bucket(num_readers), 1) / num_readers
        return self.verify.speed * read_s

    def learn_reading(self, proposer: str, seconds: float, num_readers: int = 1) -> None:
        """A drafter read a token in `seconds`."""
        most_s = self.draft_s(proposer, batch_bucket(num_readers), 1) / num_readers
        now = min(max(0.0, seconds), most_s) / self.verify.speed
        self.read_s[proposer] = (now + self.read_s.get(proposer, now)) / 2

    def to_dict(self) -> dict[str, object]:
        drafts = {name: table.to_dict() for name, table in self.drafts.items()}
        return {"verify": self.verify.to_dict(), "drafts": drafts, "refused": self.refused}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Costs:
        """Raises ValueError for anything that `to_dict` would not have written."""
        drafts, refused = record.get("drafts"), record.get("refused")
        if not isinstance(drafts, dict) or not isinstance(refused, dict):
            raise ValueError("no draft tables")
        if not all(isinstance(num, int) and 0 <= num < 1000 for num in refused.values()):
            raise ValueError("not a number of drafts")
        tables = {str(name): CostTable.from_dict(found) for name, found in drafts.items()}
        return cls(CostTable.from_dict(record.get("verify")), tables, refused=refused)


def verify_table(
    points: Mapping[int, Mapping[int, float]],
    batches: Mapping[int, Mapping[int, float]] | None = None,
) -> CostTable:
    """A table from measured seconds: `points[context][tokens]` of one sequence, and
    `batches[num_sequences][tokens]` with `USUAL_CONTEXT` tokens each."""
    contexts = sorted(points)
    context_s = pair_s = 0.0
    if len(contexts) > 1:
        short, long = (points[context] for context in (contexts[0], contexts[-1]))
        distance = contexts[-1] - contexts[0]
        context_s = max(0.0, long[1] - short[1]) / distance
        wide = max(n for n in long if n in short)
        if wide > 1:
            more = (long[wide] - short[wide]) / distance - context_s
            pair_s = max(0.0, more) / (wide - 1)
    more_s = USUAL_CONTEXT - contexts[0]
    row = [
        cell + more_s * (context_s + pair_s * max(0, n - 1))
        for n, cell in enumerate(interpolate(points[contexts[0]]))
    ]
    each = [
        (seconds - row[n]) / (size - 1)
        for size, found in (batches or {}).items()
        for n, seconds in found.items()
        if n < len(row)
    ]
    each_s = max(0.0, median(each)) if each else 0.0
    rows = {1: row, 2: [cell + each_s for cell in row]}
    return CostTable(rows, measured=True, context_s=context_s, pair_s=pair_s)


def draft_table(points: Mapping[int, Mapping[int, float]], most: int) -> CostTable:
    """A table from measured seconds, `points[num_sequences][K]`; no drafts cost nothing."""
    rows = {
        size: rising([0.0] + [between(seconds, k) for k in range(1, most + 1)])
        for size, seconds in points.items()
    }
    return CostTable(rows, measured=True)


def interpolate(points: Mapping[int, float]) -> list[float]:
    """Cells 0..max from measured counts, never falling: a wider pass does not cost less."""
    counts = sorted(points)
    known = dict(zip(counts, rising([points[n] for n in counts]), strict=True))
    return [between(known, n) for n in range(counts[-1] + 1)]


def rising(values: Sequence[float], weights: Iterable[float] | None = None) -> list[float]:
    """The nearest values that never fall: neighbours that do become their weighted mean."""
    pools: list[tuple[float, float, int]] = []  # (weighted sum, weight, how many)
    for value, weight in zip(values, weights or [1.0] * len(values), strict=True):
        total, mass, size = value * weight, weight, 1
        while pools and pools[-1][0] * mass > total * pools[-1][1]:
            more, heavier, number = pools.pop()
            total, mass, size = total + more, mass + heavier, size + number
        pools.append((total, mass, size))
    return [total / mass for total, mass, size in pools for _ in range(size)]


def between(points: Mapping[int, float], x: float) -> float:
    """Piecewise linear; constant before the first point, and beyond the last one never falling."""
    known = sorted(points)
    if len(known) == 1 or x <= known[0]:
        return points[known[0]]
    left, right = next((pair for pair in pairwise(known) if x <= pair[1]), (known[-2], known[-1]))
    slope = (points[right] - points[left]) / (right - left)
    if x > right:
        return points[right] + max(0.0, slope) * (x - right)
    return points[left] + slope * (x - left)


def _longer(row: list[float], most: int) -> list[float]:
    """The row to `most` at least: the slope of its second half goes on."""
    if len(row) > most:
        return row
    last, middle = len(row) - 1, len(row) // 2
    slope = max(0.0, (row[last] - row[middle]) / (last - middle)) if middle < last else 0.0
    return row + [row[last] + slope * i for i in range(1, most + 1 - last)]


def _is_cost(value: object) -> TypeGuard[float]:
    return isinstance(value, float | int) and 0 <= value < 1e6
