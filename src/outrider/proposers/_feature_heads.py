"""Proposers whose head reads the target's features of every token and keeps keys and values.

On the native engine, and for EAGLE-3 on our GPU kernels, a head with a paged cache (`NativeRows`)
drafts in one call: native code, or one graph on the GPU. It drafts for requests whose drafts are
coupled and whose logits are not edited. The torch module over a `HeadMemory` drafts for all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from outrider.contracts import Draw, IntArray, Observation, Proposal, SequenceView, StepBatch
from outrider.kv.cache import KVCache
from outrider.layout import Slice, pack
from outrider.model.heads import FastHead
from outrider.proposers._autoregressive import target_keys
from outrider.proposers.head_memory import HeadMemory
from outrider.sampling import RowParams


@dataclass(slots=True)
class _Text:
    """One sequence: rows `first .. first + num_rows - 1` of its text are in the cache."""

    first: int
    num_rows: int = 0
    unread: list[torch.Tensor] = field(default_factory=list)  # [n, F] each
    end: int = 0  # index in the text after the last token with known features
    is_unobserved: bool = False  # steps of a plan have not all been observed


class ReadsFeatures(Protocol):
    def use(self, features_nF: torch.Tensor) -> None:
        """The next call reads these features, one row for each token of its batch."""
        ...


HeadT = TypeVar("HeadT", bound=ReadsFeatures)


class NativeRows(Generic[HeadT]):
    """State of a head with a paged cache, by sequence: rows in the cache and features not read yet.

    Drafts are written after a sequence's rows and dropped. The head reads accepted tokens again,
    with the target's features.
    """

    def __init__(
        self,
        head: HeadT,
        kv: KVCache,
        taps: Seq[int],
        prepare: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """`prepare` makes what the head reads of the taps side by side; None: it reads them."""
        self._prepare = prepare
        self.head = head
        self.kv = kv
        self._taps = taps
        self._texts: dict[int, _Text] = {}

    def see(self, view: SequenceView, seen: Observation) -> None:
        """Keeps the taps of a step; starts anew if they do not continue the last ones."""
        drafted = seen.proposal.drafted
        if drafted is not None and drafted.num_fed is not None and seen.verdict is not None:
            self._follow(view, len(seen.verdict.path) + 1, drafted.states_nF)
            return
        if drafted is not None and drafted.states_nF is not None:  # the head did not draft
            features_nF = drafted.states_nF
        elif seen.taps:
            features_nF = torch.cat([seen.taps[tap] for tap in self._taps], dim=1)
            if self._prepare is not None:
                features_nF = self._prepare(features_nF)
        else:
            return
        start = seen.start
        if drafted is not None and seen.verdict is not None:  # some may be of earlier steps
            start += len(seen.verdict.path) + 1 - len(features_nF)
        text = self._texts.get(view.id)
        if text is None or text.is_unobserved or text.end != start:
            text = self._texts[view.id] = _Text(start)
        text.unread.append(features_nF)
        text.end = start + len(features_nF)

    def _follow(self, view: SequenceView, num_tokens: int, unread_nF: torch.Tensor | None) -> None:
        """Records a step that the head drafted by plan: it has read all rows but `unread_nF`.

        None: further steps of the plan follow. If they are dropped, the text is read anew.
        """
        text = self._texts.get(view.id)
        if text is None:
            return
        text.end += num_tokens
        text.unread = [] if unread_nF is None else [unread_nF]
        if unread_nF is not None:
            text.num_rows = text.end - text.first - len(unread_nF)
            text.is_unobserved = False
        else:
            text.is_unobserved = True

    def knows(self, view: SequenceView) -> bool:
        """Whether the features of all tokens but the last are known: a draft needs them."""
        text = self._texts.get(view.id)
        return text is not None and bool(text.unread) and text.end == len(view.tokens) - 1

    def read_on(self, views: Seq[SequenceView], num_drafts: int) -> tuple[list[int], StepBatch]:
        """The rows to read before the next draft, and the views that they belong to.

        Reserves room for `num_drafts` more rows; views without room are left out.
        """
        members = [i for i, view in enumerate(views) if self.reserve(view, num_drafts)]
        batch = self.lay_out([views[i] for i in members])
        for i in members:
            text = self._texts[views[i].id]
            text.num_rows = text.end - text.first
            text.unread = []
        return members, batch

    def unread(self, views: Seq[SequenceView]) -> torch.Tensor:
        """The features of all rows to read next, one view after another."""
        return torch.cat([part for view in views for part in self._texts[view.id].unread])

    @property
    def reads_taps(self) -> bool:
        """Whether the head reads the taps as they are, side by side from the lowest layer."""
        return self._prepare is None and list(self._taps) == sorted(self._taps)

    def reserve(self, view: SequenceView, num_drafts: int) -> bool:
        """Reserves rows for unread features and drafts; drops the sequence if there is no room."""
        text = self._texts[view.id]
        if self.kv.reserve(view.id, text.end - text.first + num_drafts):
            return True
        self.release(view.id)
        return False

    def lay_out(self, views: Seq[SequenceView]) -> StepBatch:
        """The rows of unread features, as a batch; passes the features to the head."""
        slices: list[Slice] = []
        shifts: list[int] = []
        features: list[torch.Tensor] = []
        for view in views:
            text = self._texts[view.id]
            start, stop = text.first + text.num_rows, text.end
            tokens = view.tokens[start + 1 : stop + 1]  # each row reads the token after its own
            slices.append(Slice(tokens, text.num_rows, self.kv.table(view.id), Proposal()))
            shifts += [text.first] * len(tokens)
            features += text.unread
        batch = pack(slices)
        batch.positions_T += np.array(shifts, np.int32)
        if features:
            self.head.use(features[0] if len(features) == 1 else torch.cat(features))
        return batch

    def release(self, sequence_id: int) -> None:
        if self._texts.pop(sequence_id, None) is not None:
            self.kv.free(sequence_id)


class FeatureHeadProposer(ABC):
    """Drafts by a torch module, for views whose features it has."""

    name: str

    def __init__(self, taps: Seq[int], num_layers: int) -> None:
        self._taps = taps
        self._num_layers = num_layers
        self._memories: dict[int, HeadMemory] = {}

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = [Proposal(source=self.name) for _ in views]
        members = [i for i, view in enumerate(views) if self._knows(view)]
        if members:
            drafts = self._draft([views[i] for i in members], [budgets[i] for i in members])
            for i, proposal in zip(members, drafts, strict=True):
                proposals[i] = proposal
        return proposals

    def _knows(self, view: SequenceView) -> bool:
        """Whether the torch module has the features of all tokens but the last."""
        memory = self._memories.get(view.id)
        return memory is not None and memory.has_unread and memory.reaches(len(view.tokens) - 1)

    @abstractmethod
    def _draft(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        """Drafts by the torch module, for views whose features it has."""

    def observe(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            self._see(view, observation)

    def _see(self, view: SequenceView, seen: Observation) -> None:
        memory = self._memories.get(view.id)
        if memory is None:
            memory = self._memories[view.id] = HeadMemory(self._taps, self._num_layers)
        memory.see(seen)

    def release(self, sequence_id: int) -> None:
        self._memories.pop(sequence_id, None)


class NativeHeadProposer(FeatureHeadProposer):
    """Chooses between the fast head, if there is one, and the torch module, by view."""

    def __init__(
        self, taps: Seq[int], num_layers: int, native: NativeRows[FastHead] | None
    ) -> None:
        super().__init__(taps, num_layers)
        self._native = native

    def propose(self, views: Seq[SequenceView], budgets: Seq[int]) -> list[Proposal]:
        proposals = super().propose(views, budgets)
        members = [i for i, view in enumerate(views) if self._knows_natively(view)]
        if members:
            some = [views[i] for i in members]
            drafts = self._draft_natively(some, [budgets[i] for i in members])
            for i, proposal in zip(members, drafts, strict=True):
                proposals[i] = proposal
        return proposals

    def _knows_natively(self, view: SequenceView) -> bool:
        return self._native is not None and self._native.knows(view)

    @abstractmethod
    def _draft_natively(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        """Drafts by the fast head, for views whose features it has."""

    def _see(self, view: SequenceView, seen: Observation) -> None:
        if self._native is not None and self._is_native(view):
            self._native.see(view, seen)
        else:
            super()._see(view, seen)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        if self._native is not None:
            self._native.release(sequence_id)

    def _is_native(self, view: SequenceView) -> bool:
        return self._native is not None and view.draw is Draw.COUPLED and view.edits is None


class FastHeadProposer(NativeHeadProposer):
    """A fast head that drafts in one call."""

    def _draft_natively(self, views: list[SequenceView], budgets: list[int]) -> list[Proposal]:
        assert self._native is not None
        proposals = [Proposal(source=self.name) for _ in views]
        members, batch = self._native.read_on(views, self._num_scribbled)
        some = [views[i] for i in members]
        rows = RowParams.of([view.params for view in some], [1] * len(some))
        sizes = np.array([budgets[i] for i in members], np.int32)
        drafts = self._call(batch, sizes, rows, target_keys(some)) if some else []
        for i, (tokens, parents) in zip(members, drafts, strict=True):
            proposals[i] = Proposal(tokens, parents, draw=Draw.COUPLED, source=self.name)
        return proposals

    @property
    @abstractmethod
    def _num_scribbled(self) -> int:
        """The most rows that a native draft writes after a text."""

    @abstractmethod
    def _call(
        self, batch: StepBatch, sizes_S: IntArray, rows: RowParams, key_S: npt.NDArray[np.uint64]
    ) -> list[tuple[list[int], list[int] | None]]:
        """The native call: tokens and parents (None: a chain) of each sequence."""
