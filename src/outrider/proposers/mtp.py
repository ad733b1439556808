"""Multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo, Ernie 4.5): a layer that comes
with the target, trained with it, drafts from its last hidden state.

The layer keeps its own rows of the text; drafts are written after them and dropped. What is
accepted is read again with the target's states. Where a checkpoint has several such layers, the
first one drafts all tokens.

Shapes: R chains still growing, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
    StepBatch,
)
from outrider.model.bundled import find_folder
from outrider.model.head_kinds import head_kind
from outrider.model.mtp_layer import MtpLayer, load_mtp
from outrider.proposers._autoregressive import Chains
from outrider.proposers._feature_heads import NativeRows
from outrider.proposers._heads import last_states
from outrider.proposers.options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """`head` is a folder with an MTP layer, where it is neither in the target nor the draft model.
    `weights` of the layer; None: int8 where the target runs natively with instructions for it,
    else as stored."""

    head: str | None = None
    weights: str | None = None


class MtpProposer:
    """Drafts chains."""

    name = "mtp"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False

    def __init__(
        self, layer: MtpLayer, rows: NativeRows[MtpLayer], context: ProposerContext
    ) -> None:
        spec = context.target.spec
        self.needs = Needs(taps=(spec.num_layers,))
        self._num_tokens = spec.num_tokens
        self._layer = layer
        self._rows = rows

    @classmethod
    def build(cls, context: ProposerContext) -> MtpProposer:
        config = read_options(MtpConfig, cls.name, context.options)
        target = context.target
        weights = config.weights or target.spec.draft_dtype or "auto"
        layer = load_mtp(target, find_folder(context.model), _apart(config, context), weights)
        prepare = partial(last_states, layer.borrowed)
        taps = (target.spec.num_layers,)
        return cls(layer, NativeRows(layer, context.make_kv(layer), taps, prepare), context)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        known = [i for i, view in enumerate(views) if self._rows.knows(view)]
        if not known:
            return proposals
        most = max(budgets[i] for i in known)
        some, batch = self._rows.read_on([views[i] for i in known], most - 1)
        members = [known[i] for i in some]
        if members:
            drawn = self._draft([views[i] for i in members], [budgets[i] for i in members], batch)
            for i, proposal in zip(members, drawn, strict=True):
                proposals[i] = proposal
        return proposals

    def _draft(
        self, views: list[SequenceView], budgets: list[int], batch: StepBatch
    ) -> list[Proposal]:
        chains = Chains(views, budgets, self._num_tokens)
        while True:
            states_RH, logits_RV = self._layer.run(batch)
            drawn = chains.active
            chains.draw(logits_RV)
            if not chains.active:
                return chains.proposals(self.name)
            rows = [drawn.index(i) for i in chains.active]
            self._layer.use(states_RH[rows])
            batch = _following(batch, rows, [chains.tokens[i][-1] for i in chains.active])

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            self._rows.see(view, observation)

    def release(self, sequence_id: int) -> None:
        self._rows.release(sequence_id)


def _apart(config: MtpConfig, context: ProposerContext) -> Path | None:
    """The folder of an MTP layer that is not in the target's."""
    if config.head is not None:
        return find_folder(config.head)
    if context.drafter is None:
        return None
    folder = find_folder(context.drafter)
    return folder if head_kind(folder) == MtpProposer.name else None


def _following(batch: StepBatch, rows: list[int], tokens: list[int]) -> StepBatch:
    """The pass over one more token of each of these sequences of a batch."""
    ends = batch.starts_S1[1:]
    lengths = np.diff(batch.starts_S1)
    count = len(rows)
    return StepBatch(
        tokens_T=np.array(tokens, np.int32),
        positions_T=batch.positions_T[ends - 1][rows] + np.int32(1),
        starts_S1=np.arange(count + 1, dtype=np.int32),
        context_S=(batch.context_S + lengths)[rows].astype(np.int32),
        tables_SW=batch.tables_SW[rows],
        logit_rows_R=np.arange(count, dtype=np.int32),
    )
