"""A draft model that drafts a tree: several children if it is unsure, depth if it is not.

Children of a node are the k largest of log q + Gumbel noise. With the *target's* noise at that
position (coupled) they are in the order of their chance to be the target's draw. With noise of
their own they are samples without replacement, which the tree ratio rule requires. At temperature 0
they are the k most probable tokens.

The tree grows level by level, one pass of the drafter each. A pass cannot attend to only a part of
the K/V of an earlier pass, so the whole tree is fed again from its first branch. These few tokens
hardly lengthen the pass.

Shape legend: R rows of a pass (the nodes it expands), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

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
from outrider.layout import Slice, pack
from outrider.model.capabilities import DraftsInOneCall, TreeLimits
from outrider.proposers._autoregressive import draft_key, target_keys
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers.draft_model import DraftModelProposer
from outrider.proposers.options import read_options
from outrider.proposers.trees import (
    ROOT,
    BestFirst,
    FixedShape,
    Growth,
    best_children,
    check_limits,
    path_tokens,
    submit,
)
from outrider.sampling import RowParams, distribution_of, true_vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTreeConfig:
    """The tree is at most `passes` tokens deep, with a pass of the drafter for each level. A pass
    expands `width` nodes and considers `children` tokens after each of them."""

    passes: int = 6
    width: int = 4
    children: int = 4

    def __post_init__(self) -> None:
        check_limits("draft-tree", self.passes, self.width, self.children)


class _Tree:
    """One sequence's tree while it grows. Nodes are fed in the order in which they are expanded."""

    def __init__(self, view: SequenceView, growth: Growth, first: Slice) -> None:
        self.view = view
        self.growth = growth
        self.nodes: list[int] = []  # to expand in this pass
        self.tokens: list[int] = []  # fed, and their parents among the fed
        self.parents: list[int] = []
        self.dists: list[torch.Tensor] = []  # q of every node, where a rule needs it
        self._slice = first
        self._fed_as: dict[int, int] = {ROOT: -1}  # node -> its index among the fed

    def next_pass(self) -> Slice | None:
        """The next tokens to feed; their last rows belong to `nodes`. None: the tree is done."""
        self.nodes = self.growth.to_expand()
        if not self.nodes:
            return None
        if self.nodes == [ROOT]:
            return self._slice
        for node in self.nodes:
            self._fed_as[node] = len(self.tokens)
            self.tokens.append(self.growth.tokens[node])
            self.parents.append(self._fed_as[self.growth.parents[node]])
        # The trunk: nodes that all later ones descend from are context like the committed text.
        trunk = 0
        while trunk < len(self.tokens) and self.parents[trunk] == trunk - 1:
            trunk += 1
        last = min([trunk - 1, *self.parents[trunk:]])
        first = [self.view.tokens[-1]] if last < 0 else [self.tokens[last]]
        rest = Proposal(self.tokens[last + 1 :])
        if rest.tokens:
            rest.parents = [parent - last - 1 for parent in self.parents[last + 1 :]]
        return Slice(first, len(self.view.tokens) + last, self._slice.table, rest)

    def proposal(self, source: str) -> Proposal:
        return submit(self.growth, self.view.draw, source, self.dists)


