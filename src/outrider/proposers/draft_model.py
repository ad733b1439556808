"""A separate, smaller model of the same vocabulary drafts (Leviathan 2023, Chen 2023)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import (
    AheadBatch,
    AheadStep,
    Draw,
    Model,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError, ModelError
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers._options import read_options


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
    needs = Needs(every_step=False, caution=True)  # what it fed beyond the text is fed again

    def __init__(self, memory: DraftMemory, num_tokens: int) -> None:
        self.memory = memory  # other proposers of the same model share it
        self._drafter = AutoregressiveDrafter(memory, num_tokens, self.name)

    @property
    def model(self) -> Model:
        """See `contracts.HasModel`."""
        return self.memory.model

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view in views:
            self.memory.settle(view)

    def release(self, sequence_id: int) -> None:
        self.memory.release(sequence_id)

    def goes_ahead(self, views: Seq[SequenceView]) -> bool:
        return True

    def begin_ahead(self, views: Seq[SequenceView], most_steps: int, batch: AheadBatch) -> bool:
        if any(view.caution is not None for view in views):
            batch.cautions = [view.caution for view in views]
        return self.memory.begin_ahead(views, most_steps, batch)

    def drafted_ahead(self, view: SequenceView, step: AheadStep, index: int) -> str:
        chain = step.chains[index]
        if step.levels is not None:
            if step.levels[index]:  # it holds all but the last token it drew
                self.memory.drafted(view, chain[: len(step.levels[index]) - 1])
        elif chain:
            num_own = len(chain) if step.num_own is None else step.num_own[index]
            self.memory.drafted(view, chain[: min(num_own, len(chain) - 1)])
        return self.name

    def end_ahead(self, view: SequenceView) -> None:
        self.memory.end_ahead(view)


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
