"""Drafting heads that read a target's hidden states: Medusa, EAGLE, DFlash, MLP speculators.

Torch modules for training and inference. They hold no KV of their own (callers pass keys and values
in and get new ones back) and use the target's embedding and output head where they have none.
`outrider.model.dialects` reads the published layouts.

A *tap* k is the target's hidden state after k layers (0: the embeddings).
Shapes: S sequences, n rows of features, F width of all taps side by side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.contracts import IntArray, ModelSpec, OwnsKV, StepBatch
from outrider.model.borrowed import Borrowed
from outrider.model.dflash_head import DFlashConfig, DFlashHead
from outrider.model.dialects.reading import read_head
from outrider.model.eagle_head import Eagle3Config, Eagle3Head
from outrider.model.head_base import Head
from outrider.model.medusa_head import MedusaConfig, MedusaHeads
from outrider.model.mlp_head import MlpConfig, MlpHead
from outrider.sampling import RowParams

__all__ = [
    "DFlashConfig",
    "DFlashHead",
    "Eagle3Config",
    "Eagle3Head",
    "FastHead",
    "Head",
    "MedusaConfig",
    "MedusaHeads",
    "MlpConfig",
    "MlpHead",
    "RunsHeads",
    "TakesWeights",
    "load_head",
]


class FastHead(OwnsKV, Protocol):
    """A head with a paged KV of its own that drafts in one call, without its torch module."""

    spec: ModelSpec
    trees: bool  # whether it implements `capabilities.DraftsInOneCall`, trees included

    def use(self, features_nF: Tensor) -> None:
        """The next call reads these features, one row for each token of its batch."""
        ...

    def draft_chain(
        self,
        batch: StepBatch,
        num_tokens_S: IntArray,
        rows: RowParams,
        key_S: npt.NDArray[np.uint64],
    ) -> list[list[int]]:
        """`num_tokens_S[s]` tokens for sequence s; see `capabilities.DraftsInOneCall`."""
        ...


@runtime_checkable
class TakesWeights(Protocol):
    """A fast EAGLE head whose weights can be exchanged; its KV stays."""

    def take_weights(self, head: Eagle3Head) -> None: ...


@runtime_checkable
class RunsHeads(Protocol):
    """A target that can run heads with a paged KV, without their torch modules."""

    def head_weights(self, head: Head) -> tuple[str, ...]:
        """The possible dtypes of such a head, the default first; empty: it cannot run here."""
        ...

    def make_head(self, head: Head, borrowed: Borrowed, weights: str) -> FastHead:
        """Builds the fast head; `weights` must be one of `head_weights`."""
        ...


def load_head(
    folder: str | Path, *, num_layers: int | None = None, dtype: torch.dtype = torch.float32
) -> Head:
    """Loads a drafter's folder in any published layout; the head is in eval mode on the CPU.

    `num_layers` is the target's: some layouts leave to it which hidden states they read.
    """
    return read_head(Path(folder), num_layers).to(dtype).eval()
