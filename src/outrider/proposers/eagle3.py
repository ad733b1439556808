"""EAGLE-3 (Li et al. 2025): one decoder layer goes on from the target's own hidden states.

Row i of the head reads the features of token i and the embedding of token i + 1 and guesses token
i + 2. When a draft begins, the target has computed every token but the last, so the rows of the
text end with the one that guesses the first draft. From there on a row's features are the head's
own output one row before. The keys and values of a draft's rows are dropped when it is done: what
is accepted comes back with the target's features, which are better.

Shapes: B sequences, R rows of a pass, n tokens, T taps, H hidden, W draft vocabulary, V vocabulary,
N heads, D head size, F rows drafted so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
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
from outrider.model.head_layers import KeyValue
from outrider.model.heads import Eagle3Head
from outrider.proposers._autoregressive import Chains, draft_key
from outrider.proposers._feature_heads import FeatureHeadProposer, NativeRows
from outrider.proposers._heads import Loaded, load_fitting_head, native_rows
from outrider.proposers.head_memory import HeadMemory, gather
from outrider.proposers.options import read_options
from outrider.proposers.trees import (
    ROOT,
    BestFirst,
    best_children,
    check_limits,
    path_tokens,
    submit,
)
from outrider.sampling import RowParams, true_vocabulary

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


class _Draft:
    """One sequence while it is drafted. Rows are numbered as they are fed; row 0 is the text's."""

    def __init__(self, view: SequenceView, memory: HeadMemory, state_H: Tensor) -> None:
        self.view = view
        self.memory = memory
        self.states = [state_H]  # of each row: what the next one reads
        self.lines: list[list[int]] = [[]]  # of each row: the drafted rows it sees, itself last
        self.num_committed = memory.layers[0].length

    def add(self, parent: int) -> int:
        """A row that continues row `parent`; returns its position in the text."""
        line = self.lines[parent]
        self.lines.append([*line, len(self.lines)])
        return len(self.view.tokens) - 1 + len(line)

    def mask(self, num_rows: int) -> Tensor | None:
        """What the last `num_rows` rows may not see, [rows, C] to be added; None: they see all."""
        lines = self.lines[-num_rows:]
        num_drafted = len(self.lines) - 1
        if all(len(line) == num_drafted for line in lines):
            return None
        mask = torch.full((num_rows, num_drafted), -math.inf)
        for row, line in enumerate(lines):
            mask[row, [i - 1 for i in line]] = 0.0
        return F.pad(mask, (self.num_committed, 0)).to(self.states[0])

    def close(self) -> None:
        self.memory.layers[0].length = self.num_committed


