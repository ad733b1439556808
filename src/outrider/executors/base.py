"""Input and output of an executor: one batch, and one result for each step that it ran."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from outrider.contracts import ControlledView, Proposal, Proposer, Verdict, Verifier
from outrider.errors import EngineError
from outrider.events import TokenLogprob
from outrider.kv.cache import KVCache

if TYPE_CHECKING:
    import torch

    from outrider.grammar import Matcher
    from outrider.sampling import RowDistributions


class RunningSequence(ControlledView, Protocol):
    """What an executor sees of a sequence."""

    request_id: str
    verifier: str  # name of the rule
    max_draft_tokens: int
    matcher: Matcher | None  # of its grammar
    prompt_logprobs: list[TokenLogprob]

    @property
    def num_pending(self) -> int:
        """Committed tokens that the target has not computed; 1 while decoding."""
        ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted."""
        ...


logger = logging.getLogger(__name__)

S_co = TypeVar("S_co", bound=RunningSequence, covariant=True)


@dataclass(slots=True)
class Line(Generic[S_co]):
    """One sequence's share of a step: `num_tokens` pending tokens from index `start` on."""

    sequence: S_co
    start: int
    num_tokens: int
    is_last_chunk: bool  # reaches the end of what is known: logits are wanted, drafts are possible
    draft_limit: int = 0  # nodes

    @classmethod
    def of(cls, sequence: S_co, num_tokens: int) -> Line[S_co]:  # type: ignore[misc]
        is_last = num_tokens == sequence.num_pending
        return cls(sequence, sequence.num_computed, num_tokens, is_last)


@dataclass(slots=True)
class StepPlan:
    """The batch of a step, prompts and decoding sequences alike."""

    lines: Seq[Line[RunningSequence]]
    budgets: list[int]  # nodes to draft, for each line that reaches the end of its text
    max_positions: int  # of a text
    interrupt: ctypes.c_int32  # not 0: another thread wants no further step
    # Proposers that raised; their drafts are left out.
    broken: set[str] = field(default_factory=set)
    _held: list[tuple[KVCache, int]] = field(default_factory=list)

    def note_broken(self, name: str) -> None:
        """Inside an `except` block: a proposer raised, and its drafts are left out."""
        logger.exception("proposer %s failed; its sequences go on without drafts", name)
        self.broken.add(name)

    @property
    def ends(self) -> list[Line[RunningSequence]]:
        """The lines that reach the end of their texts."""
        return [line for line in self.lines if line.is_last_chunk]

    def needs_draws_only(self, verifiers: Mapping[str, Verifier]) -> bool:
        """Whether all decode and the target's draws decide alone: steps may follow one another."""
        for line in self.lines:
            s = line.sequence
            if (
                line.num_tokens != 1
                or not line.is_last_chunk
                or s.edits is not None
                or s.params.logprobs is not None
                or s.params.stop
                or s.scores_prompt
                or not verifiers[s.verifier].needs_draws_alone
            ):
                return False
        return True

    def num_left(self) -> list[int]:
        """Tokens that each sequence may still emit."""
        return [
            min(
                line.sequence.params.max_tokens - line.sequence.num_output_tokens,
                self.max_positions - len(line.sequence.tokens),
            )
            for line in self.lines
        ]

    def hold(self, kv: KVCache, sequence_id: int, num_slots: int) -> bool:
        """Holds KV slots for all steps of this batch until `let_go`; False: there are too few."""
        if not kv.hold(sequence_id, num_slots):
            return False
        self._held.append((kv, sequence_id))
        return True

    def holds(self, kv: KVCache, sequence_id: int) -> None:
        """Says that a plan holds slots, which `let_go` is to give back."""
        self._held.append((kv, sequence_id))

    def let_go(self) -> None:
        """No step follows: the next commit gives back what it does not need."""
        for kv, sequence_id in self._held:
            kv.hold(sequence_id, 0)
        self._held.clear()


@dataclass(slots=True)
class StepResult:
    """One step up to its verdicts. Lists have an entry for each line that reaches its end.

    The K/V of an accepted path lie where a chain's would.
    """

    proposals: list[Proposal]
    verdicts: list[Verdict]
    draft_s: float
    pass_s: float  # of the target, draws and verdicts included
    distributions: RowDistributions | None = None  # python executor only
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    failures: dict[str, EngineError] = field(default_factory=dict)  # by request id


class Executor(Protocol):
    """One way to run steps. All give the same tokens."""

    @property
    def name(self) -> str: ...

    def can_run(self, plan: StepPlan) -> bool:
        """Cheap; True is no promise."""
        ...

    def run(self, plan: StepPlan, max_steps: int, limit_s: float) -> list[StepResult]:
        """At most `max_steps` steps, one after another; none where it cannot run them now.

        It begins no further step after one in which a sequence ends, after `limit_s`, or when
        interrupted. The caller ends `plan` by `let_go`.
        """
        ...


def taps_for(proposers: Mapping[str, Proposer], sequences: Seq[RunningSequence]) -> tuple[int, ...]:
    """The hidden layers that these sequences' proposers read, ascending."""
    names = {s.proposer for s in sequences if s.proposer is not None and s.max_draft_tokens}
    return tuple(sorted({tap for name in names for tap in proposers[name].needs.taps}))


def by_proposer(sequences: Seq[RunningSequence]) -> dict[str, list[int]]:
    """The indices of the sequences that each proposer drafts for."""
    groups: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        if sequence.proposer is not None:
            groups.setdefault(sequence.proposer, []).append(i)
    return groups
