"""Chains that grow by one token at a time, drawn from a drafter's logits as the requests ask.

Shape legend: R chains still growing, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.contracts import Draw, Proposal, SequenceView, Stream
from outrider.noise import draw_key, mix
from outrider.sampling import RowParams, distribution_of, draw_tokens, true_vocabulary


class Chains:
    """A chain for each view, of at most so many tokens; nothing follows a finishing token."""

    def __init__(self, views: Seq[SequenceView], lengths: Seq[int], num_tokens: int) -> None:
        """`num_tokens`: the size of the target's true vocabulary, over which q is defined."""
        self.tokens: list[list[int]] = [[] for _ in views]
        self.active = [i for i, length in enumerate(lengths) if length > 0]  # still growing
        self._views = views
        self._lengths = lengths
        self._num_tokens = num_tokens
        self._dists: list[list[torch.Tensor]] = [[] for _ in views]

    def draw(self, logits_RV: torch.Tensor) -> None:
        """One token more for each active chain, in order; may edit `logits_RV` in place."""
        views, active = self._views, self.active
        logits_RV = true_vocabulary(logits_RV, self._num_tokens)
        keys = []
        for row, i in enumerate(active):
            view, chain = views[i], self.tokens[i]
            if view.edits is not None:
                view.edits.apply(logits_RV[row], view.tokens, chain)
            keys.append(draft_key(view, len(chain), len(chain)))
        rows = RowParams.of([views[i].params for i in active], [1] * len(active))
        tokens = draw_tokens(logits_RV, rows, keys)
        if any(views[i].draw is Draw.SAMPLED for i in active):
            dist_RV = distribution_of(logits_RV, rows)
            for row, i in enumerate(active):
                self._dists[i].append(dist_RV[row])
        self.active = []
        for i, token in zip(active, tokens, strict=True):
            self.tokens[i].append(token)
            if len(self.tokens[i]) < self._lengths[i] and token not in views[i].finish_ids:
                self.active.append(i)

    def proposals(self, source: str) -> list[Proposal]:
        return [
            Proposal(
                chain,
                draw=view.draw,
                q=torch.stack(dist) if dist and view.draw is Draw.SAMPLED else None,
                source=source,
            )
            for view, chain, dist in zip(self._views, self.tokens, self._dists, strict=True)
        ]


def draft_key(view: SequenceView, depth: int, node: int) -> int:
    """The noise of one draw: `depth` tokens after the last committed one, the step's `node`-th.

    Coupled drafts share the target's noise of the position. Sampled drafts must not: the block and
    tree rules use siblings and later nodes of those they accept, so every node needs fresh noise.
    The next step drafts the same positions again, so every step needs fresh noise too.
    """
    start = len(view.tokens)
    if view.draw is Draw.COUPLED:
        return draw_key(view.seed, view.sample_index, start + depth, Stream.TARGET)
    return mix(draw_key(view.seed, view.sample_index, start, Stream.DRAFT) + node)