class Eagle3Proposer(FeatureHeadProposer):
    """Drafts trees for sample-match, and chains for ratio rules."""

    name = "eagle3"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})

    def __init__(
        self,
        loaded: Loaded[Eagle3Head],
        config: Eagle3Config | None = None,
        native: NativeRows | None = None,
    ) -> None:
        super().__init__(loaded.head.taps, 1, native)
        self.config = config or Eagle3Config()
        head = native.head if native is not None else None
        on_device = head is not None and not head.trees
        self.device_head = cast("CudaEagle3", head) if on_device else None
        usual = _CHILDREN if self.device_head is None else 1
        children = usual if self.config.children is None else self.config.children
        if self.device_head is not None and children > 1:
            raise ConfigError(
                f"eagle3 drafts chains on this GPU: leave out children, or pass 1, not {children}"
            )
        self.trees = children > 1
        self.needs = Needs(taps=loaded.head.taps)
        self._loaded = loaded
        self._head = loaded.head
        self._ids_W = loaded.head.target_ids
        self._limits = TreeLimits(self.config.passes, self.config.width, children)

    @classmethod
    def build(cls, context: ProposerContext) -> Eagle3Proposer:
        config = read_options(Eagle3Config, cls.name, context.options)
        loaded = load_fitting_head(Eagle3Head, context, config.head)
        return cls(loaded, config, native_rows(loaded, context, config.weights))

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
        drafts, logits_BV = self._read_on(views)
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

    def _read_on(self, views: list[SequenceView]) -> tuple[list[_Draft], Tensor]:
        """Feeds the features of tokens committed since the last draft; logits of the first drafts.

        Only the last row of each sequence goes through the whole layer.
        """
        taps: list[Tensor] = []
        following: list[int] = []
        positions: list[int] = []
        ends = [0]
        for view in views:
            taps_nTH, places = self._memories[view.id].take()
            taps.append(taps_nTH)
            following += view.tokens[places.start + 1 : places.stop + 1]
            positions += places
            ends.append(ends[-1] + len(places))
        hidden_1nH = self._head.fuse(torch.cat(taps)[None].to(self._head.fc.weight.dtype))
        inputs_1nX, cos_sin = self._inputs(following, hidden_1nH, positions)
        keys, values = self._head.attention.keys_values(inputs_1nX, cos_sin)
        last = [end - 1 for end in ends[1:]]
        cos_sin = (cos_sin[0][:, :, last], cos_sin[1][:, :, last])
        queries = self._head.attention.queries(inputs_1nX[:, last], cos_sin)
        mixed = []
        for i, view in enumerate(views):
            new = slice(ends[i], ends[i + 1])
            past = self._memories[view.id].layers[0].append((keys[:, :, new], values[:, :, new]))
            mixed.append(gather(queries[0, :, i : i + 1], past))
        states_1BH, logits_BV = self._answer(hidden_1nH[:, last], mixed)
        drafts = [
            _Draft(view, self._memories[view.id], state_H)
            for view, state_H in zip(views, states_1BH[0], strict=True)
        ]
        return drafts, logits_BV

    def _feed(self, drafts: list[_Draft], rows: list[list[tuple[int, int]]]) -> Tensor:
        """One pass over each draft's new rows, as (token, row it continues): logits [R, V]."""
        tokens: list[int] = []
        positions: list[int] = []
        hidden: list[Tensor] = []
        for draft, new in zip(drafts, rows, strict=True):
            for token, parent in new:
                tokens.append(token)
                hidden.append(draft.states[parent])
                positions.append(draft.add(parent))
        hidden_1RH = torch.stack(hidden)[None]
        inputs_1RX, cos_sin = self._inputs(tokens, hidden_1RH, positions)
        keys, values = self._head.attention.keys_values(inputs_1RX, cos_sin)
        queries = self._head.attention.queries(inputs_1RX, cos_sin)
        mixed = []
        start = 0
        for draft, new in zip(drafts, rows, strict=True):
            own = slice(start, start + len(new))
            past = draft.memory.layers[0].append((keys[:, :, own], values[:, :, own]))
            mixed.append(gather(queries[0, :, own], past, draft.mask(len(new))))
            start = own.stop
        states_1RH, logits_RV = self._answer(hidden_1RH, mixed)
        states = iter(states_1RH[0])
        for draft, new in zip(drafts, rows, strict=True):
            draft.states += [next(states) for _ in new]
        return logits_RV

    def _inputs(
        self, tokens: list[int], hidden_1RH: Tensor, positions: list[int]
    ) -> tuple[Tensor, KeyValue]:
        embeds_1RH = self._loaded.borrowed.embed(tokens)[None]
        positions_1R = torch.tensor(positions, device=hidden_1RH.device)[None]
        return self._head.inputs(embeds_1RH, hidden_1RH), self._head.rotary(positions_1R)

    def _answer(self, hidden_1RH: Tensor, mixed: list[Tensor]) -> tuple[Tensor, Tensor]:
        """States to feed back, and logits over the target's ids: impossible where it has none."""
        mixed_NRD = mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=1)
        states_1RH = self._head.state(hidden_1RH, mixed_NRD[None])
        logits_RW = self._head.logits(states_1RH)[0].float()
        logits_RV = logits_RW.new_full((len(logits_RW), self._head.config.vocab_size), -math.inf)
        logits_RV.index_copy_(1, self._ids_W, logits_RW)
        return states_1RH, true_vocabulary(logits_RV, self._loaded.num_tokens)

    def _draw_chains(
        self, drafts: list[_Draft], budgets: list[int], logits_RV: Tensor
    ) -> list[Proposal]:
        chains = Chains([draft.view for draft in drafts], budgets, self._loaded.num_tokens)
        while True:
            chains.draw(logits_RV)
            if not chains.active:
                return chains.proposals(self.name)
            growing = [drafts[i] for i in chains.active]
            rows = [[(chains.tokens[i][-1], len(drafts[i].lines) - 1)] for i in chains.active]
            logits_RV = self._feed(growing, rows)

    def _draw_trees(
        self, drafts: list[_Draft], budgets: list[int], logits_RV: Tensor
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
            logits_RV = self._feed([drafts[i] for i in growing], rows)

    def _add_children(
        self,
        drafts: list[_Draft],
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
