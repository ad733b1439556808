"""Rows with what the served target computes for them: the input of training and of replays.

The target itself, as it is served, gives the states: quantised weights included, and no second copy
of it is in memory.

Shapes: B rows (always 1), L positions, H hidden, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.learn.collect import Row
from outrider.model.borrowed import Borrowed
from outrider.train.data import pack_answers
from outrider.train.recipes.heads import FrozenTarget, columns_of, with_rest

PIECE = 64  # positions whose logits over the whole vocabulary are in memory at once


@dataclass(frozen=True, slots=True)
class TaughtRow:
    """States are kept in half the bits: the target's distribution is computed from them again.

    It is that of the row's temperature, and of 1 where that is 0.
    """

    packed_1L: Tensor  # see `data.pack_answers`
    temperature: float
    taps_LTH: Tensor
    last_LH: Tensor  # normalised: what the output head reads
    scale_L: Tensor  # log of the sum that turns logits into probabilities
    best_L: Tensor  # the draft column of the target's most likely token, or -1

    @property
    def num_bytes(self) -> int:
        parts = (self.packed_1L, self.taps_LTH, self.last_LH, self.scale_L, self.best_L)
        return sum(part.numel() * part.element_size() for part in parts)


class TaughtTarget(FrozenTarget):
    """A teacher that repeats what was computed for the row it shows."""

    def __init__(self, borrowed: Borrowed, taps: tuple[int, ...], ids_W: Tensor) -> None:
        self.borrowed, self.tap_layers, self.ids_W = borrowed, taps, ids_W
        self.head = SimpleNamespace(weight=borrowed.head_VH)
        self.embed = lambda ids: F.embedding(ids, borrowed.embedding_VH)
        bias = borrowed.head_bias_V
        self._reduced = replace(
            borrowed,
            head_VH=borrowed.head_VH[ids_W],
            head_bias_V=None if bias is None else bias[ids_W],
        )
        self._shown: TaughtRow | None = None

    @torch.no_grad()
    def teach(self, row: Row, states: Mapping[int, Tensor]) -> TaughtRow:
        """`states`: of the row's tokens, by tap; the largest key is the target's last layer."""
        last_LH = self.borrowed.normed(states[max(states)].float())
        scales, best = [], []
        for part_PH in torch.split(last_LH, PIECE):
            logits_PV = self.borrowed.logits(part_PH) / (row.temperature or 1.0)
            scales.append(logits_PV.logsumexp(-1))
            best.append(columns_of(logits_PV.argmax(-1), self.ids_W))
        ends = torch.tensor([row.first]), torch.tensor([len(row.tokens)])
        return TaughtRow(
            packed_1L=pack_answers(torch.tensor([row.tokens]), *ends).long(),
            temperature=row.temperature,
            taps_LTH=torch.stack([states[tap].bfloat16() for tap in self.tap_layers], dim=1),
            last_LH=last_LH.bfloat16(),
            scale_L=torch.cat(scales),
            best_L=torch.cat(best),
        )

    def show(self, row: TaughtRow) -> Tensor:
        """Answers from this row from now on; returns its packed tokens."""
        self._shown = row
        return row.packed_1L

    def taps(self, tokens_BL: Tensor, taps: tuple[int, ...]) -> Tensor:
        assert self._shown is not None
        return self._shown.taps_LTH[None].float()

    @torch.no_grad()
    def narrowed(self, tokens_BL: Tensor, ids_W: Tensor) -> tuple[Tensor, Tensor]:
        assert self._shown is not None
        row = self._shown
        logits_LW = self._reduced.logits(row.last_LH.float()) / (row.temperature or 1.0)
        return with_rest(logits_LW - row.scale_L[:, None])[None], row.best_L[None]
