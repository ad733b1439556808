"""The target's first layers draft for all of them: no second model, no second KV.

Drafting runs layers 1..E of the target, then its norm and head, and writes their K/V into the
sequence's own lookahead slots. So there is no state besides the target's own, and a rejected draft
leaves nothing to undo.

If the model can (`capabilities.Continues`) drafting keeps the states after layer E too, feeding
the last draft for that alone, and the verifying pass goes on from there. If another sequence of the
batch needs the lower layers, it starts from the tokens and writes the same values to the same slots
again. Going on saves arithmetic, not memory traffic: D drafts read the lower layers' weights D + 1
times either way.

Good drafts need a target that was trained with early-exit losses, as the bundled one is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import (
    Begun,
    Draw,
    IntArray,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
    StepBatch,
    StepOutput,
)
from outrider.draft_plans import DraftPlan, EarlyExit
from outrider.errors import ConfigError
from outrider.kv.cache import KVCache
from outrider.layout import Slice
from outrider.model.capabilities import Continues, DraftsAndKeeps, DraftsChains
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers.options import read_options
from outrider.sampling import RowParams

_SHARE = 0.4  # of the target's layers, by default
_MAX_PENDING = 8  # tokens not computed yet; more are the end of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyExitConfig:
    """`exit_layer`: how many layers draft; None is two fifths of them."""

    exit_layer: int | None = None

    def resolved(self, num_layers: int) -> int:
        """The number of layers that draft for a target of `num_layers`; ConfigError if unfit."""
        if num_layers < 2:
            raise ConfigError(
                "proposer 'early-exit' needs a target of two layers or more; "
                "choose another proposer, such as 'ngram'"
            )
        layer = self.exit_layer
        if layer is None:
            return max(1, round(_SHARE * num_layers))
        if not isinstance(layer, int) or not 1 <= layer < num_layers:
            raise ConfigError(
                f"exit_layer of proposer 'early-exit' must be in 1..{num_layers - 1} "
                f"for this target, not {layer!r}"
            )
        return layer


class _LookaheadSlots:
    """`Memory` of a drafter without its own KV: the target's slots after the context."""

    def __init__(self, model: Model, kv: KVCache) -> None:
        self.model = model
        self._kv = kv

    def room(self, view: SequenceView) -> int:
        return self.model.spec.max_positions - len(view.tokens) + 1

    def catch_up(self, view: SequenceView, num_drafts: int) -> Slice | None:
        pending = view.tokens[view.num_computed :]
        # A prompt is left to the target alone: drafting would compute much of it twice.
        if len(pending) > _MAX_PENDING:
            return None
        # A slot for the last draft as well: it may be fed for its state.
        if not self._kv.reserve(view.id, len(view.tokens) + num_drafts + 1):
            return None
        return Slice(pending, view.num_computed, self._kv.table(view.id), Proposal())

    def drafted(self, view: SequenceView, tokens: list[int]) -> None:
        """Nothing to remember: the verifying pass writes these slots again."""


class _ExitDrafter(AutoregressiveDrafter):
    """Keeps the drafts' states after the first layers, for the pass that verifies them."""

    def __init__(self, memory: _LookaheadSlots, num_tokens: int, name: str, layer: int) -> None:
        super().__init__(memory, num_tokens, name, layer)
        self._layer = layer
        self._continues = isinstance(self._model, Continues) and self._model.continues
        self._kept: list[list[torch.Tensor]] = []  # by sequence, a row per token

    def _draft_at_once(
        self,
        model: DraftsChains,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[Proposal] | None:
        is_one_each = len(batch.tokens_T) == len(num_tokens_S)  # as while decoding
        if not (isinstance(model, DraftsAndKeeps) and is_one_each):
            return super()._draft_at_once(model, batch, num_tokens_S, rows, key_S)
        chains, states = model.draft_and_keep(batch, num_tokens_S, rows, key_S)
        return [
            Proposal(chain, draw=Draw.COUPLED, source=self._name, begun=Begun(self._layer, kept))
            for chain, kept in zip(chains, states, strict=True)
        ]

    def _draft_stepwise(
        self, views: list[SequenceView], budgets: list[int], slices: list[Slice]
    ) -> list[Proposal]:
        is_one_each = all(len(slice_.tokens) == 1 for slice_ in slices)
        self._kept = [[] for _ in views]
        proposals = super()._draft_stepwise(views, budgets, slices)
        if self._continues and is_one_each:
            last = [
                Slice([proposal.tokens[-1]], len(view.tokens) + len(proposal) - 1, s.table, None)
                for view, proposal, s in zip(views, proposals, slices, strict=True)
            ]
            self._notice(range(len(views)), self._model.forward(self._pack(last)))
            for proposal, rows in zip(proposals, self._kept, strict=True):
                proposal.begun = Begun(self._layer, torch.stack(rows))
        return proposals

    def _pack(self, slices: list[Slice]) -> StepBatch:
        batch = super()._pack(slices)
        if self._continues:
            batch.taps = (self._layer,)
        return batch

    def _notice(self, active: Seq[int], output: StepOutput) -> None:
        if self._continues:
            for i, row in zip(active, output.taps[self._layer], strict=False):
                self._kept[i].append(row)


class EarlyExitProposer:
    name = "early-exit"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs()

    def __init__(self, target: Model, kv: KVCache, exit_layer: int) -> None:
        self.exit_layer = exit_layer
        self._drafter = _ExitDrafter(
            _LookaheadSlots(target, kv), target.spec.num_tokens, self.name, exit_layer
        )

    @classmethod
    def build(cls, context: ProposerContext) -> EarlyExitProposer:
        config = read_options(EarlyExitConfig, cls.name, context.options)
        return cls(
            context.target, context.target_kv, config.resolved(context.target.spec.num_layers)
        )

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        """Nothing to do: the engine commits the slots."""

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        return EarlyExit(self.name, self.exit_layer, list(budgets))

    def release(self, sequence_id: int) -> None:
        """Nothing to forget."""
