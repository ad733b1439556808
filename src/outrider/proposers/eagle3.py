"""EAGLE-3 (Li et al. 2025): a small decoder goes on from the target's own hidden states.

How rows are computed is in `_eagle_rows`; here chains and trees grow from their logits.

Shapes: B sequences, R rows of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
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
from outrider.model.heads import Eagle3Head, FastHead, TakesWeights
from outrider.proposers._autoregressive import Chains
from outrider.proposers._eagle_rows import Draft, EagleRows
from outrider.proposers._feature_heads import FastHeadProposer, NativeRows
from outrider.proposers._heads import Loaded, load_fitting_head, native_rows, reader
from outrider.proposers.options import read_options
from outrider.proposers.trees import ROOT, BestFirst, add_children, check_limits, submit
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
        late = self.reads_taps
        self.needs = Needs(taps=loaded.head.taps, every_step=not late, late_states=late)
        self._loaded = loaded
        self._rows = EagleRows(loaded, self._memories)
        self._make_native: Callable[[Loaded[Eagle3Head]], NativeRows[FastHead] | None]
        self._make_native = lambda loaded: None
        self._limits = TreeLimits(self.config.passes, self.config.width, children)

    @classmethod
    def build(cls, context: ProposerContext) -> Eagle3Proposer:
        config = read_options(Eagle3Config, cls.name, context.options)
        loaded = load_fitting_head(Eagle3Head, context, config.head, cls.kind)

        def make_native(head: Loaded[Eagle3Head]) -> NativeRows[FastHead] | None:
            return native_rows(head, context, config.weights, reader(head))

        proposer = cls(loaded, config, make_native(loaded))
        proposer._make_native = make_native
        return proposer

    @property
    def recommended(self) -> int | None:
        """See `contracts.Recommends`."""
        return self._loaded.recommended

    @property
    def model(self) -> CudaEagle3 | None:
        """See `contracts.HasModel`."""
        return self.device_head

    @property
    def loaded(self) -> Loaded[Eagle3Head]:
        """The torch module and what it borrows of the target. Read-only."""
        return self._loaded

    @property
    def can_learn(self) -> bool:
        """Whether its head is EAGLE-3 as in the paper and its weights can be replaced."""
        return self.device_head is None and self._loaded.head.is_plain

    def replace_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `contracts.ReplacesWeights`. Rows in the caches stay: new rows attend to them."""
        if self.device_head is not None:
            raise ConfigError("the weights of a head on our GPU kernels cannot be replaced")
        self._loaded.head.load_state_dict(weights)
        if self._native is not None:
            head = self._native.head
            assert isinstance(head, TakesWeights)
            head.take_weights(self._loaded.head)

    def twin(self) -> Eagle3Proposer:
        """Another one with weights and caches of its own; what it borrows is shared."""
        loaded = dataclasses.replace(self._loaded, head=copy.deepcopy(self._loaded.head))
        twin = Eagle3Proposer(loaded, self.config, self._make_native(loaded))
        twin.name, twin._make_native = self.name, self._make_native
        return twin

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
        """Chains where our GPU kernels run; chains or trees on the native engine."""
        return self.plan_beside(views, list(budgets), max_steps) or Propose()

    @property
    def reads_taps(self) -> bool:
        """Whether native steps can note what the head reads."""
        return self.device_head is None and self._native is not None and self._native.reads_taps

    def plan_beside(
        self,
        views: Seq[SequenceView],
        num_tokens: list[int],
        max_steps: int,
        max_found: Seq[int] | None = None,
    ) -> Chain | None:
        """The plan, beside a look-up of at most `max_found` tokens; None: `propose` drafts."""
        rows = self._native
        is_ready = all(self._is_native(view) and self._knows_natively(view) for view in views)
        if rows is None or not is_ready or not (self.device_head or rows.reads_taps):
            return None
        most = max(num_tokens) if self.trees else self._num_scribbled + 1
        num_tokens = [min(k, most) for k in num_tokens]
        longest = max(*num_tokens, *(max_found or ()), 0)
        furthest = max_steps * (longest + 1) + max(longest, self._num_scribbled)
        if not all(rows.reserve(view, furthest) for view in views):
            return None
        if self.device_head is not None:
            return Chain(self.name, self.device_head, rows.kv, rows.lay_out(views), num_tokens)
        features_nF = rows.unread(views)
        tree = self._limits if self.trees else None
        return Chain(self.name, rows.head, rows.kv, rows.lay_out(views), num_tokens,
                     taps=self._taps, features_nF=features_nF, tree=tree)  # fmt: skip

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
        views = [draft.view for draft in drafts]
        row_of: list[dict[int, int]] = [{ROOT: 0} for _ in drafts]
        nodes = [[ROOT] for _ in drafts]
        while True:
            add_children(views, growths, nodes, logits_RV, self._limits.children)
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
