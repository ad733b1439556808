"""What a model may be able to do besides `contracts.Model`: drafting in one call, and the like.

Callers check for these protocols once, when they are built: a protocol's check is slow.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from outrider.contracts import IntArray, StepBatch, StopRule

if TYPE_CHECKING:
    import torch

    from outrider.sampling import RowParams


class TreeLimits(NamedTuple):
    """Limits of a tree that grows best first.

    Each pass gives `children` children to the `width` best nodes that have none.
    """

    passes: int
    width: int
    children: int


class TreeDraft(NamedTuple):
    """A grown tree, and the tokens whose K/V growing it wrote after the context, with parents."""

    tokens: list[int]
    parents: list[int]
    fed_tokens: list[int]
    fed_parents: list[int]


@runtime_checkable
class DraftsChains(Protocol):
    """A model that may run a draft loop in one call."""

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]] | None:
        """See `DraftsInOneCall`; None: this draft needs one pass per token."""
        ...


@runtime_checkable
class DraftsInOneCall(Protocol):
    """A model that runs every draft loop in one call.

    Both methods forward `batch` (logits for each sequence's last token) and go on from there with
    the noise of `outrider.noise` under the *sequence* keys `key_S`, at absolute positions
    (temperature 0: none), and the filters of `rows`. The block tables already reach far enough.
    """

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """`num_tokens_S[s]` tokens for sequence s, drawn one by one and fed back."""
        ...

    def draft_tree(
        self,
        batch: StepBatch,
        num_nodes_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        limits: TreeLimits,
    ) -> list[TreeDraft]:
        """At most `num_nodes_S[s]` nodes for sequence s: the likeliest to be the target's draws."""
        ...


@runtime_checkable
class DraftsWithStopRules(Protocol):
    """A model that can end a chain by a `StopRule`."""

    def draft_with_stop_rules(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
        stop_rules: Seq[StopRule | None],
    ) -> tuple[list[list[int]], list[list[int]]]:
        """`DraftsInOneCall.draft_chain` with stop rules (None: this sequence has none).

        Returns the chains, of at most `num_tokens_S[s]` tokens, and the levels of all draws.
        """
        ...


@runtime_checkable
class PrefersThinPasses(Protocol):
    """A model that prepares (captures) each size of pass at its first use, up to a width."""

    def most_drafts(self, num_sequences: int) -> int:
        """The most drafts of each of `num_sequences` decoding sequences that a prepared pass holds.

        A wider pass takes many times as long.
        """
        ...

    def prepared(self) -> str:
        """A sentence about the prepared passes and what preparing them cost."""
        ...


@runtime_checkable
class KeepsStates(Protocol):
    """A model whose recurrent layers may keep states (`outrider.kv.states`)."""

    def has_state(self, slot: int) -> bool:
        """Whether a pass may start after the token in a physical slot without computing it again.

        Always true without recurrent layers.
        """
        ...


@runtime_checkable
class Continues(Protocol):
    """A model whose passes may start above the first layers (`StepBatch.begun`), if `continues`."""

    continues: bool


@runtime_checkable
class PacksLater(Protocol):
    """A model whose first passes take longer, because they read weights from their file."""

    def pack(self) -> None:
        """Does now what makes later passes fast."""
        ...


@runtime_checkable
class DraftsAndKeeps(Protocol):
    """A model that drafts in one call and returns states that later passes may continue from."""

    def draft_and_keep(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> tuple[list[list[int]], list[torch.Tensor]]:
        """`DraftsInOneCall.draft_chain`, and the states of `Begun` for each sequence.

        It feeds the last draft too, so block tables reach one slot further.
        """
        ...
