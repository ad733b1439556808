"""How an executor can draft without calling the proposer, as data.

A proposer may have a method

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan

for sequences that decode, at most `budgets[i] > 0` nodes a step for `views[i]`, for `max_steps`
steps at most. Lists in a plan have one entry for each view. An executor that knows the plan runs
several steps without coming back, `observe` gets each, and `Proposal.drafted` says there what
`propose` would have known. Without `plan`, and for `Propose()`, each step calls `propose`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.contracts import OwnsKV, SequenceView, StepBatch, StopRule

if TYPE_CHECKING:
    import torch

    from outrider.kv.cache import KVCache
    from outrider.model.capabilities import TreeLimits


@dataclass(frozen=True, slots=True)
class Propose:
    """The proposer drafts in `propose`, step by step."""


@dataclass(slots=True)
class Chain:
    """A model with KV of its own drafts token by token.

    A head also reads the target's states after the layers `taps` of every token, side by side;
    `features_nF` are those of the catch-up's tokens. Then `Drafted.states_nF` has those of each
    step's tokens, and the head has read all before.
    """

    source: str  # `Proposal.source` of what it drafts
    model: OwnsKV
    kv: KVCache  # of the model; slots for all steps are held, and the engine ends that
    catch_up: StepBatch  # a slice for each view: what the model reads before its first draft
    num_tokens: list[int]  # drafts of a step; 0: none
    max_emitted: Seq[int] | None = None  # tokens of a text until the model's positions end
    stop_rules: Seq[StopRule | None] | None = None
    taps: Seq[int] = ()
    features_nF: torch.Tensor | None = None
    tree: TreeLimits | None = None  # it drafts trees


@dataclass(slots=True)
class EarlyExit:
    """The target's own first layers draft."""

    source: str
    exit_layer: int
    num_tokens: list[int]


@dataclass(slots=True)
class Heads:
    """Medusa's heads draft from the target's last hidden state; see `proposers.medusa`."""

    source: str
    model: OwnsKV | object
    states_SH: torch.Tensor  # of each newest computed token
    children: int
    floor: float
    num_tokens: list[int]


@dataclass(slots=True)
class Lookup:
    """A look-up in the text drafts; if it finds nothing, another plan drafts."""

    source: str
    indexes: list[object]  # native.lookup.NativeLookup, up to date: the executor extends them
    max_found: list[int]  # nodes to ask for
    take: Seq[Seq[int]]  # [n]: nodes to take of n that were found; -k: ask `otherwise` for k
    otherwise: Chain | None = None


@dataclass(slots=True)
class Script:
    """Known tokens are the drafts; with `clock`, that plan drafts too, to measure its time."""

    source: str
    texts: list[list[int]]  # from the next token on
    num_right: Seq[Seq[int]]  # by place: drafts from there on that stay right
    num_tokens: list[int]
    copies: bool = False  # ends where the target leaves a text, or the text ends
    clock: DraftPlan | None = None


DraftPlan = Propose | Chain | EarlyExit | Heads | Lookup | Script


MakePlan = Callable[[Seq[SequenceView], Seq[int], int], DraftPlan]


def planner(proposer: object) -> MakePlan | None:
    """The proposer's `plan`, if it has one."""
    found: MakePlan | None = getattr(proposer, "plan", None)
    return found