class DraftTreeProposer:
    name = "draft-tree"
    draws = frozenset({Draw.COUPLED, Draw.WITHOUT_REPLACEMENT})
    trees = True
    needs = Needs()

    def __init__(
        self, memory: DraftMemory, num_tokens: int, config: DraftTreeConfig | None = None
    ) -> None:
        """`num_tokens`: the size of the target's true vocabulary, over which q is defined."""
        self.config = config or DraftTreeConfig()
        self._memory = memory
        self._num_tokens = num_tokens

    @classmethod
    def build(cls, context: ProposerContext) -> DraftTreeProposer:
        config = read_options(DraftTreeConfig, cls.name, context.options)
        chains = context.proposer(DraftModelProposer.name)
        assert isinstance(chains, DraftModelProposer)
        return cls(chains.memory, context.target.spec.num_tokens, config)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        if isinstance(self._memory.model, DraftsInOneCall) and all(
            view.draw is Draw.COUPLED and view.edits is None for view in views
        ):
            return self._grow_in_one_call(self._memory.model, views, budgets)
        trees = [self._plant(view, budget) for view, budget in zip(views, budgets, strict=True)]
        growing = [tree for tree in trees if tree is not None]
        for _ in range(self.config.passes):
            passes = [(tree, tree.next_pass()) for tree in growing]
            growing = [tree for tree, slice_ in passes if slice_ is not None]
            if not growing:
                break
            slices = [slice_ for _, slice_ in passes if slice_ is not None]
            self._expand(growing, _pack(growing, slices))
        for tree in trees:
            if tree is not None:
                self._memory.drafted(tree.view, tree.tokens, tree.parents)
        return [
            tree.proposal(self.name) if tree is not None else Proposal(source=self.name)
            for tree in trees
        ]

    def _grow_in_one_call(
        self, model: DraftsInOneCall, views: Seq[SequenceView], budgets: Seq[int]
    ) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        config = self.config
        rooms = [min(config.passes, self._memory.room(view)) for view in views]
        # One limit for all that have any room: the native call grows them in step.
        passes = min([room for room in rooms if room > 0], default=0)
        limits = TreeLimits(passes, config.width, config.children)
        found: dict[int, Slice] = {}
        for i, view in enumerate(views):
            if rooms[i] > 0:
                slice_ = self._memory.catch_up(view, (passes - 1) * config.width)
                if slice_ is not None:
                    found[i] = slice_
        if not found:
            return proposals
        members = list(found)
        some = [views[i] for i in members]
        trees = model.draft_tree(
            pack(list(found.values())),
            np.array([budgets[i] for i in members], np.int32),
            RowParams.of([view.params for view in some], [1] * len(some)),
            target_keys(some),
            limits,
        )
        for i, view, tree in zip(members, some, trees, strict=True):
            self._memory.drafted(view, tree.fed_tokens, tree.fed_parents)
            proposals[i] = Proposal(tree.tokens, tree.parents, draw=Draw.COUPLED, source=self.name)
        return proposals

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view in views:
            self._memory.settle(view)

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)

    def _plant(self, view: SequenceView, budget: int) -> _Tree | None:
        config = self.config
        depth = min(config.passes, self._memory.room(view))
        if depth < 1:
            return None
        growth: Growth
        if view.draw is Draw.COUPLED:
            growth = BestFirst(
                budget,
                num_children=config.children,
                max_depth=depth,
                width=config.width,
                finish_ids=view.finish_ids,
            )
            num_fed = (depth - 1) * config.width
        else:
            growth = FixedShape(
                budget, num_children=config.children, max_depth=depth, finish_ids=view.finish_ids
            )
            num_fed = budget
        first = self._memory.catch_up(view, num_fed)
        return _Tree(view, growth, first) if first is not None else None

    def _expand(self, trees: list[_Tree], batch: StepBatch) -> None:
        """One pass: draws the children of every node that `trees` want to expand."""
        logits_RV = self._memory.model.forward(batch).logits_RV
        logits_RV = true_vocabulary(logits_RV, self._num_tokens)
        wanted = [(tree, node) for tree in trees for node in tree.nodes]
        keys = []
        for row, (tree, node) in enumerate(wanted):
            path = path_tokens(tree.growth, node)
            if tree.view.edits is not None:
                tree.view.edits.apply(logits_RV[row], tree.view.tokens, path)
            keys.append(draft_key(tree.view, len(path), 1 + node))
        rows = RowParams.of([tree.view.params for tree in trees], [len(t.nodes) for t in trees])
        tokens_RC, scores_RC = best_children(logits_RV, rows, keys, self.config.children)
        dist_RV = None
        if any(tree.view.draw is Draw.WITHOUT_REPLACEMENT for tree in trees):
            dist_RV = distribution_of(logits_RV, rows)
        for row, (tree, node) in enumerate(wanted):
            size = tree.growth.num_children(node)
            tokens, scores = tokens_RC[row][:size], scores_RC[row][:size]
            if dist_RV is not None and tree.view.draw is Draw.WITHOUT_REPLACEMENT:
                size = int((dist_RV[row, tokens] > 0).sum())
                tree.dists += [dist_RV[row]] * size
            else:
                size = sum(score > -math.inf for score in scores)
            tree.growth.add(node, tokens[:size], scores[:size])


def _pack(trees: list[_Tree], slices: list[Slice]) -> StepBatch:
    """One pass, with logits for the nodes to expand only: the last rows of each slice."""
    batch = pack(slices)
    wanted: list[int] = []
    end = 0
    for tree, slice_ in zip(trees, slices, strict=True):
        end += 1 + len(slice_.proposal or ())
        wanted += range(end - len(tree.nodes), end)
    batch.logit_rows_R = batch.logit_rows_R[wanted]
    return batch
