"""What the tests of the native engine share: odd sizes, instruction sets, hand-made batches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from family_models import FAMILY_CONFIGS
from outrider import native
from outrider.contracts import StepBatch
from outrider.errors import ConfigError
from outrider.model.families import read_decoder_config
from outrider.model.native_description import cannot_run
from tiny_models import SMALL

ZOO = bool(os.environ.get("OUTRIDER_ZOO"))  # all families, not a sample
needs_native = pytest.mark.skipif(not native.available(), reason=native.why_unavailable())

# Multiples of nothing: every padding and every tail is used.
ODD: dict[str, Any] = SMALL | {
    "vocab_size": 77,
    "hidden_size": 42,
    "intermediate_size": 53,
    "num_attention_heads": 6,
    "head_dim": 22,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}


def _usable() -> list[str]:
    if not native.available():
        return ["portable"]
    usable, before = [], os.environ.get("OUTRIDER_ISA")
    for name in ("avx512_bf16", "avx512", "avx2", "i8mm", "dotprod", "neon", "portable"):
        os.environ["OUTRIDER_ISA"] = name
        try:
            usable.append(native.isa())
        except ConfigError:
            continue
    del os.environ["OUTRIDER_ISA"]
    if before is not None:
        os.environ["OUTRIDER_ISA"] = before
    return usable


ISAS = _usable()


def families(*, native_step: bool = False, recurrent: bool = False) -> list[str]:
    """Names in `FAMILY_CONFIGS`: those that the native step runs, those with recurrent layers."""
    found = []
    for name, config in FAMILY_CONFIGS.items():
        described = read_decoder_config(config.to_dict())
        if (native_step and cannot_run(described)) or (recurrent and described.mixer is None):
            continue
        found.append(name)
    return found


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, size=count)]


def batch_of(tokens: Sequence[int], *, context: int, width: int) -> StepBatch:
    """One sequence over blocks 0, 1, ...; logits for every token."""

    def ints(values: Any) -> Any:
        return np.array(values, dtype=np.int32)

    count = len(tokens)
    return StepBatch(
        tokens_T=ints(tokens),
        positions_T=ints(range(context, context + count)),
        starts_S1=ints([0, count]),
        context_S=ints([context]),
        tables_SW=ints([list(range(width))]),
        logit_rows_R=ints(range(count)),
    )
