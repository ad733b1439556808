"""EAGLE-3 (Li et al. 2025): a small decoder goes on from the target's own hidden states.

How rows are computed is in `_eagle_rows`; here chains and trees grow from their logits.

Shapes: B sequences, R rows of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.contracts import (
    Draw,
    IntArray,
    Needs,
    Proposal,
    ProposerContext,
    SequenceView,
    StepBatch,
)
from outrider.draft_plans import Chain, DraftPlan, Propose
from outrider.errors import ConfigError
from outrider.model.capabilities import DraftsInOneCall, TreeLimits
from outrider.model.heads import Eagle3Head, FastHead
from outrider.proposers._autoregressive import Chains, draft_key
from outrider.proposers._eagle_rows import Draft, EagleRows
from outrider.proposers._feature_heads import FastHeadProposer, NativeRows
from outrider.proposers._heads import Loaded, load_fitting_head, native_rows, reader
from outrider.proposers.options import read_options
from outrider.proposers.trees import (
    ROOT,
    BestFirst,
    best_children,
    check_limits,
    path_tokens,
    submit,
)
from outrider.sampling import RowParams

if TYPE_CHECKING:
    from outrider.model.cuda_eagle3 import CudaEagle3

_CHILDREN = 4  # of a tree's nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The tree is at most `passes` tokens deep, with a pass of the head for each level. A pass
    expands `width` nodes and considers `children` tokens after each of them. `children` 1 makes a
    chain, for rules without trees; on our GPU kernels, all drafts are chains, in one graph. `head`
    is the folder of the head, if it is not the draft model."""

    passes: int = 4
    width: int = 2
    children: int | None = None  # None: 4, and 1 where our GPU kernels run
    head: str | None = None
    weights: str | None = None  # of the head; None: int8 where no torch module runs it

    def __post_init__(self) -> None:
        children = 1 if self.children is None else self.children
        check_limits("eagle3", self.passes, self.width, children)


