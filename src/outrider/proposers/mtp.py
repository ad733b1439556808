"""Multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next, MiMo, Ernie 4.5): a layer that comes
with the target, trained with it, drafts from its last hidden state.

The layer keeps its own rows of the text; drafts are written after them and dropped. What is
accepted is read again with the target's states. Where a checkpoint has several such layers, the
first one drafts all tokens. A tree is fed anew, whole, for each of its levels: a pass sees all rows
before it, so that those of other branches may not be there.

Shapes: R chains still growing or nodes to expand, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

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
from outrider.model.gemma_assistant import is_assistant
from outrider.model.head_kinds import head_kind
from outrider.model.mtp_layer import MtpLayer, load_mtp
from outrider.proposers._assistant import AssistantProposer
from outrider.proposers._autoregressive import Chains
from outrider.proposers._feature_heads import NativeRows
from outrider.proposers._heads import last_states
from outrider.proposers.options import read_options
from outrider.proposers.trees import ROOT, BestFirst, add_children, check_limits, submit
from outrider.sampling import true_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """`head` is a folder with an MTP layer, where it is neither in the target nor the draft model.
    `weights` of the layer; None: int8 where the target runs natively with instructions for it,
    else as stored.

    With `children` above 1 it drafts trees at most `passes` tokens deep: a pass expands `width`
    nodes and considers `children` tokens after each of them."""

    head: str | None = None
    weights: str | None = None
    passes: int = 4
    width: int = 2
    children: int = 1

    def __post_init__(self) -> None:
        check_limits("mtp", self.passes, self.width, self.children)


class MtpProposer:
    """Drafts chains, and trees for sample-match."""

    name = "mtp"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})

    def __init__(
        self,
        layer: MtpLayer,
        rows: NativeRows[MtpLayer],
        context: ProposerContext,
        config: MtpConfig,
    ) -> None:
        self.config = config
        self.trees = config.children > 1
        spec = context.target.spec
        self.recommended = layer.num_draft_tokens  # see `contracts.Recommends`
        self.needs = Needs(taps=(spec.num_layers,))
        self._num_tokens = spec.num_tokens
        self._layer = layer
        self._rows = rows

    @classmethod
    def build(cls, context: ProposerContext) -> MtpProposer | AssistantProposer:
        config = read_options(MtpConfig, cls.name, context.options)
        target, apart = context.target, _apart(config, context)
        if apart is not None and is_assistant(apart):
            return AssistantProposer(context, apart, cls.name)
        weights = config.weights or target.spec.draft_dtype or "auto"
        layer = load_mtp(target, find_folder(context.model), apart, weights)
        prepare = partial(last_states, layer.borrowed)
        taps = (target.spec.num_layers,)
        return cls(layer, NativeRows(layer, context.make_kv(layer), taps, prepare), context, config)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        known = [i for i, view in enumerate(views) if self._rows.knows(view)]
        if not known:
            return proposals
        for trees in (True, False):
            some = [i for i in known if (self.trees and views[i].draw is Draw.COUPLED) is trees]
            if some:
                kind = [views[i] for i in some], [budgets[i] for i in some]
                for i, proposal in zip(some, self._some(*kind, trees=trees), strict=True):
                    proposals[i] = proposal
        return proposals

    def _some(
        self, views: list[SequenceView], budgets: list[int], *, trees: bool
    ) -> list[Proposal]:
        """Trees or chains; empty for a view whose rows find no room."""
        proposals = [Proposal(source=self.name) for _ in views]
        num_fed = self.config.passes * self.config.width if trees else max(budgets) - 1
        members, batch = self._rows.read_on(views, num_fed)
        if members:
            draft = self._draft_trees if trees else self._draft
            drawn = draft([views[i] for i in members], [budgets[i] for i in members], batch)
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

    def _draft_trees(
        self, views: list[SequenceView], budgets: list[int], batch: StepBatch
    ) -> list[Proposal]:
        config = self.config
        growths = [
            BestFirst(
                budget,
                num_children=config.children,
                max_depth=config.passes,
                width=config.width,
                finish_ids=view.finish_ids,
            )
            for view, budget in zip(views, budgets, strict=True)
        ]
        trees = [Fed(growth) for growth in growths]
        nodes = [[ROOT] for _ in views]
        after_text, growing = batch, list(range(len(views)))
        while growing:
            states_RH, logits_RV = self._layer.run(batch)
            logits_RV = true_vocabulary(logits_RV, self._num_tokens)
            states = iter(states_RH)
            for i in growing:
                trees[i].states |= {node: next(states) for node in nodes[i]}
            some = [views[i] for i in growing], [growths[i] for i in growing]
            wanted = [nodes[i] for i in growing]
            add_children(*some, wanted, logits_RV, config.children)
            nodes = [growth.to_expand() for growth in growths]
            growing = [i for i, wanted in enumerate(nodes) if wanted]
            if growing:
                fed = [trees[i] for i in growing]
                for tree, i in zip(fed, growing, strict=True):
                    tree.nodes += nodes[i]
                self._layer.use(torch.stack([state for tree in fed for state in tree.read()]))
                batch = _whole_trees(after_text, growing, fed, [len(nodes[i]) for i in growing])
        return [submit(growth, Draw.COUPLED, self.name) for growth in growths]

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            self._rows.see(view, observation)

    def release(self, sequence_id: int) -> None:
        self._rows.release(sequence_id)


class Fed:
    """The expanded nodes of a tree, in their order, and what the layer made of each."""

    def __init__(self, growth: BestFirst) -> None:
        self.growth = growth
        self.nodes: list[int] = []
        self.states: dict[int, torch.Tensor] = {}  # [H], fed back to the children

    def read(self) -> list[torch.Tensor]:
        """What the row of each node reads: the state of its parent."""
        return [self.states[self.growth.parents[node]] for node in self.nodes]

    def lineage(self) -> list[int]:
        """The parent of each node among the nodes; -1: the text."""
        place = {ROOT: -1} | {node: i for i, node in enumerate(self.nodes)}
        return [place[self.growth.parents[node]] for node in self.nodes]


def _apart(config: MtpConfig, context: ProposerContext) -> Path | None:
    """The folder of an MTP layer that is not in the target's."""
    if config.head is not None:
        return find_folder(config.head)
    if context.drafter is None:
        return None
    folder = find_folder(context.drafter)
    return folder if head_kind(folder) == MtpProposer.name else None


def _whole_trees(
    batch: StepBatch, members: list[int], trees: list[Fed], num_wanted: list[int]
) -> StepBatch:
    """The pass over all nodes of the trees after a batch of text, with logits for the last ones."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    rows: list[int] = []
    starts = [0]
    for member, tree, wanted in zip(members, trees, num_wanted, strict=True):
        root = int(batch.positions_T[batch.starts_S1[member + 1] - 1])
        lineage, depths = tree.lineage(), {-1: 0}
        for index, parent in enumerate(lineage):
            depths[index] = depths[parent] + 1
            positions.append(root + depths[index])
        tokens += [tree.growth.tokens[node] for node in tree.nodes]
        parents += lineage
        starts.append(len(tokens))
        rows += range(len(tokens) - wanted, len(tokens))
    lengths = np.diff(batch.starts_S1)
    return StepBatch(
        tokens_T=np.array(tokens, np.int32),
        positions_T=np.array(positions, np.int32),
        starts_S1=np.array(starts, np.int32),
        context_S=(batch.context_S + lengths)[members].astype(np.int32),
        tables_SW=batch.tables_SW[members],
        logit_rows_R=np.array(rows, np.int32),
        parents_T=np.array(parents, np.int32),
    )


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
