"""A separate, smaller model of the same vocabulary drafts (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import (
    Draw,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.draft_plans import Chain, DraftPlan, Propose
from outrider.errors import ConfigError, ModelError
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers.options import read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig:
    """`dtype` of the draft model's weights. None: int8 where the target runs natively with
    instructions for it or by our GPU kernels, else the engine's. Rounding a draft never changes an
    output."""

    dtype: str | None = None


class ModelProposer:
    """A model with a KV of its own drafts chains. Subclasses say `name` and how to `build`."""

    name: str
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs(every_step=False, stop_rules=True)  # what it fed beyond the text is fed again

    def __init__(self, memory: DraftMemory, num_tokens: int) -> None:
        self.memory = memory  # other proposers of the same model share it
        self._drafter = AutoregressiveDrafter(memory, num_tokens, self.name)

    @property
    def model(self) -> Model:
        """See `contracts.HasModel`."""
        return self.memory.model

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def plan(self, views: Seq[SequenceView], budgets: Seq[int], max_steps: int) -> DraftPlan:
        return self.plan_beside(views, list(budgets), max_steps) or Propose()

    def plan_beside(
        self,
        views: Seq[SequenceView],
        num_tokens: list[int],
        max_steps: int,
        max_found: Seq[int] | None = None,
    ) -> Chain | None:
        """See `DraftMemory.plan`."""
        chain = self.memory.plan(views, num_tokens, max_steps, self.name, max_found)
        if chain is not None:
            chain.stop_rules = [view.stop_rule for view in views]
        return chain

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            drafted = observation.proposal.drafted
            if drafted is not None and drafted.num_fed is not None:
                tokens = observation.proposal.tokens[: drafted.num_fed]
                self.memory.drafted(view, tokens, num_fed=observation.start + 1)
            self.memory.settle(view)

    def release(self, sequence_id: int) -> None:
        self.memory.release(sequence_id)


class DraftModelProposer(ModelProposer):
    name = "draft-model"

    @classmethod
    def build(cls, context: ProposerContext) -> DraftModelProposer:
        config = read_options(DraftModelConfig, cls.name, context.options)
        drafter = chosen_drafter(context, cls.name)
        dtype = config.dtype or context.target.spec.draft_dtype
        try:
            model = context.load_drafter(drafter, dtype=dtype)
        except ModelError:  # int8: a family that neither our native code nor our kernels run
            if config.dtype is not None or dtype is None:
                raise
            model = context.load_drafter(drafter)
        memory = DraftMemory(model, context.make_kv(model))
        return cls(memory, context.target.spec.num_tokens)


def chosen_drafter(context: ProposerContext, proposer: str) -> str:
    """The user's draft model; ConfigError where there is none."""
    if context.drafter is None:
        raise ConfigError(
            f"proposer {proposer!r} needs a draft model: pass --draft-model FOLDER "
            "(draft_model= in Python)"
        )
    return context.drafter
