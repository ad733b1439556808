"""The target drafts for itself, in a copy with int8 or int4 weights.

The copy reads a quarter or an eighth of the bytes and agrees with the target nearly always, so
nothing has to be trained or found. It shares neither weights nor KV with the target.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.contracts import (
    Draw,
    Needs,
    Observation,
    Proposal,
    ProposerContext,
    SequenceView,
)
from outrider.errors import ConfigError, ModelError, UnknownName
from outrider.proposers._autoregressive import AutoregressiveDrafter
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers._options import read_options

_DTYPES = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedConfig:
    """int4 is a smaller copy that agrees less often: worth it where int8 still fills the cache."""

    dtype: str = "int8"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UnknownName("dtype of proposer 'quantized'", str(self.dtype), _DTYPES)


class QuantizedProposer:
    name = "quantized"
    draws = frozenset({Draw.COUPLED, Draw.SAMPLED})
    trees = False
    needs = Needs()

    def __init__(self, memory: DraftMemory, num_tokens: int) -> None:
        self._memory = memory
        self._drafter = AutoregressiveDrafter(memory, num_tokens, self.name)

    @classmethod
    def build(cls, context: ProposerContext) -> QuantizedProposer:
        config = read_options(QuantizedConfig, cls.name, context.options)
        try:
            model = context.load_model(context.model, dtype=config.dtype)
        except ModelError as error:
            raise ConfigError(
                f"proposer 'quantized' cannot make an {config.dtype} copy of the target ({error}); "
                "proposer 'early-exit' needs no copy"
            ) from error
        return cls(DraftMemory(model, context.make_kv(model)), context.target.spec.num_tokens)

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        return self._drafter.draft(views, budgets)

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view in views:
            self._memory.settle(view)

    def release(self, sequence_id: int) -> None:
        self._memory.release(sequence_id)
