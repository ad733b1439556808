"""Counts of speculation from step events, cheap enough to be always on.

*Acceptance length* is the mean number of emitted tokens of a step with drafts. It counts the
correction or bonus token: 1 means that no draft was accepted, K + 1 is the maximum.

The accepted length of a proposal determines the verdicts of its positions (in a tree the position
is the depth), so two histograms suffice: accepted lengths, and where a proposal was rejected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.events import StepEvent, StepReport, StepTiming


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@dataclass(slots=True)
class SpeculationStats:
    """Sums over steps. Ratios are 0 where nothing was counted."""

    num_steps: int = 0  # passes of the target, counted once for each sequence they advanced
    num_tokens: int = 0  # emitted
    num_proposals: int = 0  # steps with at least one draft
    num_proposal_tokens: int = 0  # emitted by those steps
    num_drafted: int = 0  # nodes
    num_accepted: int = 0
    accepted_lengths: list[int] = field(
        default_factory=list
    )  # [k]: proposals with k accepted nodes
    refused_after: list[int] = field(default_factory=list)  # [k]: k accepted and the next rejected
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0
    _timed: StepTiming | None = field(default=None, repr=False, compare=False)

    def add(self, event: StepEvent, timing: StepTiming | None = None) -> None:
        """Counts one sequence's step; the step's time once, however many events share it.

        A sequence's seconds are those of the whole steps it was part of: the time its client waits.
        """
        num_tokens = len(event.tokens)
        self.num_steps += 1
        self.num_tokens += num_tokens
        if event.draft_tokens:
            self._add_proposal(event, num_tokens)
        if timing is not None and timing is not self._timed:
            self._timed = timing
            self.draft_s += timing.draft_s
            self.verify_s += timing.verify_s
            self.other_s += timing.other_s

    def add_report(self, report: StepReport) -> None:
        """Counts a whole step, prefill included: figures of the engine, not of a request."""
        for event in report.events:
            self.add(event)
        self.draft_s += report.timing.draft_s
        self.verify_s += report.timing.verify_s
        self.other_s += report.timing.other_s

    def _add_proposal(self, event: StepEvent, num_tokens: int) -> None:
        path, parents, num_drafted = event.path, event.draft_parents, len(event.draft_tokens)
        length = len(path)
        self.num_proposals += 1
        self.num_proposal_tokens += num_tokens
        self.num_drafted += num_drafted
        self.num_accepted += length
        while len(self.accepted_lengths) <= max(length, _depth(num_drafted, parents)):
            self.accepted_lengths.append(0)
            self.refused_after.append(0)
        self.accepted_lengths[length] += 1
        # Rejected: the target drew its own token (the output did not end before) where a draft
        # was to be judged (the path did not end in a leaf).
        last = path[-1] if path else -1
        judged = last in parents if parents is not None else length < num_drafted
        if judged and num_tokens > length:
            self.refused_after[length] += 1

    def merge(self, other: SpeculationStats) -> None:
        """Adds the sums of `other`, which does not change."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_proposals += other.num_proposals
        self.num_proposal_tokens += other.num_proposal_tokens
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.accepted_lengths = _sum(self.accepted_lengths, other.accepted_lengths)
        self.refused_after = _sum(self.refused_after, other.refused_after)
        self.draft_s += other.draft_s
        self.verify_s += other.verify_s
        self.other_s += other.other_s

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a step with drafts, correction or bonus token included."""
        return _ratio(self.num_proposal_tokens, self.num_proposals)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens of a step, with or without drafts; plain decoding is 1 at any batch size."""
        return _ratio(self.num_tokens, self.num_steps)

    @property
    def acceptance_rate(self) -> float:
        """The share of drafted tokens that were accepted."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def conditional_acceptance(self) -> list[float]:
        """[i]: how often draft i + 1 was accepted if all drafts before it were."""
        return [
            _ratio(reached, reached + refused)
            for reached, refused in zip(self._reached(), self.refused_after, strict=False)
        ]

    @property
    def unconditional_acceptance(self) -> list[float]:
        """[i]: in which share of all proposals draft i + 1 was accepted."""
        return [_ratio(reached, self.num_proposals) for reached in self._reached()]

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    @property
    def tokens_per_s(self) -> float:
        return _ratio(self.num_tokens, self.total_s)

    def to_dict(self) -> dict[str, int | float | list[int] | list[float]]:
        """Plain numbers for JSON: the counts and every figure above."""
        return {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "num_proposals": self.num_proposals,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_pass": self.tokens_per_pass,
            "conditional_acceptance": self.conditional_acceptance,
            "unconditional_acceptance": self.unconditional_acceptance,
            "accepted_lengths": list(self.accepted_lengths),
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "other_s": self.other_s,
            "tokens_per_s": self.tokens_per_s,
        }

    def _reached(self) -> list[int]:
        """[i]: proposals with at least i + 1 accepted nodes."""
        counts: list[int] = []
        total = 0
        for count in reversed(self.accepted_lengths[1:]):
            total += count
            counts.append(total)
        return counts[::-1]


def _depth(num_drafted: int, parents: list[int] | None) -> int:
    if parents is None:
        return num_drafted
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def _sum(a: list[int], b: list[int]) -> list[int]:
    if len(a) < len(b):
        a, b = b, a
    return [x + y for x, y in zip(a, b, strict=False)] + a[len(b) :]