class Eagle3Proposer(FastHeadProposer):
    """Drafts trees for sample-match, and chains for ratio rules."""

    name = "eagle3"
    kind = "eagle3"  # of the heads
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})

    def __init__(
        self,
        loaded: Loaded[Eagle3Head],
        config: Eagle3Config | None = None,
        native: NativeRows[FastHead] | None = None,
    ) -> None:
        super().__init__(loaded.head.taps, loaded.head.config.num_hidden_layers, native)
        self.config = config or Eagle3Config()
        head = native.head if native is not None else None
        on_device = head is not None and not head.trees
        self.device_head = cast("CudaEagle3", head) if on_device else None
        usual = _CHILDREN if self.device_head is None else 1
        children = usual if self.config.children is None else self.config.children
        if self.device_head is not None and children > 1:
            raise ConfigError(
                f"{self.name} drafts chains on this GPU: leave out children, or pass 1, "
                f"not {children}"
            )
        self.trees = children > 1
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._rows = EagleRows(loaded, self._memories)
        self._limits = TreeLimits(self.config.passes, self.config.width, children)

    @classmethod
    def build(cls, context: ProposerContext) -> Eagle3Proposer:
        config = read_options(Eagle3Config, cls.name, context.options)
        loaded = load_fitting_head(Eagle3Head, context, config.head, cls.kind)
        native = native_rows(loaded, context, config.weights, reader(loaded))
        return cls(loaded, config, native)

    @property
    def model(self) -> CudaEagle3 | None:
        """See `contracts.HasModel`."""
        return self.device_head

    @property
    def _num_scribbled(self) -> int:
        limits = self._limits
        return limits.passes * limits.width if self.trees else limits.passes

    def _call(
        self, batch: StepBatch, sizes_S: IntArray, rows: RowParams, key_S: npt.NDArray[np.uint64]
    ) -> list[tuple[list[int], list[int] | None]]:
        assert self._native is not None
        head = self._native.head
        if not self.trees:
            sizes_S = np.minimum(sizes_S, self._num_scribbled + 1).astype(np.int32)
            return [(chain, None) for chain in head.draft_chain(batch, sizes_S, rows, key_S)]
        assert isinstance(head, DraftsInOneCall)
        trees = head.draft_tree(batch, sizes_S, rows, key_S, self._limits)
        return [(tree.tokens, tree.parents) for tree in trees]

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        """Chains where our GPU kernels run."""
        is_ready = all(self._is_native(view) and self._knows_natively(view) for view in views)
        if self.device_head is None or self._native is None or not is_ready:
            return Propose()
        num_tokens = [min(k, self._num_scribbled + 1) for k in budgets]
        furthest = max_steps * (max(num_tokens) + 1) + max(num_tokens)
        if not all(self._native.reserve(view, furthest) for view in views):
            return Propose()
        catch_up = self._native.lay_out(views)
        return Chain(self.name, self.device_head, self._native.kv, catch_up, num_tokens)

    @torch.no_grad()
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        drafts, logits_BV = self._rows.read_on(views)
        for trees in (True, False):
            rows = [
                row
                for row, view in enumerate(views)
                if (self.trees and view.draw is Draw.COUPLED) is trees
            ]
            if rows:
                draw = self._draw_trees if trees else self._draw_chains
                some = [drafts[row] for row in rows]
                drawn = draw(some, [budgets[row] for row in rows], logits_BV[rows])
                for row, proposal in zip(rows, drawn, strict=True):
                    proposals[row] = proposal
        for draft in drafts:
            draft.close()
        return proposals

    def _draw_chains(
        self, drafts: list[Draft], budgets: list[int], logits_RV: Tensor
    ) -> list[Proposal]:
        chains = Chains([draft.view for draft in drafts], budgets, self._loaded.num_tokens)
        while True:
            chains.draw(logits_RV)
            if not chains.active:
                return chains.proposals(self.name)
            growing = [drafts[i] for i in chains.active]
            rows = [[(chains.tokens[i][-1], len(drafts[i].lines) - 1)] for i in chains.active]
            logits_RV = self._rows.feed(growing, rows)

    def _draw_trees(
        self, drafts: list[Draft], budgets: list[int], logits_RV: Tensor
    ) -> list[Proposal]:
        config = self.config
        growths = [
            BestFirst(
                budget,
                num_children=self._limits.children,
                max_depth=config.passes,
                width=config.width,
                finish_ids=draft.view.finish_ids,
            )
            for draft, budget in zip(drafts, budgets, strict=True)
        ]
        row_of: list[dict[int, int]] = [{ROOT: 0} for _ in drafts]
        nodes = [[ROOT] for _ in drafts]
        while True:
            self._add_children(drafts, growths, nodes, logits_RV)
            nodes = [growth.to_expand() for growth in growths]
            growing = [i for i, wanted in enumerate(nodes) if wanted]
            if not growing:
                return [submit(growth, Draw.COUPLED, self.name) for growth in growths]
            rows = []
            for i in growing:
                growth, end = growths[i], len(drafts[i].lines)
                rows.append(
                    [(growth.tokens[node], row_of[i][growth.parents[node]]) for node in nodes[i]]
                )
                row_of[i] |= {node: end + k for k, node in enumerate(nodes[i])}
            logits_RV = self._rows.feed([drafts[i] for i in growing], rows)

    def _add_children(
        self,
        drafts: list[Draft],
        growths: list[BestFirst],
        nodes: list[list[int]],
        logits_RV: Tensor,
    ) -> None:
        """Children for all `nodes` of all drafts, which `logits_RV` has the rows of, in order."""
        keys: list[int] = []
        for draft, growth, wanted in zip(drafts, growths, nodes, strict=True):
            for node in wanted:
                path = path_tokens(growth, node)
                if draft.view.edits is not None:
                    draft.view.edits.apply(logits_RV[len(keys)], draft.view.tokens, path)
                keys.append(draft_key(draft.view, len(path), 1 + node))
        rows = RowParams.of([draft.view.params for draft in drafts], list(map(len, nodes)))
        tokens, scores = best_children(logits_RV, rows, keys, self._limits.children)
        answers = zip(tokens, scores, strict=True)
        for growth, wanted in zip(growths, nodes, strict=True):
            for node in wanted:
                some, logs = next(answers)
                size = sum(log > -math.inf for log in logs)
                growth.add(node, some[:size], logs[:size])
