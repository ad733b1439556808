"""Staged drafting: a proposer drafts for a middle model, whose own output is the target's draft.

The middle model verifies the inner proposer's drafts by sample-match, so its output is exactly its
own draws, several per pass. Hence the stage is exact for every inner proposer, and stages nest:

    coupled       the middle model draws with the target's noise, like any coupled drafter
    ratio rules   it draws with noise of its own, fresh in every step, and q is its distribution

Whether it drafts one more token depends on the acceptance of the inner proposer's earlier drafts,
never on that token itself, as the ratio rules require.

The target's verdict is unknown while several passes are chained in one step. An inner proposer that
observed draws which the target then rejects must release the sequence; a draft model finds most of
its K/V again in its prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from outrider.contracts import (
    Draw,
    Edits,
    Needs,
    Observation,
    Proposal,
    Proposer,
    ProposerContext,
    SequenceView,
    StopRule,
    Stream,
    Verdict,
)
from outrider.errors import ConfigError
from outrider.layout import Slice, pack
from outrider.noise import draw_key
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers.ngram_index import up_to_finish
from outrider.proposers.options import read_options
from outrider.registry import WITH_MODEL, proposer_class
from outrider.sampling import RowDistributions
from outrider.verifiers import exact_pairing, make_verifier
from outrider.verifiers.coupled import match


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeConfig:
    """`mid`: the middle model; the bundled target has one. `proposer`: drafts for the middle model,
    with `options` (a cascade in a cascade has a middle model of its own). `num_draft_tokens`: of
    the inner proposer for one pass of the middle model. `passes`: limit of these passes in a step.
    """

    mid: str | None = None
    proposer: str = WITH_MODEL
    options: Mapping[str, object] = field(default_factory=dict)
    num_draft_tokens: int = 3
    passes: int = 2

    def __post_init__(self) -> None:
        if min(self.num_draft_tokens, self.passes) < 1:
            raise ConfigError(
                "cascade needs num_draft_tokens and passes of at least 1, "
                f"not {self.num_draft_tokens} and {self.passes}"
            )


class _Tentative:
    """The sequence for the inner proposer: committed tokens, then draws of the middle model.

    Satisfies SequenceView, with the middle model in the target's place.
    """

    def __init__(self, outer: SequenceView, draw: Draw) -> None:
        self.outer = outer
        self.draw = draw
        self.id = outer.id
        self.tokens = list(outer.tokens)
        self.num_prompt_tokens = outer.num_prompt_tokens
        self.num_computed = 0  # by the middle model
        self.params = outer.params
        self.seed, self.sample_index = outer.seed, outer.sample_index
        self.finish_ids = outer.finish_ids
        self.prediction = outer.prediction
        self.salt = outer.salt
        self.stop_rule: StopRule | None = None
        self.num_committed = len(self.tokens)
        self.num_observed = self.num_committed  # tokens that the inner proposer has observed
        self.untold: Observation | None = None
        self.dists: list[torch.Tensor] = []  # of the draws, where the outer rule needs them

    @property
    def edits(self) -> Edits | None:
        return None if self.outer.edits is None else self

    def apply(self, row_V: torch.Tensor, tokens: list[int], path: Seq[int]) -> None:
        """`Edits`: for the request's own edits, draws of the middle model are drafts."""
        assert self.outer.edits is not None
        self.outer.edits.apply(row_V, self.outer.tokens, [*tokens[self.num_committed :], *path])

    @property
    def drawn(self) -> list[int]:
        return self.tokens[self.num_committed :]

    def start_step(self) -> None:
        """Drops the distributions of the last step and sets this step's noise."""
        self.dists = []
        outer = self.outer
        if outer.draw is Draw.SAMPLED:
            # A new seed for every step: the inner proposer shares the middle model's noise as if
            # it were the target's, and no later step uses it again.
            self.sample_index = 0
            self.seed = draw_key(outer.seed, outer.sample_index, self.num_committed, Stream.DRAFT)

    def follow(self) -> bool:
        """Replaces draws by committed tokens; False if the inner proposer observed others."""
        tokens, committed = self.tokens, self.outer.tokens
        agreed = self.num_committed
        while agreed < min(len(tokens), len(committed)) and tokens[agreed] == committed[agreed]:
            agreed += 1
        tokens[agreed:] = committed[agreed:]
        self.num_committed = len(tokens)
        was_right, self.num_observed = self.num_observed <= agreed, len(tokens)
        return was_right


