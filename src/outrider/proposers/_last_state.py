"""Proposers whose head reads one state: the target's last, of the last token it has computed."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.contracts import Observation, SequenceView


class LastStates:
    """By sequence: the last hidden state that was shown, and the index of the token it is of."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._states: dict[int, tuple[int, torch.Tensor]] = {}

    def see(self, views: Seq[SequenceView], seen: Seq[Observation]) -> None:
        for view, observation in zip(views, seen, strict=True):
            drafted, verdict = observation.proposal.drafted, observation.verdict
            if drafted is not None and verdict is not None and drafted.states_nF is not None:
                index = observation.start + len(verdict.path)
                self._states[view.id] = (index, drafted.states_nF[-1])
            elif self._layer in observation.taps:
                hidden_nH = observation.taps[self._layer]
                index = observation.start + len(hidden_nH) - 1
                self._states[view.id] = (index, hidden_nH[-1].clone())

    def knows(self, view: SequenceView) -> bool:
        """Whether we have the state of the last token that the target has computed."""
        index, _ = self._states.get(view.id, (-1, None))
        return 0 <= index == len(view.tokens) - 2

    def of(self, views: Seq[SequenceView]) -> torch.Tensor:
        """[B, H], before the target's last norm."""
        return torch.stack([self._states[view.id][1] for view in views])

    def release(self, sequence_id: int) -> None:
        self._states.pop(sequence_id, None)
