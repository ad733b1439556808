"""The target drafts for itself, in a copy with int8 or int4 weights.

The copy reads a quarter or an eighth of the bytes and nearly always agrees with the target. It
needs no training and no second model. It shares neither weights nor KV with the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.contracts import ProposerContext
from outrider.errors import ConfigError, ModelError, UnknownName
from outrider.proposers._draft_memory import DraftMemory
from outrider.proposers.draft_model import ModelProposer
from outrider.proposers.options import read_options

_DTYPES = ("int8", "int4")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedConfig:
    """int4 is smaller and agrees less often: for copies that in int8 exceed the cache."""

    dtype: str = "int8"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise UnknownName("dtype of proposer 'quantized'", str(self.dtype), _DTYPES)


class QuantizedProposer(ModelProposer):
    name = "quantized"

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