class CascadeProposer:
    name = "cascade"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs()

    def __init__(
        self, memory: DraftMemory, inner: Proposer, num_tokens: int, config: CascadeConfig
    ) -> None:
        """`memory` is the middle model's; `num_tokens` the target's true vocabulary."""
        self.config = config
        self.memory = memory
        self._inner = inner
        self._inner_draw = exact_pairing(inner.draws, inner.trees, make_verifier("coupled"))
        self._num_tokens = num_tokens
        self._sequences: dict[int, _Tentative] = {}

    @classmethod
    def build(cls, context: ProposerContext) -> CascadeProposer:
        config = read_options(CascadeConfig, cls.name, context.options)
        name = config.mid or ("bundled:mid" if context.model == "bundled" else None)
        if name is None:
            raise ConfigError(
                "proposer 'cascade' needs a middle model: give its option 'mid' a folder"
            )
        mid = context.load_drafter(name)
        kv = context.make_kv(mid)
        built: dict[str, Proposer] = {}

        def inside(proposer: str) -> Proposer:
            if proposer not in built:
                options = config.options if proposer == config.proposer else {}
                built[proposer] = proposer_class(proposer).build(
                    replace(
                        context,
                        target=mid,
                        model=name,
                        target_kv=kv,
                        proposer=inside,
                        options=options,
                    )
                )
            return built[proposer]

        inner = inside(config.proposer)
        if inner.needs.taps:
            raise ConfigError(
                f"proposer {config.proposer!r} reads the target's hidden states and cannot draft "
                "for a middle model; choose another one inside 'cascade'"
            )
        return cls(DraftMemory(mid, kv), inner, context.target.spec.num_tokens, config)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        lengths: dict[int, int] = {}
        slices: dict[int, Slice] = {}
        for view, budget in zip(views, budgets, strict=True):
            length = min(budget, self.memory.room(view))
            room = length + self.config.num_draft_tokens
            slice_ = self.memory.catch_up(view, room) if length > 0 else None
            if slice_ is not None:
                lengths[view.id] = length
                slices[view.id] = slice_
                self._follow(view)
                if view.id not in self._sequences:
                    self._sequences[view.id] = _Tentative(view, self._inner_draw)
                self._sequences[view.id].start_step()
        active = [self._sequences[view_id] for view_id in slices]
        for _ in range(self.config.passes):
            if not active:
                break
            self._pass(active, lengths, slices)
            active = [
                s
                for s in active
                if len(s.drawn) < lengths[s.id] and s.tokens[-1] not in s.finish_ids
            ]
        return [
            self._proposal(view) if view.id in slices else Proposal(source=self.name)
            for view in views
        ]

    def _pass(
        self, sequences: list[_Tentative], lengths: dict[int, int], slices: dict[int, Slice]
    ) -> None:
        """One pass of the middle model: its draws are appended to each sequence's tokens."""
        for s in sequences:
            s.num_computed = slices[s.id].context
        proposals = self._inner_drafts(sequences, lengths)
        for s, proposal in zip(sequences, proposals, strict=True):
            slice_ = slices[s.id]
            slice_.table = self.memory.kv.table(s.id)
            slice_.proposal = proposal
        logits_RV = self.memory.model.forward(pack([slices[s.id] for s in sequences])).logits_RV
        dists = RowDistributions(
            logits_RV,
            sequences,
            proposals,
            [s.edits for s in sequences],
            num_tokens=self._num_tokens,
        )
        draws = dists.draw()
        for s, proposal, root in zip(sequences, proposals, dists.starts, strict=True):
            mine = draws[root : root + 1 + len(proposal)]
            path = match(proposal.tokens, proposal.parents, mine)
            del path[lengths[s.id] - len(s.drawn) - 1 :]  # the draw after them costs nothing
            self._keep(s.id, len(s.tokens), path)
            rows = [0, *(1 + node for node in path)]
            drawn = up_to_finish([mine[row] for row in rows], s.finish_ids)
            s.tokens += drawn
            slices[s.id].context, slices[s.id].tokens = len(s.tokens) - 1, drawn[-1:]
            if s.outer.draw is Draw.SAMPLED:
                s.dists += [
                    dists.probs(root + row, root + row + 1)[0] for row in rows[: len(drawn)]
                ]
            s.untold = Observation(proposal, Verdict(path, drawn[-1], mine))

    def _inner_drafts(self, sequences: list[_Tentative], lengths: dict[int, int]) -> list[Proposal]:
        proposals = [Proposal() for _ in sequences]
        asked: list[int] = []
        budgets: list[int] = []
        for i, s in enumerate(sequences):
            if s.untold is not None:
                self._tell(s)
            # The pass adds one draw after the chain, so the chain is one token shorter.
            wanted = lengths[s.id] - len(s.drawn) - 1
            if wanted > 0:
                asked.append(i)
                limit = self.config.num_draft_tokens
                budgets.append(limit if self._inner.trees else min(limit, wanted))
        if asked:
            drafts = self._inner.propose([sequences[i] for i in asked], budgets)
            for i, draft in zip(asked, drafts, strict=True):
                proposals[i] = draft
        return proposals

    def _tell(self, s: _Tentative) -> None:
        assert s.untold is not None
        self._inner.observe([s], [s.untold])
        s.num_observed = len(s.tokens)
        s.untold = None

    def _keep(self, sequence_id: int, first_slot: int, path: list[int]) -> None:
        """Makes the accepted drafts' K/V contiguous."""
        source, target = self.memory.kv.compact(sequence_id, first_slot, path)
        if len(source):
            self.memory.model.copy_slots(source, target)

    def _proposal(self, view: SequenceView) -> Proposal:
        s = self._sequences[view.id]
        drawn = s.drawn
        self.memory.drafted(view, drawn[:-1])
        q = torch.stack(s.dists) if view.draw is Draw.SAMPLED else None
        return Proposal(drawn, draw=view.draw, q=q, source=self.name)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view in views:
            self.memory.settle(view)
            self._follow(view)

    def _follow(self, view: SequenceView) -> None:
        """Passes the target's verdicts on; releases what the inner proposer must forget."""
        s = self._sequences.get(view.id)
        if s is None:
            return
        if not s.follow():
            self._inner.release(view.id)
            s.untold = None
        elif s.untold is not None:
            self._tell(s)

    def release(self, sequence_id: int) -> None:
        self.memory.release(sequence_id)
        self._inner.release(sequence_id)
        self._sequences.pop(sequence_id, None)
