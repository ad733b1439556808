"""A separate, smaller model of the same vocabulary drafts (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.contracts import (
    Draw,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError
from outrider.kv.cache import KVCache
from outrider.proposers._autoregressive import AutoregressiveDrafter


class DraftModelProposer:
    name = "draft-model"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs()

    def __init__(self, model: Model, *, kv: KVCache, num_tokens: int) -> None:
        self._drafter = AutoregressiveDrafter(model, kv, num_tokens, self.name)

    @classmethod
    def build(cls, context: ProposerContext) -> DraftModelProposer:
        if context.drafter is None:
            raise ConfigError(
                "proposer 'draft-model' needs a draft model: pass --draft-model FOLDER "
                "(draft_model= in Python)"
            )
        model = context.load_drafter(context.drafter)
        return cls(model, kv=context.make_kv(model), num_tokens=context.target.spec.num_tokens)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view in views:
            self._drafter.rollback(view)

    def release(self, sequence_id: int) -> None:
        self._drafter.release(sequence_id)
